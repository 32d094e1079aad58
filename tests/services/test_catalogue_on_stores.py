"""The catalogue of checkpoints on every kind of store: listing, damage, rotation, leftovers."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import commit, no_damage, steps
from trainer_lib.checkpoint.catalogue import (
    delete_leftovers,
    find_newest_intact,
    get_last_checkpoint,
    read_checkpoint_info,
    rotate_checkpoints,
)
from trainer_lib.checkpoint.layout import DAMAGED
from trainer_lib.commit import COMMIT, write_commit
from trainer_lib.errors import DamagedError
from trainer_lib.storage import Store


def test_they_are_listed_by_step_newest_first(any_store: Store) -> None:
    for step in (9, 100, 20, 0):
        commit(any_store, step)
    any_store.write_bytes("checkpoint-30/model.safetensors", b"uncommitted")
    any_store.write_bytes("checkpoint-40", b"a file")
    for name in ("checkpoint-007", "checkpoint--1", "checkpoint-x", "my-checkpoint-5", "checkpoint-5-old", "model"):
        write_commit(any_store.child(name), "checkpoint", [], {"step": 7})

    assert steps(any_store) == [100, 20, 9, 0]
    newest = find_newest_intact(any_store, on_damage=no_damage)
    assert newest is not None
    assert newest.name == "checkpoint-100"
    assert get_last_checkpoint(any_store.url) == f"{any_store.url}/checkpoint-100"


def test_an_absent_folder_has_none(any_store: Store) -> None:
    assert steps(any_store) == []
    assert find_newest_intact(any_store, on_damage=no_damage) is None
    assert get_last_checkpoint(any_store.url) is None
    assert rotate_checkpoints(any_store, keep=1, protect=()) == []
    assert delete_leftovers(any_store) == []


def test_a_commit_of_another_step_kind_or_form_is_damage(any_store: Store) -> None:
    commit(any_store, 1)
    write_commit(any_store.child("checkpoint-2"), "checkpoint", [], {"step": 3})
    write_commit(any_store.child("checkpoint-3"), "stage", [], {"step": 3})
    write_commit(any_store.child("checkpoint-4"), "checkpoint", [], {"step": "4"})
    any_store.write_bytes(f"checkpoint-5/{COMMIT}", b"torn")
    for step in (2, 3, 4, 5):
        with pytest.raises(DamagedError):
            read_checkpoint_info(any_store, f"checkpoint-{step}")
    assert steps(any_store) == [1]

    told: list[str] = []
    found = find_newest_intact(any_store, on_damage=told.append)

    assert found is not None
    assert found.step == 1
    assert [line.split(" is damaged")[0].rpartition("-")[2] for line in told] == ["5", "4", "3", "2"]
    assert all(any_store.exists(f"checkpoint-{step}/{DAMAGED}") for step in (2, 3, 4, 5))


def test_sizes_alone_are_a_quick_look(any_store: Store) -> None:
    commit(any_store, 1)
    commit(any_store, 2)
    any_store.write_bytes("checkpoint-2/model.safetensors", b"4321")
    quick = find_newest_intact(any_store, on_damage=no_damage, digests=False)
    assert quick is not None
    assert quick.step == 2
    any_store.write_bytes("checkpoint-2/model.safetensors", b"43")
    quick = find_newest_intact(any_store, on_damage=lambda _: None, digests=False)
    assert quick is not None
    assert quick.step == 1


def test_the_oldest_go_first(any_store: Store) -> None:
    for step in (10, 2, 30, 4):
        commit(any_store, step)
    assert rotate_checkpoints(any_store, keep=2, protect=()) == ["checkpoint-2", "checkpoint-4"]
    assert steps(any_store) == [30, 10]
    assert any_store.children() == ["checkpoint-10", "checkpoint-30"]
    assert rotate_checkpoints(any_store, keep=2, protect=()) == []


def test_leftovers_are_removed_and_nothing_else(any_store: Store) -> None:
    commit(any_store, 1)
    commit(any_store, 2)
    any_store.write_bytes("checkpoint-2/model.safetensors", b"")
    find_newest_intact(any_store, on_damage=lambda _: None)
    any_store.write_bytes("checkpoint-3/model.safetensors", b"half")
    any_store.write_bytes("model/model.safetensors", b"exported")

    assert delete_leftovers(any_store) == ["checkpoint-3"]

    assert steps(any_store) == [1]
    assert any_store.children() == ["checkpoint-1", "checkpoint-2", "model"]
