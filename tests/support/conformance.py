"""What the commit protocol promises, checked on any store: after whatever happened to a save, the checkpoint before it
is whole, nothing of the broken one counts, and the same save works again.

`Victims` are real processes that save a checkpoint and are killed (SIGKILL) right before their n-th write: on the disk
every system call that changes it and every write to a file counts, on S3 every request that changes the bucket.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import untrained
from tests.support.faulty import FAULTS, Died, FaultyBackend, Kind
from tests.support.repository import ROOT
from tests.support.s3 import PART, S3Server
from trainer_lib.checkpoint.catalogue import CheckpointInfo, find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.snapshot import Snapshot
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.commit import verify_files, withdraw_folder
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import StorageFullError, TrainflowError
from trainer_lib.storage import Store, s3


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
    return Store(root.url, FaultyBackend(root._backend))


def damage(what: str) -> None:
    """Fail the test: nothing that was committed may be damaged."""
    raise AssertionError(what)


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
    newest = find_newest_intact(root, on_damage=damage)
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
    uploads = root._backend.fs.list_multipart_uploads(root.url.split("/")[2])  # type: ignore[attr-defined]
    return [upload["Key"] for upload in uploads]


class Victims:
    """Processes that save ``checkpoint-2`` and are killed, each forked in milliseconds from one that is ready."""

    def __init__(self, root: Store) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.support.conformance", root.url]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Victims:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def fork(self) -> int:
        """Fork a process that waits to save; return its process id."""
        self._say("fork")
        return int(self._answer())

    def run(self, at: int) -> int:
        """Let it save, and return its exit code. On a disk it is killed at write number `at` (0: never)."""
        self._say(str(at))
        return int(self._answer())

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@dataclass(frozen=True)
class Tally:
    """What came of it: writes per save (on a disk of which every few are hit, at most so many), saves that were hit,
    and after how many of those the new checkpoint counted."""

    writes: int
    hit: int
    committed: int


def fault_each_write(root: Store, plain: Store, kind: Kind, *, every: int = 1) -> Tally:
    """Let one write of a save go wrong, each in turn; `root` is `plain` behind the plan of faults."""

    def plan(at: int | None) -> None:
        FAULTS.plan(at, kind)

    harmless = kind == "slow"
    return _fault_each(Saves(root, plain, state(2)), plan, lambda: FAULTS.count, kind, harmless=harmless, every=every)


def fault_each_request(root: Store, server: S3Server, kind: str, *, every: int = 1) -> Tally:
    """Let one request of a save to S3 go wrong, each in turn."""

    def plan(at: int | None) -> None:
        server.plan(at, kind)

    def count() -> int:
        return len(server.seen()["writes"])

    harmless = kind in ("lost", "slow")
    return _fault_each(Saves(root, root, state(2, large=True)), plan, count, kind, harmless=harmless, every=every)


@dataclass(frozen=True)
class Saves:
    """The store that is saved to, the same store without faults, and what is saved to it."""

    root: Store
    plain: Store
    attempted: Snapshot


def _fault_each(
    saves: Saves, plan: Callable[[int | None], None], count: Callable[[], int], kind: str, *, harmless: bool, every: int
) -> Tally:
    """Plan a fault for one write after the other, until each of a save has had its turn."""
    before, attempted = state(1), saves.attempted
    save(saves.root, before)
    plan(None)
    save(saves.root, attempted)
    writes, hit, committed = count(), 0, 0
    withdraw_folder(saves.plain.child("checkpoint-2"))
    for at in range(1, writes + 1, every):
        plan(at)
        returned = False
        try:
            save(saves.root, attempted)
            returned = True
        except (TrainflowError, Died) as error:
            assert not harmless, f"{error} (write {at})"
            assert kind != "full" or isinstance(error, StorageFullError), error
        plan(None)
        hit += 1
        committed += check_after_failure(saves.plain, before, attempted, returned=returned)
        assert unfinished_uploads(saves.plain) == []
        check_again(saves.plain, attempted)
    return Tally(writes, hit, committed)


def kill_each_write(root: Store, server: S3Server | None = None, *, every: int = 1) -> Tally:
    """Kill a process before each write of its save in turn, on a disk or (with its server) on S3, until one lives."""
    before, attempted = state(1), state(2, large=server is not None)
    save(root, before)
    outcomes: list[bool] = []
    at = 1
    with Victims(root) as victims:
        while True:
            victim = victims.fork()
            if server is not None:
                server.plan(at, "kill", pid=victim)
            code = victims.run(at)
            writes = at - 1
            if server is not None:
                writes = len(server.seen()["writes"])
                server.plan()
            if code == 0:
                break
            assert code == -signal.SIGKILL
            outcomes.append(check_after_failure(root, before, attempted))
            check_again(root, attempted)
            at += every
    assert outcomes == sorted(outcomes)  # the new one counts from one write on, and never before it
    return Tally(writes, len(outcomes), sum(outcomes))


def _count_system_calls(root: str) -> None:
    """Let every call that changes the tree count as a write, besides those the backend makes on open files."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and bool(int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if not writes and event not in ("os.link", "os.remove", "os.mkdir", "os.rmdir", "os.rename"):
            return
        if any(isinstance(path, str | Path) and str(path).startswith(root) for path in arguments[:2]):
            FAULTS.step(f"{event} {arguments[0]}")

    sys.addaudithook(hook)


def _victim(url: str, ready: int) -> None:
    at = int(os.read(ready, 20))
    root = Store.open(url)
    s3.PART = PART
    attempted = state(2, large=not root.is_local)
    if root.is_local:
        _count_system_calls(url)
        root = faulty(root)
        FAULTS.plan(at or None, "kill")
    save(root, attempted)
    os._exit(0)


def _serve(url: str) -> None:
    """Fork victims on request: one line of standard input forks, the next one starts it."""
    torch.set_num_threads(1)
    if url.startswith("s3://"):
        import fsspec

        fsspec.get_filesystem_class("s3")  # imported before the fork; no client: its thread would not survive
    while sys.stdin.readline():
        ready, start = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _victim(url, ready)
            finally:
                os._exit(99)
        print(child, flush=True)
        os.write(start, sys.stdin.readline().encode())
        os.close(start)
        os.close(ready)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
