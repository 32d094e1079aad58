"""What `trainflow gc` finds and removes, and what it never touches."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.recorded import collect, commit_stage, committed, folders, leave_sign, nightly, record_run
from trainer_lib.errors import InfrastructureError
from trainer_lib.locks.lease import Holder, acquire_lease
from trainer_lib.locks.removal import protect_from_removal
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, write_commit
from trainer_lib.trackers.mlflow import mlflow_client, mlflow_registry
from trainer_lib.trackers.mlflow.mlflow_registry import ModelVersion
from trainflow.flows.cli import main as cli
from trainflow.flows.cli import options
from trainflow.flows.records.past_runs import find_run, list_runs, tag_run
from trainflow.flows.runs.garbage import find_garbage, remove_garbage


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path)


def sign(storage: str, run_id: str, holder: Holder) -> None:
    leave_sign(Store.open(storage).child("runs", run_id), holder)


def test_the_newest_that_finished_and_a_tagged_one_stay_beside_those_that_failed(storage: str) -> None:
    ids = nightly(storage, 3)
    for day in (4, 5):
        record_run(storage, f"{day}" * 16, day=day, status="FAILED")
    tag_run(storage, find_run(storage, ids[0], field="RUN"), "baseline")
    found, _ = collect(storage, keep=2)
    assert found.kept[ids[0]] == "tagged baseline"
    assert found.kept[ids[2]] == "the newest of toy that finished"
    assert {run.id for run in list_runs(storage)} == {ids[0], ids[2], "4" * 16, "5" * 16}
    assert committed(storage) == folders(storage, ids[0], ids[2])


def test_what_a_failed_run_worked_in_stays_while_the_run_is_recorded(storage: str) -> None:
    key = commit_stage(storage, "train", "half made")
    store = Store.open(storage).child("stages", "train", key[:16])
    store.delete(COMMIT)
    store.write_bytes("checkpoints/checkpoint-4/model.safetensors", b"half")
    record_run(storage, "a" * 16, day=1, status="KILLED", worked_in={"train": key})
    _, gone = collect(storage)
    assert gone == set(), "the next training removes the rest of the save"
    for day in (2, 3):
        record_run(storage, str(day) * 16, day=day)
    collect(storage, keep=2)
    assert store.list() == []


def test_a_link_is_named_and_left_with_what_is_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, outside = tmp_path / "storage", tmp_path / "outside"
    nightly(str(storage), 1)
    nightly(str(outside), 2, pipeline="other")
    key = commit_stage(str(storage), "train", "half made")
    Store.open(str(storage)).child("stages", "train", key[:16]).delete(COMMIT)
    links = {
        "runs/aaaa": "runs/" + list_runs(str(outside))[0].id,
        f"runs/{list_runs(str(storage))[0].id}/tags": "runs",
        "stages/evaluate/bbbb": "stages/evaluate",
        "stages/follow": "stages/train",
        f"stages/train/{key[:16]}/checkpoints": "",  # goes with its folder
        "stages/train/cccc": "",
        "hub": "stages",
        "limited": "",
    }
    for link, target in links.items():
        (storage / link).parent.mkdir(exist_ok=True)
        (storage / link).symlink_to(outside / target)
    before = sorted(outside.rglob("*"))
    found, gone = collect(str(storage), keep=1)
    assert gone == {f"{storage}/stages/train/{key[:16]}"}
    left = sorted(f"{storage}/{link}" for link in links if "checkpoints" not in link)
    assert sorted(found.links) == left
    assert sorted(outside.rglob("*")) == before
    monkeypatch.setattr(options, "quiet_environment", lambda: None)
    cli.application()(["gc", "--storage", str(storage), "--delete", "--skip-registry"], standalone_mode=False)
    told = capsys.readouterr().out.replace("\n", "")
    assert all(f"link  {link}  neither followed" in told for link in left)
    assert sorted(outside.rglob("*")) == before


def test_the_command_that_is_named_removes_what_was_shown(
    storage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = nightly(storage, 3)
    monkeypatch.setattr(options, "quiet_environment", lambda: None)
    words = ["gc", "--storage", storage, "--keep", "1", "--skip-registry"]
    monkeypatch.setattr("sys.argv", ["trainflow", *words])
    cli.application()(words, standalone_mode=False)
    command = capsys.readouterr().out.replace("\n", "").partition("would be freed: trainflow ")[2].split()
    assert command == [*words, "--delete"]
    cli.application()(command, standalone_mode=False)
    assert committed(storage) == folders(storage, ids[2])


def test_nothing_goes_while_the_registry_cannot_be_asked(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "sqlite:////nowhere/mlflow.db"
    ids = nightly(storage, 3)
    record_run(storage, ids[0], day=1, mlflow_run_id="a" * 32, tracking_uri=gone)
    found = find_garbage(storage, keep=1)
    assert found.items, "it is shown all the same"
    with pytest.raises(InfrastructureError, match="registry cannot be asked") as caught:
        remove_garbage(storage, found)
    assert caught.value.value == gone
    assert "--skip-registry" in str(caught.value.remedy)
    assert len(list_runs(storage)) == 3
    with monkeypatch.context() as patched:  # another server knows nothing of the lost database
        patched.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        assert "its database is not there" in str(find_garbage(storage, keep=1).obstacle)
    with closing(sqlite3.connect(f"{storage}/mlflow.db")) as made, made:  # the storage was moved, its database with it
        made.execute("CREATE TABLE model_versions (name TEXT, version TEXT)")
    assert find_garbage(storage, keep=1).obstacle is None
    collect(storage, keep=1, skip_registry=True)
    assert [run.id for run in list_runs(storage)] == [ids[2]]


def test_a_registered_version_keeps_its_run_and_the_folder_that_it_names(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = nightly(storage, 5)
    stages = {run.id: dict(run.stages) for run in list_runs(storage)}
    record_run(storage, ids[0], day=1, stages=stages[ids[0]], mlflow_run_id="a" * 32)
    by_source, by_tag = (stages[run_id]["train"][:16] for run_id in ids[1:3])
    versions = [
        ModelVersion("digits", "1", "a" * 32, "runs:/x/model", {}),
        ModelVersion("digits", "2", "", Path(storage, "stages", "train", by_source, "model").as_uri(), {}),
        ModelVersion("digits", "3", "b" * 32, "elsewhere", {"trainflow.train": by_tag}),
    ]
    with closing(sqlite3.connect(f"{storage}/mlflow.db")) as made, made:
        made.execute("CREATE TABLE model_versions (name TEXT, version TEXT)")
        made.execute("INSERT INTO model_versions VALUES ('digits', '1')")
    monkeypatch.setattr(mlflow_client, "connect", lambda uri: uri)
    monkeypatch.setattr(mlflow_registry, "list_model_versions", lambda client: versions)
    found, _ = collect(storage, keep=1)
    assert [found.kept[each] for each in ids[:3]] == [f"registered as digits version {n}" for n in (1, 2, 3)]
    assert committed(storage) == folders(storage, *ids[:3], ids[4])


def test_what_a_process_works_in_or_reads_stays(storage: str) -> None:
    held, read, free = (commit_stage(storage, "train", seed) for seed in ("held", "read", "free"))
    stages = Store.open(storage).child("stages", "train")
    checkpoint = stages.child(read[:16], "checkpoints", "checkpoint-4")
    write_commit(checkpoint, "checkpoint", [checkpoint.write_bytes("model.safetensors", b"x")], {"step": 4})
    lease = acquire_lease(stages.child(held[:16]))
    assert lease is not None
    with lease, protect_from_removal(checkpoint):
        found, gone = collect(storage)
        assert set(found.in_use) == {stages.child(each[:16]).url for each in (held, read)}
        assert gone == {stages.child(free[:16]).url}
    _, gone = collect(storage)
    assert len(gone) == 2


def test_a_run_at_work_stays_whatever_its_age(storage: str) -> None:
    ids = nightly(storage, 5)
    here = Holder.this_process()
    sign(storage, ids[0], here)
    sign(storage, ids[1], replace(here, machine="elsewhere/boot/pids"))
    sign(storage, ids[2], replace(here, started="1"))  # its process died
    found, _ = collect(storage, keep=1)
    assert found.kept[ids[0]] == f"at work: {here}"
    assert {run.id for run in list_runs(storage)} == {ids[0], ids[1], ids[4]}


def test_a_reference_that_appears_between_the_look_and_the_removal_counts(storage: str) -> None:
    ids = nightly(storage, 3)
    key = commit_stage(storage, "train", "of no run yet")
    old = find_run(storage, ids[0], field="RUN")
    found = find_garbage(storage, keep=1)
    record_run(storage, "e" * 16, day=9, status="RUNNING", stages={}, worked_in={"train": key})
    sign(storage, ids[0], Holder.this_process())
    removed = {item.store.url for item in remove_garbage(storage, found)}
    assert Store.open(storage).child("stages", "train", key[:16]).url not in removed
    assert committed(storage) == {("train", key[:16])} | folders(storage, ids[0], ids[2])
    assert find_run(storage, ids[0], field="RUN") == old


def test_what_no_run_needs_goes_but_not_a_run_that_starts(storage: str) -> None:
    nightly(storage, 1)
    nightly(f"{storage}/limited", 2)
    kept, runs = committed(storage), Store.open(storage).child("runs")
    Store.open(storage).write_bytes("limited/hub/toy/revisions/00001-def/model.safetensors", b"of two steps")
    runs.write_bytes("torn/run.json", b'{"name": "to')
    runs.write_bytes("starting/source/recipe.py", b"pass")
    sign(storage, "starting", Holder.this_process())
    _, gone = collect(storage)
    assert any(url.endswith("limited/hub/toy") for url in gone)
    assert {url for url in gone if url.startswith(runs.url)} == {runs.child("torn").url}
    assert committed(storage) == kept
    assert committed(f"{storage}/limited") == set()
    assert list_runs(f"{storage}/limited") == []
