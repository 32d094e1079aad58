"""Two writers of one checkpoint at once on each store: one wins, the other is told why."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.support.conformance import check_holds, damage, save, state
from trainer_lib.checkpoint.catalogue import find_newest_intact
from trainer_lib.errors import LeaseLostError, StorageError
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store

ROUNDS = 3


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
