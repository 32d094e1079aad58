"""What the commit protocol promises, checked on any store: after whatever happened to a save, the checkpoint before it
is whole, nothing of the broken one counts, and the same save works again."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from tests.support.checkpoints import divided, no_damage, untrained
from tests.support.faulty import FAULTS, Died, FaultyBackend, Kind
from trainer_lib.checkpoint.catalogue import CheckpointInfo, find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.snapshot import Snapshot
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import StorageFullError, TrainflowError
from trainer_lib.locks.claim import WRITING
from trainer_lib.storage import Store
from trainer_lib.storage.commit import verify_files, withdraw_folder


def state(step: int) -> Snapshot:
    """Build a small checkpoint, equal at each call for a step."""
    with torch.random.fork_rng():
        torch.manual_seed(step)
        saved = untrained(step)
    return Snapshot(step, saved.model, saved.optimizer, rng={"python": step}, data={"step": step}, files=saved.files)


def save(root: Store, snapshot: Snapshot) -> CheckpointInfo:
    """Save a snapshot from one process; in blocks where its meta says so."""
    return save_checkpoint(root, divided(snapshot) if snapshot.meta else snapshot, SingleProcess())


def faulty(root: Store) -> Store:
    """Put the plan of faults in front of a folder."""
    return Store(root.url, cast(Any, FaultyBackend(root._backend)))


def check_holds(root: Store, snapshot: Snapshot) -> None:
    """Load the checkpoint and compare every tensor and number with what was saved."""
    loaded = load_checkpoint(root, f"checkpoint-{snapshot.step}", SingleProcess())
    found = loaded.read_model()
    assert found.keys() == snapshot.model.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in snapshot.model.items())
    optimizer = loaded.read_optimizer()
    assert optimizer is not None
    assert snapshot.optimizer is not None
    assert optimizer.groups == snapshot.optimizer.groups
    assert all(torch.equal(optimizer.tensors[name], tensor) for name, tensor in snapshot.optimizer.tensors.items())
    assert (loaded.read_rng(0), loaded.data) == (snapshot.rng, snapshot.data)


def fault_each_write(root: Store, plain: Store, kind: Kind, *, by_blocks: bool = False) -> tuple[int, int]:
    """Let one write of a save go wrong, each in turn; `root` is `plain` behind the plan of faults.

    A writer that dies on a disk does so before any system call that changes it.

    Returns:
        The writes of a save, and after how many of the faults the new checkpoint counted.
    """
    before, attempted = state(1), state(2)
    attempted.meta = {"by_blocks": True} if by_blocks else {}
    with _counted_system_calls(plain.url if plain.is_local and kind == "die" else None):
        save(root, before)
        FAULTS.plan(None, kind)
        save(root, attempted)
        writes, outcomes = FAULTS.count, []
        withdraw_folder(plain.child("checkpoint-2"))
        for at in range(1, writes + 1):
            FAULTS.plan(at, kind)
            returned = False
            try:
                save(root, attempted)
                returned = True
            except (TrainflowError, Died) as error:
                assert kind != "full" or isinstance(error, StorageFullError), error
            FAULTS.plan(None, kind)
            if kind not in ("die", "after") and not returned:
                assert {info.path for info in plain.child("checkpoint-2").list()} <= {WRITING}, (
                    "the space is given back"
                )
            outcomes.append(check_after_fault(plain, before, attempted, returned=returned))
    assert kind != "die" or outcomes == sorted(outcomes), "the new one counts from one write on, and never before it"
    return writes, sum(outcomes)


def check_after_fault(root: Store, before: Snapshot, attempted: Snapshot, *, returned: bool) -> bool:
    """Whether the attempted checkpoint counts; it may only if it is whole, and must if the save returned.

    The same save then works, and nothing of the failed one is left.
    """
    newest = find_newest_intact(root, on_damage=no_damage)
    assert newest is not None
    assert [info.step for info in list_checkpoints(root)] == sorted({newest.step, before.step}, reverse=True)
    assert newest.step in (before.step, attempted.step)
    committed = newest.step == attempted.step
    assert committed or not returned
    if committed:
        assert verify_files(root.child(newest.name), newest.commit) == []
        check_holds(root, attempted)
    check_holds(root, before)
    info = save(root, attempted)
    store = root.child(info.name)
    assert [file.path for file in store.list()] == sorted([*(entry.path for entry in info.commit.files), "COMMIT.json"])
    check_holds(root, attempted)
    store.delete("COMMIT.json")
    store.delete_tree()
    return committed


_watched: str | None = None


@contextlib.contextmanager
def _counted_system_calls(root: str | None) -> Iterator[None]:
    """Let every call that changes the tree count as a write, besides those the backend makes on open files."""
    global _watched
    if root is not None:
        _hook_system_calls()
    _watched = root
    try:
        yield
    finally:
        _watched = None


@functools.cache
def _hook_system_calls() -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _watched is None:
            return
        writes = event == "open" and bool(int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if not writes and event not in ("os.link", "os.remove", "os.mkdir", "os.rmdir", "os.rename"):
            return
        if any(isinstance(path, str | Path) and str(path).startswith(_watched) for path in arguments[:2]):
            FAULTS.step(f"{event} {arguments[0]}")

    sys.addaudithook(hook)
