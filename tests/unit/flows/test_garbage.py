"""What `trainflow gc` finds and removes, and what it never touches."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flows.garbage import Garbage, find_garbage, remove_garbage
from flows.past_runs import find_run, list_runs, tag_run
from tests.support.recorded import commit_stage, committed, nightly, record_run
from tests.support.repository import ROOT
from trainer_lib.commit import COMMIT, write_commit
from trainer_lib.errors import InfrastructureError
from trainer_lib.locks.lease import Holder, acquire_lease
from trainer_lib.locks.readers import protect_from_removal
from trainer_lib.storage import Store


def collect(storage: str, keep: int | None = None, **how: Any) -> tuple[Garbage, set[str]]:
    """Find and remove; what was found, and the URLs of what is gone."""
    found = find_garbage(storage, keep=keep, **how)
    return found, {item.store.url for item in remove_garbage(storage, found, **how)}


def folders(storage: str, *run_ids: str) -> set[tuple[str, str]]:
    """The folders that these runs refer to."""
    by_id = {run.id: run for run in list_runs(storage)}
    return {(stage, key[:16]) for each in run_ids for stage, key in by_id[each].stages.items()}


def sign(storage: str, run_id: str, holder: Holder) -> None:
    record = json.dumps({"holder": asdict(holder), "flow_run_id": None}).encode()
    Store.open(storage).child("runs", run_id).write_bytes("alive/one.json", record)


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


def test_the_newest_that_finished_stays_beside_those_that_failed(tmp_path: Path) -> None:
    ids = nightly(str(tmp_path), 2)
    for day in (3, 4):
        record_run(str(tmp_path), f"{day}" * 16, day=day, status="FAILED")
    found, _ = collect(str(tmp_path), keep=2)
    assert found.kept[ids[1]] == "the newest of toy that finished"
    assert {run.id for run in list_runs(str(tmp_path))} == {ids[1], "3" * 16, "4" * 16}
    assert committed(tmp_path) == folders(str(tmp_path), ids[1])


def test_what_a_failed_run_worked_in_stays_while_the_run_is_recorded(tmp_path: Path) -> None:
    storage = str(tmp_path)
    key = commit_stage(storage, "train", "half made")
    store = Store.open(storage).child("stages", "train", key[:16])
    store.delete(COMMIT)
    store.write_bytes("checkpoints/checkpoint-4/model.safetensors", b"half")
    record_run(storage, "a" * 16, day=1, status="KILLED", worked_in={"train": key})
    found = find_garbage(storage)
    assert [(item.kind, item.why) for item in found.items] == [("checkpoints", "left by an interrupted save")]
    _, gone = collect(storage)
    assert gone == {store.url}
    assert store.exists("key.json")
    assert not store.exists("checkpoints/checkpoint-4/model.safetensors")
    for day in (2, 3):
        record_run(storage, str(day) * 16, day=day)
    collect(storage, keep=2)
    assert store.list() == []


def test_a_tagged_run_stays(tmp_path: Path) -> None:
    storage = str(tmp_path)
    ids = nightly(storage, 4)
    tag_run(storage, find_run(storage, ids[0], field="RUN"), "baseline")
    found, _ = collect(storage, keep=1)
    assert found.kept[ids[0]] == "tagged baseline"
    assert committed(storage) == folders(storage, ids[0], ids[3])


def publish(storage: str, target: Store, run_id: str, train: str) -> None:
    """A publication of a run's model, as push-to-hub leaves it."""
    revision = target.child("revisions", "00001-abc")
    write_commit(revision, "published", [revision.write_bytes("model.safetensors", b"weights")], {})
    facts = {"target": target.url, "published_url": revision.url, "revision": "00001-abc", "published_digest": "0" * 64}
    key = commit_stage(storage, "push-to-hub", f"of {run_id}", facts=facts)
    store = Store.open(storage).child("stages", "push-to-hub", key[:16])
    record = json.loads(store.read_bytes("key.json"))
    record["fields"]["stage_keys"] = {"train": train}
    store.write_bytes("key.json", json.dumps(record).encode())
    folder = Store.open(storage).child("runs", run_id)
    run = json.loads(folder.read_bytes("run.json"))
    folder.write_bytes("run.json", json.dumps({**run, "stages": {**run["stages"], "push-to-hub": key}}).encode())


def test_a_published_run_stays_as_long_as_its_publication_is_there(any_url: str) -> None:
    ids = nightly(any_url, 3)
    run = find_run(any_url, ids[0], field="RUN")
    target = Store.open(any_url).child("hub", "toy")
    publish(any_url, target, ids[0], run.stages["train"])
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


def database(path: Path, **version: str) -> None:
    with closing(sqlite3.connect(path)) as made:
        made.execute("CREATE TABLE model_versions (name TEXT, version TEXT)")
        if version:
            made.execute("INSERT INTO model_versions VALUES (?, ?)", tuple(version.values()))
        made.commit()


def test_nothing_goes_while_the_registry_cannot_be_asked(tmp_path: Path) -> None:
    storage = str(tmp_path)
    ids = nightly(storage, 3)
    gone = "sqlite:////nowhere/mlflow.db"
    record_run(storage, ids[0], day=1, mlflow_run_id="a" * 32, tracking_uri=gone)
    found = find_garbage(storage, keep=1)
    assert found.items, "it is shown all the same"
    with pytest.raises(InfrastructureError, match="registry cannot be asked") as caught:
        remove_garbage(storage, found)
    assert caught.value.value == gone
    assert "--skip-registry" in str(caught.value.remedy)
    assert len(list_runs(storage)) == 3
    database(tmp_path / "mlflow.db")  # the storage was moved, and its database is beside it
    assert find_garbage(storage, keep=1).obstacle is None
    collect(storage, keep=1, skip_registry=True)
    assert [run.id for run in list_runs(storage)] == [ids[2]]


def test_a_registered_version_keeps_its_run_and_the_folder_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_lib.trackers import mlflow_client, model_versions
    from trainer_lib.trackers.model_versions import ModelVersion

    storage = str(tmp_path)
    ids = nightly(storage, 5)
    runs = {run.id: run for run in list_runs(storage)}
    record_run(storage, ids[0], day=1, stages=dict(runs[ids[0]].stages), mlflow_run_id="a" * 32)
    by_source = runs[ids[1]].stages["train"][:16]
    by_tag = runs[ids[2]].stages["train"][:16]
    versions = [
        ModelVersion("digits", "1", "a" * 32, "runs:/x/model", {}),
        ModelVersion("digits", "2", "", (tmp_path / "stages" / "train" / by_source / "model").as_uri(), {}),
        ModelVersion("digits", "3", "b" * 32, "elsewhere", {"trainflow.train": by_tag}),
    ]
    database(tmp_path / "mlflow.db", name="digits", version="1")
    monkeypatch.setattr(mlflow_client, "connect", lambda uri: uri)
    monkeypatch.setattr(model_versions, "list_model_versions", lambda client: versions)
    found, _ = collect(storage, keep=1)
    assert [found.kept[each] for each in ids[:3]] == [f"registered as digits version {n}" for n in (1, 2, 3)]
    assert committed(storage) == folders(storage, *ids[:3], ids[4])


def test_what_a_process_works_in_or_reads_stays(tmp_path: Path) -> None:
    storage = str(tmp_path)
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


def test_a_run_at_work_stays_whatever_its_age(tmp_path: Path) -> None:
    storage = str(tmp_path)
    ids = nightly(storage, 5)
    here = Holder.this_process()
    sign(storage, ids[0], here)
    sign(storage, ids[1], replace(here, machine="elsewhere/boot/pids"))
    sign(storage, ids[2], replace(here, started="1"))  # its process died
    found, _ = collect(storage, keep=1)
    assert found.kept[ids[0]] == f"at work: {here}"
    assert {run.id for run in list_runs(storage)} == {ids[0], ids[1], ids[4]}


def test_a_reference_that_appears_between_the_look_and_the_removal_counts(tmp_path: Path) -> None:
    storage = str(tmp_path)
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


def test_limited_runs_and_leftovers_of_publications_go(tmp_path: Path) -> None:
    storage = str(tmp_path)
    nightly(storage, 1)
    nightly(f"{storage}/limited", 2)
    (tmp_path / "hub" / "toy" / "revisions" / "00002-def").mkdir(parents=True)
    (tmp_path / "hub" / "toy" / "revisions" / "00002-def" / "model.safetensors").write_bytes(b"half")
    kept = committed(storage)
    _, gone = collect(storage)
    assert any(url.endswith("00002-def") for url in gone)
    assert committed(storage) == kept
    assert committed(tmp_path / "limited") == set()
    assert list_runs(f"{storage}/limited") == []


def test_a_folder_without_a_record_goes_but_not_a_new_plan(tmp_path: Path) -> None:
    storage = str(tmp_path)
    runs = Store.open(storage).child("runs")
    runs.write_bytes("torn/run.json", b'{"name": "to')
    runs.write_bytes("planned/plan.json", b'{"planned": {"made": "2999-01-01T00:00:00Z"}}')
    runs.write_bytes("forgotten/plan.json", b'{"planned": {"made": "2020-01-01T00:00:00Z"}}')
    runs.write_bytes("starting/source/recipe.py", b"pass")
    sign(storage, "starting", Holder.this_process())
    _, gone = collect(storage)
    assert gone == {runs.child(name).url for name in ("torn", "forgotten")}


_GC = """
    import sys
    from flows.garbage import find_garbage, remove_garbage
    storage = sys.argv[1]
    print("ready", flush=True)
    sys.stdin.readline()
    removed = remove_garbage(storage, find_garbage(storage, keep=2))
    print(len(removed), flush=True)
"""


_CLEANING = """
    import sys, time
    from flows.garbage import find_garbage, remove_garbage
    storage = sys.argv[1]
    print("ready", flush=True)
    sys.stdin.readline()
    removed, end = [], time.monotonic() + 6
    while time.monotonic() < end:
        removed += remove_garbage(storage, find_garbage(storage, keep=2))
    print(len(removed), flush=True)
"""


def _process(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_at_once_remove_everything_once(tmp_path: Path) -> None:
    storage = str(tmp_path)
    ids = nightly(storage, 40)
    found = find_garbage(storage, keep=2)
    kept = folders(storage, *ids[-2:])
    with _process(_GC, storage) as one, _process(_GC, storage) as other:
        counts = []
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in (one, other):
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            counts.append(int(out))
    assert len(found.items) <= sum(counts) <= 2 * len(found.items)
    assert committed(storage) == kept
    assert {run.id for run in list_runs(storage)} == set(ids[-2:])
    assert find_garbage(storage, keep=2).items == []


_RUNS = """
    # A pipeline that takes up what earlier runs left: as the flow does, it gives a sign of life, waits for a removal,
    # names the folder in its record, and only then looks for the result; without one it makes it again under the lease.
    import hashlib, json, sys, time
    from dataclasses import asdict
    from trainer_lib.locks.removal import await_removal
    from tests.support.recorded import commit_stage, key_of
    from trainer_lib.locks.lease import Holder, acquire_lease
    from trainer_lib.storage import Store
    storage, seconds = sys.argv[1], float(sys.argv[2])
    print("ready", flush=True)
    sys.stdin.readline()
    start, rounds, lost, made = time.monotonic(), 0, 0, 0
    while time.monotonic() - start < seconds:
        rounds += 1
        seed = f"toy {rounds % 12 + 1}"
        key = key_of("train", seed)
        folder = Store.open(storage).child("runs", hashlib.sha256(seed.encode()).hexdigest()[:16])
        about = {"holder": asdict(Holder.this_process()), "flow_run_id": None}
        folder.write_bytes("alive/me.json", json.dumps(about).encode())
        while await_removal(folder):
            folder.write_bytes("alive/me.json", json.dumps(about).encode())
        record = {"name": "toy", "status": "RUNNING", "started": "2026-10-01", "worked_in": {"train": key.digest}}
        folder.write_bytes("run.json", json.dumps(record).encode())
        stage = Store.open(storage).child("stages", "train", key.folder)
        def done():
            while stage.exists("COMMIT.json"):
                if not await_removal(stage):
                    return True
            return False
        if not done():
            lease = acquire_lease(stage, wait=done)
            if lease is not None:
                with lease:
                    if not done():
                        commit_stage(storage, "train", seed)
                        made += 1
        # From here on the result must stay until the run has ended.
        for _ in range(5):
            if not (done() and stage.exists("result.bin")) or not folder.exists("run.json"):
                lost += 1
            time.sleep(0.002)
        record["status"] = "FINISHED"
        folder.write_bytes("run.json", json.dumps(record).encode())
        folder.delete("alive/me.json")
    print(json.dumps([rounds, made, lost]), flush=True)
"""


def test_beside_runs_at_work_nothing_that_they_refer_to_goes(tmp_path: Path) -> None:
    storage = str(tmp_path)
    nightly(storage, 3)
    with (
        _process(_RUNS, storage, "6") as working,
        _process(_CLEANING, storage) as one,
        _process(_CLEANING, storage) as two,
    ):
        for process in (working, one, two):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        outs = [process.communicate(timeout=150)[0] for process in (working, one, two)]
        assert [process.returncode for process in (working, one, two)] == [0, 0, 0]
    rounds, made, lost = json.loads(outs[0])
    assert rounds > 5
    assert sum(int(out) for out in outs[1:]) > 3, "both sides were at it"
    assert lost == 0, f"{lost} of {rounds} runs lost what they referred to ({made} results were made again)"
