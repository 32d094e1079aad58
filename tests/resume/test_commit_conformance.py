"""The commit protocol on every kind of store: whatever fails and wherever a writer is killed, all or nothing.

Here every write of a save to the disk and to memory is hit, and every few of one to S3, which take longer;
``python -m benchmarks.commit_conformance --size full`` hits all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.conformance import (
    check_holds,
    fault_each_request,
    fault_each_write,
    faulty,
    kill_each_write,
    save,
    state,
    unfinished_uploads,
)
from tests.support.faulty import Faults, Kind
from tests.support.s3 import PART, S3Server
from trainer_lib.checkpoint.catalogue import list_checkpoints, rotate_checkpoints
from trainer_lib.commit import withdraw_folder
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
    assert rotate_checkpoints(any_store, keep=1, protect=()) == ["checkpoint-1"]
    assert [info.step for info in list_checkpoints(any_store)] == [2]
    withdraw_folder(any_store.child("checkpoint-2"))
    assert any_store.list() == []
    assert unfinished_uploads(any_store) == []


@pytest.mark.parametrize("kind", ["error", "full", "short", "silent", "after", "slow", "die"])
def test_a_fault_at_each_write_to_memory(kind: Kind, faulty_url: str) -> None:
    root = Store.open(faulty_url)
    tally = fault_each_write(root, root, kind)
    assert tally.hit == tally.writes > 30


@pytest.mark.parametrize("kind", ["error", "full", "silent", "after"])  # dying is left to processes that really do
def test_a_fault_at_each_write_to_the_disk(kind: Kind, tmp_path: Path, faults: Faults) -> None:
    plain = Store.open(tmp_path)
    tally = fault_each_write(faulty(plain), plain, kind)
    assert tally.hit == tally.writes > 30


@pytest.mark.parametrize(("kind", "every"), [("refuse", 6), ("full", 5), ("denied", 5), ("lost", 4), ("slow", 9)])
def test_a_fault_at_requests_to_s3(kind: str, every: int, s3_url: str, s3_faults: S3Server) -> None:
    tally = fault_each_request(Store.open(s3_url), s3_faults, kind, every=every)
    assert tally.hit >= 2


def test_kill_9_before_each_write_to_the_disk(tmp_path: Path) -> None:
    tally = kill_each_write(Store.open(tmp_path / "root"))
    assert tally.hit == tally.writes > 40
    assert tally.committed > 0


def test_kill_9_before_requests_to_s3(s3_url: str, s3_faults: S3Server) -> None:
    tally = kill_each_write(Store.open(s3_url), s3_faults, every=3)
    assert tally.hit > 4
    assert tally.committed > 0
