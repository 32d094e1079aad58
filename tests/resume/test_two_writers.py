"""Two writers of one checkpoint at once, threads and processes, on each store: one wins, the other is told why."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.conformance import check_holds, damage, save, state
from tests.support.repository import ROOT
from trainer_lib.checkpoint.catalogue import find_newest_intact
from trainer_lib.errors import LeaseLostError, StorageError
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store

ROUNDS = 4


class Meeting:
    """Holds each writer, once it has its claim, until the other has its own or has ended: they really overlap.

    With `left`, also until both have read the claim that a dead writer left: neither knows of the other when it acts.
    """

    def __init__(self, left: bool = False) -> None:
        self._readers = threading.Barrier(2) if left else None
        self._changed = threading.Condition()
        self._settled: set[int] = set()

    def read(self) -> None:
        """A writer has read a claim; only the first time of each counts."""
        readers = self._readers
        if readers is not None:
            readers.wait(timeout=60)
            self._readers = None

    def settle(self, writer: int) -> None:
        """This writer has its claim, or has ended."""
        with self._changed:
            self._settled.add(writer)
            self._changed.notify_all()

    def wait(self) -> None:
        """Until both are settled."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._settled) == 2, timeout=60)


class Held:
    """A backend whose writer waits before it writes the first file."""

    def __init__(self, inner: Any, writer: int, meeting: Meeting) -> None:
        self._inner, self._writer, self._meeting = inner, writer, meeting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def child(self, rel: str) -> Held:
        return Held(self._inner.child(rel), self._writer, self._meeting)

    def open_read(self, rel: str) -> Any:
        stream = self._inner.open_read(rel)
        if rel == WRITING:
            self._meeting.read()
        return stream

    def open_write(self, rel: str) -> Any:
        self._meeting.settle(self._writer)
        self._meeting.wait()
        return self._inner.open_write(rel)


def verdict(outcomes: list[StorageError | None], root: Store) -> None:
    """Exactly one of two won, its checkpoint is whole, and the other got a clear error."""
    lost = [error for error in outcomes if error is not None]
    assert len(lost) == 1, outcomes
    assert isinstance(lost[0], LeaseLostError) or "being written" in lost[0].message, lost[0]
    assert str(lost[0].field).startswith(f"{root.url}/checkpoint-2")
    assert lost[0].remedy
    info = find_newest_intact(root, on_damage=damage)
    assert info is not None
    check_holds(root, replace(state(2), data={"writer": outcomes.index(None)}))


@pytest.mark.parametrize("left", [False, True], ids=["fresh", "after a dead writer"])
def test_of_two_threads_one_wins(left: bool, any_store: Store) -> None:
    attempts = [replace(state(2), data={"writer": writer}) for writer in range(2)]  # seeded: not in the threads
    for _ in range(ROUNDS):
        meeting, start = Meeting(left), threading.Barrier(2)
        if left:
            dead = replace(Holder.this_process(), started="long ago")
            any_store.child("checkpoint-2").write_bytes(WRITING, dead.to_bytes())

        def write(writer: int, meeting: Meeting = meeting, start: threading.Barrier = start) -> StorageError | None:
            root = Store(any_store.url, Held(any_store._backend, writer, meeting))
            start.wait()
            try:
                save(root, attempts[writer])
            except StorageError as error:
                return error
            finally:
                meeting.settle(writer)
            return None

        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(write, range(2)))
        if any_store.exclusive:
            verdict(outcomes, any_store)
        else:  # the weaker guarantee: never two winners, and what is spoiled is found out
            assert outcomes.count(None) <= 1
            find_newest_intact(any_store, on_damage=lambda what: None)
        any_store.delete_tree()


SCRIPT = """
import sys
from dataclasses import replace
from tests.resume.test_two_writers import Held
from tests.support.conformance import save, state
from trainer_lib.errors import StorageError
from trainer_lib.storage import Store

class Told:
    def read(self):
        pass
    def settle(self, writer):
        print("claimed", flush=True)
    def wait(self):
        sys.stdin.readline()

url, writer = sys.argv[1], int(sys.argv[2])
attempt = replace(state(2), data={"writer": writer})
plain = Store.open(url)
plain.list()
print("ready", flush=True)
while sys.stdin.readline():
    once = Told()
    class First(Held):
        def open_write(self, rel):
            told = self._meeting
            if not hasattr(once, "done"):
                once.done = True
                told.settle(0)
                told.wait()
            return self._inner.open_write(rel)
        def child(self, rel):
            return First(self._inner.child(rel), self._writer, self._meeting)
    try:
        save(Store(url, First(plain._backend, writer, once)), attempt)
        print("won", flush=True)
    except StorageError as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize("where", ["file", "s3"])
def test_of_two_processes_one_wins(where: str, tmp_path: Path, s3_url: str) -> None:
    root = Store.open(tmp_path / "root" if where == "file" else s3_url)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, root.url, str(number)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for number in range(2)
    ]
    try:
        for writer in writers:
            assert hear(writer) == "ready"
        for number in range(ROUNDS):
            if number % 2:
                dead = replace(Holder.this_process(), started="long ago")
                root.child("checkpoint-2").write_bytes(WRITING, dead.to_bytes())
            for writer in writers:
                say(writer)
            answers = [hear(writer) for writer in writers]
            for writer, answer in zip(writers, answers, strict=True):
                if answer == "claimed":
                    say(writer)
            told = [
                hear(each) if answer == "claimed" else answer for each, answer in zip(writers, answers, strict=True)
            ]
            assert sorted(answer == "won" for answer in told) == [False, True], told
            lost = next(answer for answer in told if answer != "won")
            assert "being written" in lost or "taken this checkpoint's folder over" in lost, lost
            assert find_newest_intact(root, on_damage=damage) is not None
            check_holds(root, replace(state(2), data={"writer": told.index("won")}))
            root.delete_tree()
    finally:
        for writer in writers:
            writer.communicate(timeout=30)


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
