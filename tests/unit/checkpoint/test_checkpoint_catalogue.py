"""Which checkpoints there are and which may go: those that are read, kept or just written stay."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import commit, no_damage, save_untrained, steps
from tests.support.faulty import Faults, FaultyFileSystem
from trainer_lib.checkpoint.catalogue import delete_leftovers, find_newest_intact, list_checkpoints, rotate_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import DamagedError, StorageError
from trainer_lib.locks import removal
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.removal import (
    KEEP,
    end_keeping,
    is_kept,
    keep_checkpoint,
    protect_from_removal,
    withdraw_if_unread,
)
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT


@pytest.fixture
def root(tmp_path: Path) -> Store:
    return Store.open(tmp_path)


@pytest.fixture
def folder(root: Store) -> Store:
    """The folder of an untrained checkpoint-1, the only one."""
    save_untrained(root, 1)
    return root.child("checkpoint-1")


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
    newest = find_newest_intact(root, on_damage=told.append)
    faults.plan(None)
    assert newest is not None and newest.step == 1
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
def test_the_newest_and_the_protected_stay(
    keep: int | None, protect: tuple[str, ...], left: list[int], root: Store
) -> None:
    for step in (1, 2, 3, 4):
        commit(root, step)
    rotate_checkpoints(root, keep=keep, protect=protect)
    assert steps(root) == left


@pytest.mark.parametrize("harm", [lambda data: b"", lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_damaged_newest_does_not_cost_the_newest_good_one(harm: Callable[[bytes], bytes], root: Store) -> None:
    for step in (1, 2, 3):
        save_untrained(root, step)
    name = "checkpoint-3/model.safetensors"
    root.write_bytes(name, harm(root.read_bytes(name)))
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-1"]
    newest = find_newest_intact(root, on_damage=lambda _: None)
    assert newest is not None and newest.step == 2


def test_one_just_written_is_known_by_its_writing_and_its_sizes(root: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_untrained(root, step)
    read: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Store, "digest", lambda self, rel: read.append(rel))
        assert rotate_checkpoints(root, keep=1, protect=(), just_written="checkpoint-2") == ["checkpoint-1"]
    assert read == []
    save_untrained(root, 3)
    root.write_bytes("checkpoint-3/optimizer.safetensors", b"")
    assert rotate_checkpoints(root, keep=1, protect=(), just_written="checkpoint-3") == [] and steps(root) == [3, 2]


def test_models_alone_do_not_cost_the_newest_that_can_be_resumed(root: Store) -> None:
    alone: dict[str, Any] = {"optimizer": None, "scheduler": None, "scaler": None, "rng": {}}
    for step in range(1, 6):
        save_untrained(root, step, **(alone if step > 2 else {}))
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert steps(root) == [5, 2] and find_newest_intact(root, on_damage=pytest.fail) == list_checkpoints(root)[0]
    resumable = find_newest_intact(root, on_damage=pytest.fail, resumable=True)
    assert resumable is not None and resumable.step == 2
    save_untrained(root, 6)
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-2", "checkpoint-5"]


def test_a_deletion_that_fails_leaves_no_half_checkpoint(faulty_url: str, faults: Faults) -> None:
    root = Store.open(faulty_url)
    for step in (1, 2, 3):
        commit(root, step)
    faults.plan(2)
    with pytest.raises(StorageError):
        rotate_checkpoints(root, keep=1, protect=())
    faults.plan(None)
    assert steps(root) == [3, 2] and delete_leftovers(root) == ["checkpoint-1"]
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-2"]


def test_a_save_under_way_on_this_machine_is_no_leftover(root: Store) -> None:
    living = Holder.this_process()
    for step, claim in ((1, living), (2, replace(living, started="1")), (3, replace(living, machine="elsewhere"))):
        root.write_bytes(f"checkpoint-{step}/{WRITING}", claim.to_bytes())
    root.write_bytes(f"checkpoint-4/{WRITING}", b"torn")
    assert delete_leftovers(root) == ["checkpoint-4", "checkpoint-3", "checkpoint-2"]
    assert root.children() == ["checkpoint-1"]


# ------------------------------------------------------------------------------------------------------------- readers
def test_several_may_read_at_once_and_cost_no_newer_one(folder: Store, root: Store) -> None:
    for step in (2, 3, 4):
        save_untrained(root, step)
    with protect_from_removal(folder):
        with protect_from_removal(folder):
            assert len(removal.list_readers(folder)) == 2
        assert not withdraw_if_unread(folder)
        assert rotate_checkpoints(root, keep=3, protect=()) == [] and steps(root) == [4, 3, 2, 1]
    assert rotate_checkpoints(root, keep=3, protect=()) == ["checkpoint-1"]
    assert withdraw_if_unread(root.child("checkpoint-2")) and root.children() == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(
    ("minutes", "counts"), [(0, True), (-59, True), (59, True), (-61, False), (61, False), (None, False)]
)
def test_a_mark_from_another_machine_counts_for_an_hour(minutes: int | None, counts: bool, folder: Store) -> None:
    since = "yesterday" if minutes is None else (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat()
    mark = replace(Holder.this_process(removal.TTL_S), machine="elsewhere", since=since)
    folder.write_bytes("READING-1.json", mark.to_bytes())
    folder.write_bytes("READING-2.json", b"torn")
    assert withdraw_if_unread(folder) is not counts


def test_a_long_reader_renews_its_mark(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "RENEW_S", 0.02)
    names: set[str] = set()
    enough = threading.Event()
    with protect_from_removal(folder):
        while len(names) < 3 and not enough.wait(0.005):
            now = {name for name in folder.children() if name.startswith("READING")}
            assert now, "a moment without a mark"
            names |= now
    assert not [name for name in folder.children() if name.startswith("READING")]


def test_where_nothing_can_be_written_reading_works_all_the_same(faulty_url: str, faults: Faults) -> None:
    root = Store.open(faulty_url)
    save_untrained(root, 1)
    faults.plan(1)
    with protect_from_removal(root.child("checkpoint-1")):
        faults.plan(None)
        load_checkpoint(root, "checkpoint-1", SingleProcess()).read_model()


# ------------------------------------------------------------------------------------------------------------- keeping
def test_a_kept_checkpoint_stays_until_its_mark_is_taken_away_or_training_went_back(folder: Store, root: Store) -> None:
    assert not keep_checkpoint(root.child("checkpoint-0"), "the best"), "a removed one is not made again by a mark"
    assert root.children() == ["checkpoint-1"]
    for step in (2, 3):
        save_untrained(root, step)
    for name in ("checkpoint-1", "checkpoint-1", "checkpoint-2"):  # safe to repeat
        assert keep_checkpoint(root.child(name), "the best")
    assert rotate_checkpoints(root, keep=1, protect=()) == []
    end_keeping(folder)
    assert not is_kept(folder)
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-1"]
    assert not withdraw_if_unread(root.child("checkpoint-2"))
    assert withdraw_if_unread(root.child("checkpoint-2"), even_kept=True)


@pytest.mark.parametrize("at", ["before the commit is deleted", "after the commit is deleted"])
def test_a_mark_that_comes_during_the_removal_is_seen(at: str, folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remover has looked for marks already; it looks again once the commit is gone, and puts the commit back."""
    whole, delete, marked = folder.read_bytes(COMMIT), Store.delete, []

    def marking_delete(self: Store, rel: str) -> None:
        if rel == COMMIT and at.startswith("before"):
            marked.append(keep_checkpoint(self, "the best"))
        delete(self, rel)
        if rel == COMMIT and at.startswith("after"):
            # The marker had looked for the commit just before it was deleted.
            self.create(KEEP, b"{}")
            marked.append(True)

    monkeypatch.setattr(Store, "delete", marking_delete)
    assert not withdraw_if_unread(folder)
    assert marked == [True]
    assert folder.read_bytes(COMMIT) == whole


def test_a_mark_that_comes_too_late_is_taken_back(folder: Store, root: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint goes between the marker's two looks: it is told that nothing is kept."""
    create = Store.create

    def late_create(self: Store, rel: str, data: bytes) -> Any:
        if rel == KEEP:
            assert withdraw_if_unread(Store.open(folder.url))
        return create(self, rel, data)

    monkeypatch.setattr(Store, "create", late_create)
    assert not keep_checkpoint(folder, "the best")
    assert steps(root) == []
    assert KEEP not in folder.children()
