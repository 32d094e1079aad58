"""Storages with recorded runs and committed results, made by hand: no stage is run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer_lib.base.records import to_record
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store
from trainer_lib.storage.commit import write_commit
from trainflow.flows.records.past_runs import list_runs
from trainflow.flows.runs.garbage import Garbage, find_garbage, remove_garbage
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.keys.keys import StageKey, stage_key
from trainflow.tasks.stage.facts import StageFacts
from trainflow.tasks.stage.manifest import stage_store

STAGES = ("prepare-data", "train", "evaluate")
_FACTS: dict[str, dict[str, Any]] = {"prepare-data": {"splits": {}}, "predict": {"rows": 1, "split": "test"}}


def key_of(stage: str, seed: str) -> StageKey:
    return stage_key(stage, {"seed": seed, "recipe": {"recipe.py:prepare": hashlib.sha256(seed.encode()).hexdigest()}})


def commit_stage(
    storage: str, stage: str, seed: str, *, metrics: dict[str, Any] | None = None, facts: dict[str, Any] | None = None
) -> str:
    """Commit a result of 1,000 bytes under the key that `seed` makes, unless it is there, and return the key."""
    key = key_of(stage, seed)
    store = Store.open(storage).child("stages", stage, key.folder)
    if store.exists("COMMIT.json"):
        return key.digest
    store.write_bytes("key.json", key.to_json())
    entry = store.write_bytes("result.bin", seed.encode().ljust(1000, b"."))
    named = {**_FACTS.get(stage, {}), **(facts or {}), "reason": "never run before", "attempt": 1, "batch_halvings": 0}
    write_commit(store, "stage", [entry], {"stage": stage, "key": key.digest, "metrics": metrics or {}, "meta": named})
    return key.digest


def commit_facts(storage: str, key: StageKey, facts: StageFacts, *, metrics: dict[str, Any] | None = None) -> None:
    """Commit an empty result with these facts under a key of a real plan, unless it is there."""
    store = stage_store(storage, key)
    if not store.exists("COMMIT.json"):
        store.write_bytes("key.json", key.to_json())
        meta = {"stage": key.stage, "key": key.digest, "metrics": metrics or {}, "meta": to_record(facts)}
        write_commit(store, "stage", [store.write_bytes("data.json", b"{}")], meta)


def record_run(storage: str, run_id: str, *, day: int, stages: dict[str, str] | None = None, **fields: Any) -> None:
    plain = {
        "format": 1,
        "name": "toy",
        "run_name": f"toy-{day}",
        "status": "FINISHED",
        "started": f"2026-11-{day:02d}T03:00:00Z",
        "ended": f"2026-11-{day:02d}T03:01:00Z",
        "stages": stages or {},
    }
    Store.open(storage).child("runs", run_id).write_bytes("run.json", json.dumps({**plain, **fields}).encode())


def leave_sign(
    folder: Store, holder: Holder, *, name: str = "one", flow_run_id: str | None = None, **beat: Any
) -> None:
    """Leave the sign of life of a process in a run's folder, with a beat if one is given."""
    about = {"holder": asdict(holder), "flow_run_id": flow_run_id}
    folder.write_bytes(f"alive/{name}.json", json.dumps(about).encode())
    if beat:
        folder.write_bytes(f"alive/{name}.beat", json.dumps({"beat": "1", **beat}).encode())


def nightly(storage: str, days: int, *, pipeline: str = "toy") -> list[str]:
    """Record one run a day with results of its own, which share the data of the first day; return the runs' ids."""
    ids = []
    for day in range(1, days + 1):
        run_id = hashlib.sha256(f"{pipeline} {day}".encode()).hexdigest()[:16]
        seeds = {"prepare-data": f"{pipeline} data", "train": f"{pipeline} {day}", "evaluate": f"{pipeline} {day}"}
        stages = {stage: commit_stage(storage, stage, seed) for stage, seed in seeds.items()}
        record_run(storage, run_id, day=day, stages=stages, name=pipeline, metrics={"test_accuracy": 0.9 + day / 1000})
        ids.append(run_id)
    return ids


def publish_run(storage: str, target: Store, run_id: str) -> None:
    """Leave a publication of a run's model in `target`, as push-to-hub does, and name it in the run's record."""
    folder = Store.open(storage).child("runs", run_id)
    run = json.loads(folder.read_bytes("run.json"))
    revision = target.child("revisions", "00001-abc")
    write_commit(revision, "published", [revision.write_bytes("model.safetensors", b"weights")], {})
    facts = {"target": target.url, "published_url": revision.url, "revision": "00001-abc", "published_digest": "0" * 64}
    key = commit_stage(storage, "push-to-hub", f"of {run_id}", facts=facts)
    store = Store.open(storage).child("stages", "push-to-hub", key[:16])
    record = json.loads(store.read_bytes("key.json"))
    record["fields"]["stage_keys"] = {"train": run["stages"]["train"]}
    store.write_bytes("key.json", json.dumps(record).encode())
    folder.write_bytes("run.json", json.dumps({**run, "stages": {**run["stages"], "push-to-hub": key}}).encode())


def committed(storage: str | Path) -> set[tuple[str, str]]:
    """Return (stage, folder) of every committed result."""
    root = Store.open(str(storage)).child("stages")
    return {
        (stage, name)
        for stage in root.children()
        for name in root.children(stage)
        if root.exists(f"{stage}/{name}/COMMIT.json")
    }


def collect(storage: str, keep: int | None = None, **how: Any) -> tuple[Garbage, set[str]]:
    """Find garbage and remove it; return what was found, and the URLs of what is gone."""
    found = find_garbage(storage, keep=keep, **how)
    return found, {item.store.url for item in remove_garbage(storage, found, **how)}


def folders(storage: str, *run_ids: str) -> set[tuple[str, str]]:
    """Return the folders that these runs refer to."""
    by_id = {run.id: run for run in list_runs(storage)}
    return {(stage, key[:16]) for each in run_ids for stage, key in by_id[each].stages.items()}


def train_spec(storage: str, **args: Any) -> PipelineSpec:
    plain = {"name": "toy", "recipe": "recipe.py", "storage": storage, "train": {"args": args}}
    return PipelineSpec.model_validate(plain)
