"""Which checkpoints there are, which may go, and that looking costs no torch."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import commit, no_damage, save, steps
from tests.support.faulty import Faults, FaultyFileSystem
from trainer_lib.checkpoint.catalogue import delete_leftovers, find_newest_intact, list_checkpoints, rotate_checkpoints
from trainer_lib.checkpoint.layout import checkpoint_name
from trainer_lib.errors import DamagedError, StorageError
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store


def test_a_store_that_cannot_be_read_is_no_reason_to_go_back(faulty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(faulty_url)
    commit(root, 1)
    commit(root, 2)

    def unreachable(self: object, path: str, mode: str = "rb", **kwargs: object) -> object:
        raise OSError(errno.ETIMEDOUT, "timed out", path)

    monkeypatch.setattr(FaultyFileSystem, "_open", unreachable)
    with pytest.raises(StorageError) as caught:
        find_newest_intact(root, on_damage=no_damage)
    assert not isinstance(caught.value, DamagedError)
    monkeypatch.undo()
    assert steps(root) == [2, 1]


def test_a_damaged_one_that_cannot_be_set_aside_is_passed_over_all_the_same(faulty_url: str, faults: Faults) -> None:
    root = Store.open(faulty_url)
    commit(root, 1)
    commit(root, 2)
    root.write_bytes("checkpoint-2/model.safetensors", b"12345")
    told: list[str] = []
    faults.plan(1)
    found = find_newest_intact(root, on_damage=told.append)
    faults.plan(None)
    assert found is not None
    assert found.step == 1
    assert "could not be set aside" in told[0]


# ----------------------------------------------------------------------------------------------------------- retention


@pytest.mark.parametrize(
    ("keep", "protect", "left"),
    [
        (None, (), [4, 3, 2, 1]),
        (0, (), [4, 3, 2, 1]),
        (-1, (), [4, 3, 2, 1]),
        (9, (), [4, 3, 2, 1]),
        (1, (), [4]),
        (1, ("checkpoint-1",), [4, 1]),
        (2, ("checkpoint-1",), [4, 1]),
        (3, ("checkpoint-1",), [4, 3, 1]),
        (1, ("checkpoint-1", "checkpoint-2"), [4, 2, 1]),
        (1, ("checkpoint-4",), [4]),
        (1, ("checkpoint-99",), [4]),
    ],
)
def test_neither_the_newest_nor_a_protected_one_is_deleted(
    keep: int | None, protect: tuple[str, ...], left: list[int], tmp_path: Path
) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2, 3, 4):
        commit(root, step)
    rotate_checkpoints(root, keep=keep, protect=protect)
    assert steps(root) == left


def test_a_damaged_newest_does_not_cost_the_newest_good_one(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2, 3):
        commit(root, step)
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"")
    rotate_checkpoints(root, keep=1, protect=())
    assert 2 in steps(root)
    found = find_newest_intact(root, on_damage=lambda _: None)
    assert found is not None
    assert found.step == 2


def test_a_deletion_that_fails_leaves_no_half_checkpoint(faulty_url: str, faults: Faults) -> None:
    root = Store.open(faulty_url)
    for step in (1, 2, 3):
        commit(root, step)
    faults.plan(2)
    with pytest.raises(StorageError):
        rotate_checkpoints(root, keep=1, protect=())
    faults.plan(None)
    assert steps(root) == [3, 2]
    assert delete_leftovers(root) == ["checkpoint-1"]
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-2"]


def test_a_save_under_way_on_this_machine_is_no_leftover(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    living = Holder.this_process()
    for step, claim in ((1, living), (2, replace(living, started="1")), (3, replace(living, machine="elsewhere"))):
        root.write_bytes(f"checkpoint-{step}/{WRITING}", claim.to_bytes())
    root.write_bytes(f"checkpoint-4/{WRITING}", b"torn")
    assert delete_leftovers(root) == ["checkpoint-4", "checkpoint-3", "checkpoint-2"]
    assert root.children() == ["checkpoint-1"]


def test_it_lists_what_the_writer_writes(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    first, second = save(root, 1), save(root, 2)
    assert list_checkpoints(root) == [second, first]
    assert checkpoint_name(2) == second.name
