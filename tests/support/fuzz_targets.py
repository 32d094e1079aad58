"""The targets of `fuzz`: every reader of a checkpoint's bytes, around one real checkpoint of each kind."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from tests.support.checkpoints import save, trained
from tests.support.fuzz import Target, in_json, in_safetensors, in_torch_file
from tests.support.hostile import saved
from trainer_lib.base.json_text import parse_json
from trainer_lib.checkpoint import catalogue
from trainer_lib.checkpoint.catalogue import CheckpointInfo, recognise_folder
from trainer_lib.checkpoint.optimizer import restore_optimizer
from trainer_lib.checkpoint.reader import Checkpoint
from trainer_lib.checkpoint.sharded import LocalShard, ShardedTensors, build_index, write_shard
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.checkpoint.transformers_checkpoint import (
    convert_optimizer,
    convert_scheduler,
    derive_position,
    read_source,
    read_torch_file,
)
from trainer_lib.checkpoint.values import capture_rng, restore_rng
from trainer_lib.distributed.sharding import LocalPart
from trainer_lib.errors import DamagedError
from trainer_lib.locks.claim import WRITING, read_claim
from trainer_lib.locks.lease import Holder, find_holder
from trainer_lib.locks.removal import list_readers
from trainer_lib.state import TrainerState
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import COMMIT, Commit, content_digest, read_commit, verify_files, write_commit
from trainer_lib.trainer.history import StepHistory

Read = Callable[[bytes], object]


def targets(folder: Path) -> dict[str, Target]:
    save(Store.open(folder / "run"), 2)
    whole = folder / "run" / "checkpoint-2"
    found = {
        "commit": Target(_commit(folder / "commit", whole), [(whole / COMMIT).read_bytes()], _in_commit),
        "safetensors": Target(
            _file(folder / "tensors", "model.safetensors", read_safetensors),
            [(whole / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")],
            in_safetensors,
        ),
        "marks": Target(_marks(folder / "marks"), [Holder.this_process(5.0).to_bytes()], in_json),
    }
    read, index = _sharded(folder / "sharded")
    found["shards"] = Target(read, [index], in_json)
    for name in ("optimizer", "scheduler", "scaler", "data", "trainer_state", "training_args", "rng/rank-00000"):
        data = (whole / f"{name}.json").read_bytes()
        read = _loaded(folder / name.replace("/", "-"), whole, f"{name}.json")
        found[f"json {name}"] = Target(read, [data], in_json)
    found |= _resuming(folder)
    found |= _importing(folder)
    return found


# -- our own format ----------------------------------------------------------------------------------------------------
def _file(folder: Path, name: str, read: Callable[[Store, str], object]) -> Read:
    folder.mkdir(parents=True)

    def given(data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read(Store.open(folder), name)

    return given


def _commit(folder: Path, whole: Path) -> Read:
    shutil.copytree(whole, folder / "checkpoint-2")
    root = Store.open(folder)

    def read(data: bytes) -> object:
        (folder / "checkpoint-2" / COMMIT).write_bytes(data)
        catalogue.list_checkpoints(root)
        info = catalogue.read_checkpoint_info(root, "checkpoint-2")
        if info is not None:
            Checkpoint(root.child("checkpoint-2"), info)
            return verify_files(root.child("checkpoint-2"), info.commit)
        return info

    return read


def _in_commit(rng: Any, data: bytes) -> bytes:
    """Repair the digest half of the time, so that the fuzzer reaches what it protects."""
    changed = in_json(rng, data)
    if rng.random() < 0.5:
        return changed
    try:
        record = json.loads(changed)
        record.pop("seal", None)
        record["content_digest"] = content_digest([FileEntry(**entry) for entry in record["files"]])
        seal = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        return (json.dumps(record | {"seal": seal}, indent=1) + "\n").encode()
    except Exception:
        return changed


def _marks(folder: Path) -> Read:
    """The records of writers, readers and leases beside a checkpoint."""
    (folder / "lease").mkdir(parents=True)
    store = Store.open(folder)

    def read(data: bytes) -> object:
        for name in (WRITING, "READING-0.json", "lease/00000001.json"):
            (folder / name).write_bytes(data)
        return read_claim(store), list_readers(store), find_holder(store), recognise_folder(store)

    return read


def _sharded(folder: Path) -> tuple[Read, bytes]:
    """The index of a sharded checkpoint, in which every rank wrote its block."""
    store, entries, shards = Store.open(folder), {}, []
    for rank in range(2):
        values = {f"model/{number}": torch.randn(3, 4) for number in range(3)}
        ranges = (((3 * rank, 3 * rank + 3),), ((0, 4),))
        parts = {name: LocalPart(value, (6, 4), ranges, True) for name, value in values.items()}
        entry, said = write_shard(store, LocalShard(parts, {"model/tied": "model/0"}), rank)
        entries[entry.path] = entry
        shards.append(said)

    def read(data: bytes) -> object:
        try:
            index = parse_json(data)
        except ValueError as error:
            raise DamagedError(str(error), remedy="none") from error
        tensors = ShardedTensors(store, "model", index, entries)
        return [tensors[name] for name in tensors]

    return read, json.dumps(build_index(shards)).encode()


def _loaded(folder: Path, whole: Path, name: str) -> Read:
    """Everything that a resume reads of a checkpoint in which one file was changed and committed again."""
    shutil.copytree(whole, folder)
    store = Store.open(folder)
    commit = read_commit(store)
    assert commit is not None
    net, optimizer = trained(2)
    names = dict(net.named_parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    before = capture_rng()

    def read(data: bytes) -> object:
        (folder / name).write_bytes(data)
        entry = FileEntry(name, len(data), hashlib.sha256(data).hexdigest())
        files = tuple(entry if each.path == name else each for each in commit.files)
        crafted = Commit(commit.kind, files, commit.meta, commit.created, commit.content_digest)
        loaded = Checkpoint(store, CheckpointInfo(2, "checkpoint-2", store.url, crafted))
        TrainerState.from_dict(loaded.trainer_state)
        snapshot = loaded.read_optimizer()
        with loaded.treat_errors_as_damage("optimizer.json"):
            if snapshot is not None:
                restore_optimizer(optimizer, names, snapshot)
        with loaded.treat_errors_as_damage("scheduler.json"):
            schedule.load_state_dict(dict(loaded.scheduler or {}))
        with loaded.treat_errors_as_damage("data.json"):
            history = StepHistory(None, nonfinite_limit=3)  # type: ignore[arg-type]  # nothing is summed here
            history.load_state(loaded.data.get("history", {}))
            int(loaded.data["epoch"])
        try:
            restore_rng(loaded.read_rng(0))
        finally:
            restore_rng(before)
        return loaded

    return read


def _resuming(folder: Path) -> dict[str, Target]:
    """A whole resume, with one of the small files changed."""
    from tests.support.training import trainer

    rows = [{"x": torch.randn(6), "labels": torch.tensor(n % 3)} for n in range(8)]
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    with contextlib.redirect_stdout(io.StringIO()):
        trainer(folder / "trained", rows, **given).train()
    name = "checkpoint-2"
    store = Store.open(folder / "trained" / name)
    commit = read_commit(store)
    assert commit is not None

    def reader(file: str) -> Read:
        def read(data: bytes) -> object:
            kept = (folder / "trained" / name / file).read_bytes()
            try:
                (folder / "trained" / name / COMMIT).unlink()
                others = [entry for entry in commit.files if entry.path != file]
                (folder / "trained" / name / file).write_bytes(data)
                entry = FileEntry(file, len(data), hashlib.sha256(data).hexdigest())
                write_commit(store, "checkpoint", [*others, entry], commit.meta)
                made = trainer(folder / "trained", rows, **{**given, "save_strategy": "no", "max_steps": 2})
                with contextlib.redirect_stdout(io.StringIO()):
                    return made.train(resume_from_checkpoint=store.url)
            finally:
                (folder / "trained" / name / file).write_bytes(kept)

        return read

    files = ("trainer_state.json", "data.json", "scheduler.json", "optimizer.json")
    return {f"resume {file}": Target(reader(file), [store.read_bytes(file)], in_json) for file in files}


# -- other programs' ---------------------------------------------------------------------------------------------------
def _importing(folder: Path) -> dict[str, Target]:
    source = folder / "peer"
    source.mkdir()
    weights = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    in_groups = ("0.weight", "1.weight", "0.bias", "1.bias")
    state = {n: {"step": torch.tensor(2.0), "exp_avg": weights[name].clone()} for n, name in enumerate(in_groups)}
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999)}
    groups = [{**settings, "weight_decay": 0.1, "params": [0, 1]}, {**settings, "weight_decay": 0.0, "params": [2, 3]}]
    random_states = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    numpy_state = np.random.get_state()
    files = {
        "model.safetensors": safetensors.torch.save(weights),
        "optimizer.pt": saved({"state": state, "param_groups": groups}),
        "scheduler.pt": saved(
            {"last_epoch": 2, "base_lrs": [0.1, 0.1], "_last_lr": [0.1, 0.1], "lr_lambdas": [{}, {}]}
        ),
        "scaler.pt": saved({"scale": 1024.0, "_growth_tracker": 3}),
        "rng_state.pth": saved({**random_states, "numpy": numpy_state}),
        "trainer_state.json": json.dumps({"global_step": 2, "epoch": 0.5, "log_history": [{"loss": 1.0}]}).encode(),
    }
    for name, data in files.items():
        (source / name).write_bytes(data)

    def reader(name: str) -> Read:
        def read(data: bytes) -> object:
            (source / name).write_bytes(data)
            try:
                return _imported(Store.open(source))
            finally:
                (source / name).write_bytes(files[name])

        return read

    ways = {"json": in_json, "safetensors": in_safetensors}
    found = {
        f"import {name}": Target(reader(name), [data], ways.get(name.rpartition(".")[2], in_torch_file))
        for name, data in files.items()
    }
    found["torch file"] = Target(
        _file(folder / "torch", "x.pt", read_torch_file), list(files.values())[1:5], in_torch_file
    )
    found["index"] = Target(
        _index(folder / "index", files), [b'{"weight_map": {"0.weight": "one.safetensors"}}'], in_json
    )
    return found


def _imported(store: Store) -> object:
    """All but writing."""
    source = read_source(store)
    names = [[f"parameter {number}" for number in group["params"]] for group in source.optimizer["param_groups"]]
    snapshot = convert_optimizer(source.optimizer, names)
    return snapshot, convert_scheduler(source.scheduler, names), derive_position(source.state)


def _index(folder: Path, files: dict[str, bytes]) -> Read:
    folder.mkdir()
    for name, data in files.items():
        (folder / ("one.safetensors" if name == "model.safetensors" else name)).write_bytes(data)

    def read(data: bytes) -> object:
        (folder / "model.safetensors.index.json").write_bytes(data)
        return read_source(Store.open(folder))

    return read
