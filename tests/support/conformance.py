"""What the commit protocol promises, checked on any store: after whatever happened to a save, the checkpoint before it
is whole, nothing of the broken one counts, and the same save works again."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from tests.support.checkpoints import no_damage, untrained
from tests.support.faulty import FAULTS, Died, FaultyBackend, Kind
from tests.support.s3 import PART
from trainer_lib.checkpoint.catalogue import CheckpointInfo, find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.snapshot import Snapshot
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import StorageFullError, TrainflowError
from trainer_lib.locks.claim import WRITING
from trainer_lib.storage import Store
from trainer_lib.storage.commit import verify_files, withdraw_folder


def state(step: int, *, large: bool = False) -> Snapshot:
    """Build a small checkpoint, equal at each call for a step; a large one has a file of three parts on S3."""
    with torch.random.fork_rng():
        torch.manual_seed(step)
        saved = untrained(step)
        more = {"large": torch.randn(PART * 9 // 16)} if large else {}
    return Snapshot(
        step, {**saved.model, **more}, saved.optimizer, rng={"python": step}, data={"step": step}, files=saved.files
    )


def save(root: Store, snapshot: Snapshot) -> CheckpointInfo:
    """Save a snapshot from one process."""
    return save_checkpoint(root, snapshot, SingleProcess())


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


def check_after_failure(root: Store, before: Snapshot, attempted: Snapshot, *, returned: bool = False) -> bool:
    """Check the folder after a save that may have failed; return whether the attempted checkpoint counts.

    It may only if it is whole, and must if the save returned.
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
    return committed


def check_again(root: Store, attempted: Snapshot) -> None:
    """Save again: it works, and nothing of the failed save is left. Then remove the checkpoint."""
    info = save(root, attempted)
    store = root.child(info.name)
    assert [file.path for file in store.list()] == sorted([*(entry.path for entry in info.commit.files), "COMMIT.json"])
    check_holds(root, attempted)
    assert unfinished_uploads(root) == []
    store.delete("COMMIT.json")
    store.delete_tree()


def unfinished_uploads(root: Store) -> list[str]:
    """Return the keys of uploads that were neither completed nor withdrawn; only S3 has any."""
    if not root.url.startswith("s3://"):
        return []
    uploads = root._backend.fs.list_multipart_uploads(root.url.split("/")[2])  # type: ignore[union-attr]
    return [upload["Key"] for upload in uploads]


@dataclass(frozen=True)
class Tally:
    """What came of it: writes per save (on a disk of which every few are hit, at most so many), saves that were hit,
    and after how many of those the new checkpoint counted."""

    writes: int
    hit: int
    committed: int


def fault_each_write(root: Store, plain: Store, kind: Kind, *, every: int = 1) -> Tally:
    """Let one write of a save go wrong, each in turn; `root` is `plain` behind the plan of faults.

    A writer that dies on a disk does so before any system call that changes it.
    """
    harmless = kind == "slow"
    gives_back = kind not in ("die", "after")
    saves = Saves(root, plain, state(2), lambda at: FAULTS.plan(at, kind), lambda: FAULTS.count)
    with _counted_system_calls(plain.url if plain.is_local and kind == "die" else None):
        return fault_each(saves, kind, harmless=harmless, gives_back=gives_back, every=every)


@dataclass(frozen=True)
class Saves:
    """The store that is saved to, the same store without faults, what is saved, and the plan of faults."""

    root: Store
    plain: Store
    attempted: Snapshot
    plan: Callable[[int | None], None]
    count: Callable[[], int]


def fault_each(saves: Saves, kind: str, *, harmless: bool, gives_back: bool, every: int) -> Tally:
    """Plan a fault for one write after the other, until each of a save has had its turn."""
    before, attempted, plain = state(1), saves.attempted, saves.plain
    save(saves.root, before)
    saves.plan(None)
    save(saves.root, attempted)
    writes, outcomes = saves.count(), []
    withdraw_folder(plain.child("checkpoint-2"))
    for at in range(1, writes + 1, every):
        saves.plan(at)
        returned = False
        try:
            save(saves.root, attempted)
            returned = True
        except (TrainflowError, Died) as error:
            assert not harmless, f"{error} (write {at})"
            assert kind != "full" or isinstance(error, StorageFullError), error
        saves.plan(None)
        if gives_back and not returned:
            assert {info.path for info in plain.child("checkpoint-2").list()} <= {WRITING}, "the space is given back"
        outcomes.append(check_after_failure(plain, before, attempted, returned=returned))
        assert unfinished_uploads(plain) == []
        check_again(plain, attempted)
    assert kind != "die" or outcomes == sorted(outcomes), "the new one counts from one write on, and never before it"
    return Tally(writes, len(outcomes), sum(outcomes))


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
