"""What `trainflow gc` finds and removes on every kind of store."""

from __future__ import annotations

from flows.garbage import find_garbage
from flows.past_runs import find_run, list_runs
from tests.support.recorded import collect, commit_stage, committed, folders, nightly, publish_run
from trainer_lib.commit import COMMIT
from trainer_lib.storage import Store


def test_without_a_number_every_run_stays_and_what_no_run_names_goes(any_url: str) -> None:
    ids = nightly(any_url, 3)
    kept = folders(any_url, *ids)
    commit_stage(any_url, "train", "of no run")
    found = find_garbage(any_url)
    assert [(item.kind, item.folder[0], item.why) for item in found.items] == [
        ("stage", "train", "no run refers to it")
    ]
    assert found.bytes > 1000
    assert committed(any_url) > kept, "looking changes nothing"
    _, gone = collect(any_url)
    assert len(gone) == 1
    assert committed(any_url) == kept
    assert [run.id for run in list_runs(any_url)] == ids[::-1]
    assert find_garbage(any_url).items == []


def test_old_runs_go_with_what_only_they_refer_to(any_url: str) -> None:
    ids = nightly(any_url, 5)
    nightly(any_url, 1, pipeline="other")
    kept = folders(any_url, *ids[3:]) | {each for each in committed(any_url) if each not in folders(any_url, *ids)}
    found, _ = collect(any_url, keep=2)
    assert [run.id for run in list_runs(any_url) if run.name == "toy"] == ids[:2:-1]
    assert committed(any_url) == kept, "the data of the first day is that of the last"
    assert {run.id for run in list_runs(any_url) if run.name == "other"} <= set(found.kept)
    root = Store.open(any_url)
    assert not [info.path for info in root.list() if any(each in info.path for each in ids[:3])]
    if root.is_local:
        assert len(list(root.local_path("stages/train").iterdir())) == 3, "no empty folder is left"


def test_a_published_run_stays_as_long_as_its_publication_is_there(any_url: str) -> None:
    ids = nightly(any_url, 3)
    run = find_run(any_url, ids[0], field="RUN")
    target = Store.open(any_url).child("hub", "toy")
    publish_run(any_url, target, ids[0])
    found, _ = collect(any_url, keep=1)
    assert found.kept[ids[0]].startswith("published as ")
    assert ("train", run.stages["train"][:16]) in committed(any_url)
    # Also without the run's record, which a person has deleted.
    Store.open(any_url).child("runs", ids[0]).delete_tree()
    collect(any_url)
    assert ("train", run.stages["train"][:16]) in committed(any_url)
    target.child("revisions", "00001-abc").delete(COMMIT)
    found, _ = collect(any_url)
    assert ("train", run.stages["train"][:16]) not in committed(any_url)
    assert target.list() == [] or {info.path.partition("/")[0] for info in target.list()} == {"lease"}
