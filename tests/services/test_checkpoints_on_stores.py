"""Checkpoints on every kind of store: saved, loaded, listed, damaged, read, rotated, written by two at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tests.support.checkpoints import FILES, commit, no_damage, save, save_untrained, snapshot, steps, untrained
from tests.support.conformance import check_holds, state
from tests.support.conformance import save as save_state
from trainer_lib.checkpoint.catalogue import (
    delete_leftovers,
    find_newest_intact,
    get_last_checkpoint,
    list_checkpoints,
    read_checkpoint_info,
    rotate_checkpoints,
)
from trainer_lib.checkpoint.layout import DAMAGED
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.writer import BackgroundSaver, save_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import ConfigError, DamagedError, LeaseLostError, StorageError
from trainer_lib.locks import removal as module
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.removal import protect_from_removal, withdraw_if_unread
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, read_commit, write_commit


def test_everything_that_was_saved_is_loaded(any_store: Store) -> None:
    saved = snapshot(2)
    info = save_checkpoint(any_store, saved, SingleProcess())

    assert (info.step, info.name, info.url) == (2, "checkpoint-2", f"{any_store.url}/checkpoint-2")
    assert [entry.path for entry in info.commit.files] == FILES
    assert info.commit.meta == {"strategy": "single", "global_samples": 16, "step": 2, "world_size": 1}
    assert any_store.child("checkpoint-2").children() == sorted({name.split("/")[0] for name in FILES} | {COMMIT})
    assert find_newest_intact(any_store, on_damage=no_damage) == info

    loaded = load_checkpoint(any_store, "checkpoint-2", SingleProcess())
    assert loaded.commit == info.commit
    assert (loaded.scheduler, loaded.scaler, loaded.data) == (saved.scheduler, saved.scaler, saved.data)
    assert loaded.trainer_state == saved.trainer_state
    assert loaded.read_rng(0) == saved.rng
    assert loaded.read_file("tokenizer/vocab.txt") == b"a\nb\n"
    assert loaded.has_optimizer
    found = loaded.read_model()
    assert found.keys() == saved.model.keys()
    for name, tensor in saved.model.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    optimizer = loaded.read_optimizer()
    assert optimizer is not None
    assert saved.optimizer is not None
    assert optimizer.groups == saved.optimizer.groups
    assert optimizer.tensors.keys() == saved.optimizer.tensors.keys()
    assert all(torch.equal(optimizer.tensors[name], tensor) for name, tensor in saved.optimizer.tensors.items())


def test_saving_a_step_again_replaces_it_and_what_an_interrupted_save_left(any_store: Store) -> None:
    folder = any_store.child("checkpoint-2")
    folder.write_bytes("model.safetensors", b"half")
    folder.write_bytes("model-00001-of-00002.safetensors", b"of another layout")
    folder.write_bytes(WRITING, b"torn")
    save(any_store, 2, files={"old.txt": b"1"})
    info = save(any_store, 2, data={"position": 99})
    assert [file.path for file in folder.list()] == sorted([*FILES, COMMIT])
    assert find_newest_intact(any_store, on_damage=no_damage) == info
    assert load_checkpoint(any_store, "checkpoint-2", SingleProcess()).data == {"position": 99}


def test_the_model_alone_can_be_saved_and_nothing_uncommitted_loaded(any_store: Store) -> None:
    info = save(any_store, 2, optimizer=None, scheduler=None, scaler=None, rng={}, files={})
    names = [entry.path for entry in info.commit.files]
    assert names == ["data.json", "model.safetensors", "trainer_state.json", "training_args.json"]
    loaded = load_checkpoint(any_store, info.name, SingleProcess())
    assert not loaded.has_optimizer
    assert (loaded.read_optimizer(), loaded.scheduler, loaded.scaler) == (None, None, None)
    with pytest.raises(ConfigError, match="no random state of rank 0"):
        loaded.read_rng(0)
    any_store.delete(f"checkpoint-2/{COMMIT}")
    assert list_checkpoints(any_store) == []
    for name in ("checkpoint-2", "checkpoint-9"):
        with pytest.raises(ConfigError, match="no committed checkpoint") as caught:
            load_checkpoint(any_store, name, SingleProcess())
        assert caught.value.value == f"{any_store.url}/{name}"


def test_a_reader_that_comes_between_the_look_and_the_deletion_keeps_its_checkpoint(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_untrained(any_store, 1)
    folder = any_store.child("checkpoint-1")
    look = module.is_protected
    marks: list[AbstractContextManager[None]] = []

    def and_then_a_reader(store: Store, *, even_kept: bool = False) -> bool:
        found = look(store, even_kept=even_kept)
        if not marks:
            marks.append(protect_from_removal(folder))
            marks[0].__enter__()
        return found

    monkeypatch.setattr(module, "is_protected", and_then_a_reader)
    assert not withdraw_if_unread(folder)
    assert read_commit(folder) is not None
    load_checkpoint(any_store, "checkpoint-1", SingleProcess()).read_model()
    marks[0].__exit__(None, None, None)
    assert withdraw_if_unread(folder)
    with protect_from_removal(folder), pytest.raises(ConfigError, match="no committed checkpoint"):
        load_checkpoint(any_store, "checkpoint-1", SingleProcess())  # one that comes later finds nothing
    assert any_store.children() == []  # and leaves nothing


def test_the_bytes_are_those_of_the_snapshot_at_that_moment(any_store: Store) -> None:
    comm = SingleProcess()
    live = untrained(3)
    waited = save_checkpoint(any_store.child("waited"), live, comm)
    followed: list[int] = []
    saver = BackgroundSaver(comm, comm, timeout_s=1)
    saver.start(any_store.child("background"), live, after_commit=lambda: followed.append(3))
    for tensor in live.model.values():
        tensor.detach().zero_()
    assert live.optimizer is not None
    for tensor in live.optimizer.tensors.values():
        tensor.zero_()
    with pytest.raises(RuntimeError, match="One save at a time"):
        saver.start(any_store.child("background"), live, after_commit=lambda: None)
    info = saver.finish()
    saver.close()
    assert followed == [3]
    assert info.commit.files == waited.commit.files


def test_they_are_listed_by_step_newest_first(any_store: Store) -> None:
    assert steps(any_store) == []
    assert find_newest_intact(any_store, on_damage=no_damage) is None
    assert get_last_checkpoint(any_store.url) is None
    assert rotate_checkpoints(any_store, keep=1, protect=()) == delete_leftovers(any_store) == []
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


def test_the_oldest_go_first_and_leftovers_and_nothing_else(any_store: Store) -> None:
    for step in (10, 2, 30, 4):
        commit(any_store, step)
    assert rotate_checkpoints(any_store, keep=2, protect=()) == ["checkpoint-2", "checkpoint-4"]
    assert steps(any_store) == [30, 10]
    assert rotate_checkpoints(any_store, keep=2, protect=()) == []
    any_store.write_bytes("checkpoint-30/model.safetensors", b"")
    find_newest_intact(any_store, on_damage=lambda _: None)
    any_store.write_bytes("checkpoint-3/model.safetensors", b"half")
    any_store.write_bytes("model/model.safetensors", b"exported")
    assert delete_leftovers(any_store) == ["checkpoint-3"]
    assert steps(any_store) == [10]
    assert any_store.children() == ["checkpoint-10", "checkpoint-30", "model"]


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
    assert find_newest_intact(root, on_damage=no_damage) is not None
    check_holds(root, replace(state(2), data={"writer": outcomes.index(None)}))


@pytest.mark.parametrize("left", [False, True], ids=["fresh", "after a dead writer"])
def test_of_two_threads_one_wins(left: bool, any_store: Store) -> None:
    attempts = [replace(state(2), data={"writer": writer}) for writer in range(2)]  # seeded: not in the threads
    for _ in range(3):
        meeting, start = Meeting(left), threading.Barrier(2)
        if left:
            dead = replace(Holder.this_process(), started="long ago")
            any_store.child("checkpoint-2").write_bytes(WRITING, dead.to_bytes())

        def write(writer: int, meeting: Meeting = meeting, start: threading.Barrier = start) -> StorageError | None:
            root = Store(any_store.url, cast(Any, Held(any_store._backend, writer, meeting)))
            start.wait()
            try:
                save_state(root, attempts[writer])
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
