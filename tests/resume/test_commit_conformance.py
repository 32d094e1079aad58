"""The commit protocol on every kind of store: whatever fails and wherever a writer is killed, all or nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.conformance import (
    Victims,
    check_after_failure,
    check_again,
    check_holds,
    faulty,
    save,
    state,
    unfinished_uploads,
)
from tests.support.faulty import Died, Faults, Kind
from tests.support.s3 import PART, S3Server
from trainer_lib.checkpoint.catalogue import list_checkpoints, rotate
from trainer_lib.errors import StorageFullError, TrainflowError
from trainer_lib.manifest import withdraw
from trainer_lib.storage import Store, s3


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART", PART)


def test_save_load_replace_list_delete(any_store: Store) -> None:
    one, two = state(1), state(2, large=True)
    save(any_store, one)
    check_holds(any_store, one)
    save(any_store, one)
    save(any_store, two)
    check_holds(any_store, one)
    check_holds(any_store, two)
    assert [info.step for info in list_checkpoints(any_store)] == [2, 1]
    assert rotate(any_store, keep=1, protect=()) == ["checkpoint-1"]
    assert [info.step for info in list_checkpoints(any_store)] == [2]
    withdraw(any_store.child("checkpoint-2"))
    assert any_store.list() == []
    assert unfinished_uploads(any_store) == []


ALL: list[Kind] = ["error", "full", "short", "silent", "after", "slow", "die"]
DISK: list[Kind] = ["error", "full", "silent", "after"]  # dying is left to processes that really do


@pytest.mark.parametrize(("kind", "where"), [*((kind, "file") for kind in DISK), *((kind, "memory") for kind in ALL)])
def test_a_fault_at_each_write_in_turn(kind: Kind, where: str, tmp_path: Path, faults: Faults, faulty_url: str) -> None:
    plain = Store.open(tmp_path if where == "file" else faulty_url)
    root = faulty(plain) if where == "file" else plain
    before, attempted = state(1), state(2)
    save(root, before)
    faults.plan(None)
    save(root, attempted)
    writes = faults.count
    assert writes > 30
    withdraw(plain.child("checkpoint-2"))
    for at in range(1, writes + 1):
        faults.plan(at, kind)
        told = False
        try:
            save(root, attempted)
            told = True
        except (TrainflowError, Died) as error:
            assert kind != "slow"
            assert kind != "full" or isinstance(error, StorageFullError), error
        faults.plan(None)
        check_after_failure(plain, before, attempted, told=told)
        check_again(plain, attempted)


@pytest.mark.parametrize("kind", ["refuse", "full", "denied", "lost", "slow"])
def test_a_fault_at_each_request_to_s3_in_turn(kind: str, s3_url: str, s3_faults: S3Server) -> None:
    root, before, attempted = Store.open(s3_url), state(1), state(2, large=True)
    save(root, before)
    s3_faults.plan()
    save(root, attempted)
    writes = len(s3_faults.seen()["writes"])
    assert writes > 12
    withdraw(root.child("checkpoint-2"))
    for at in range(1, writes + 1):
        s3_faults.plan(at, kind)
        told = False
        try:
            save(root, attempted)
            told = True
        except TrainflowError as error:
            assert kind not in ("lost", "slow"), f"{error} (write {at})"
            assert kind != "full" or isinstance(error, StorageFullError), error
        s3_faults.plan()
        check_after_failure(root, before, attempted, told=told)
        assert unfinished_uploads(root) == []
        check_again(root, attempted)


def test_kill_9_before_each_write_to_the_disk(tmp_path: Path) -> None:
    root, before, attempted = Store.open(tmp_path / "root"), state(1), state(2)
    save(root, before)
    kills, committed = 0, []
    with Victims(root) as victims:
        while True:
            victims.fork()
            code = victims.run(kills + 1)
            if code == 0:
                break
            kills += 1
            assert code == -signal.SIGKILL
            committed.append(check_after_failure(root, before, attempted))
            check_again(root, attempted)
    assert kills > 50
    assert committed == sorted(committed)  # from one write on, and never before it
    assert sum(committed) > 0


def test_kill_9_before_each_request_to_s3(s3_url: str, s3_faults: S3Server) -> None:
    root, before, attempted = Store.open(s3_url), state(1), state(2, large=True)
    save(root, before)
    kills, committed = 0, []
    with Victims(root) as victims:
        while True:
            s3_faults.plan(kills + 1, "kill", pid=victims.fork())
            code = victims.run(0)
            if code == 0:
                break
            kills += 1
            assert code == -signal.SIGKILL
            s3_faults.plan()
            committed.append(check_after_failure(root, before, attempted))
            check_again(root, attempted)
    assert kills > 12
    assert committed == sorted(committed)
    assert sum(committed) > 0
