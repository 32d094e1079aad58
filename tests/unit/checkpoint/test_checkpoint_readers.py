"""Retention and readers: a checkpoint that somebody is reading stays, and nobody who died keeps it for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import untrained
from tests.support.repository import ROOT
from trainer_lib.checkpoint.catalogue import list_checkpoints, newest_good, rotate
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.commit import COMMIT, read_commit
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import ConfigError
from trainer_lib.locks import readers as module
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.readers import reading, withdraw_unread
from trainer_lib.storage import Store


def save(root: Store, step: int, **changes: Any) -> None:
    save_checkpoint(root, replace(untrained(step), **changes), SingleProcess())


def steps(root: Store) -> list[int]:
    return [info.step for info in list_checkpoints(root)]


def test_one_that_is_being_read_stays_until_the_reader_is_done(any_store: Store) -> None:
    for step in (1, 2, 3):
        save(any_store, step)
    with reading(any_store.child("checkpoint-1")):
        assert rotate(any_store, keep=1, protect=()) == ["checkpoint-2"]
        load_checkpoint(any_store, "checkpoint-1", SingleProcess()).model()
    assert all(not name.startswith("READING") for name in any_store.child("checkpoint-1").children())
    assert rotate(any_store, keep=1, protect=()) == ["checkpoint-1"]
    assert any_store.children() == ["checkpoint-3"]


def test_several_may_read_at_once(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    save(root, 1)
    folder = root.child("checkpoint-1")
    with reading(folder):
        with reading(folder):
            assert len(module.readers(folder)) == 2
        assert not withdraw_unread(folder)
    assert withdraw_unread(folder)
    assert root.children() == []


def test_a_reader_that_comes_between_the_look_and_the_deletion_keeps_its_checkpoint(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(any_store, 1)
    folder = any_store.child("checkpoint-1")
    look = module.readers
    marks: list[AbstractContextManager[None]] = []

    def and_then_a_reader(store: Store) -> list[Holder]:
        found = look(store)
        if not marks:
            marks.append(reading(folder))
            marks[0].__enter__()
        return found

    monkeypatch.setattr(module, "readers", and_then_a_reader)
    assert not withdraw_unread(folder)
    assert read_commit(folder) is not None
    load_checkpoint(any_store, "checkpoint-1", SingleProcess()).model()
    marks[0].__exit__(None, None, None)
    assert withdraw_unread(folder)


def test_a_reader_that_comes_after_the_deletion_finds_nothing(any_store: Store) -> None:
    save(any_store, 1)
    folder = any_store.child("checkpoint-1")
    assert withdraw_unread(folder)
    with reading(folder), pytest.raises(ConfigError, match="no committed checkpoint"):
        load_checkpoint(any_store, "checkpoint-1", SingleProcess())
    assert any_store.children() == []  # and leaves nothing


READER = """
import sys
from trainer_lib.locks.readers import reading
from trainer_lib.storage import Store

with reading(Store.open(sys.argv[1])):
    print("reading", flush=True)
    sys.stdin.read()
"""


def test_another_process_counts_while_it_lives_and_not_when_it_was_killed(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2):
        save(root, step)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READER, str(tmp_path / "checkpoint-1")]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        assert rotate(root, keep=1, protect=()) == []
        reader.send_signal(signal.SIGKILL)
    assert rotate(root, keep=1, protect=()) == ["checkpoint-1"]
    assert root.children() == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("minutes", "counts"), [(0, True), (-59, True), (59, True), (-61, False), (61, False), (None, False)]
)
def test_a_mark_from_another_machine_counts_for_an_hour(minutes: int | None, counts: bool, tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    save(root, 1)
    since = "yesterday" if minutes is None else (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat()
    mark = replace(Holder.this_process(module.TTL_S), machine="elsewhere", since=since)
    root.write_bytes("checkpoint-1/READING-1.json", mark.to_bytes())
    root.write_bytes("checkpoint-1/READING-2.json", b"torn")
    assert withdraw_unread(root.child("checkpoint-1")) is not counts


def test_a_long_reader_renews_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    save(root, 1)
    folder = root.child("checkpoint-1")
    monkeypatch.setattr(module, "RENEW_S", 0.02)
    names: set[str] = set()
    enough = threading.Event()
    with reading(folder):
        while len(names) < 3 and not enough.wait(0.005):
            now = {name for name in folder.children() if name.startswith("READING")}
            assert now, "a moment without a mark"
            names |= now
    assert not [name for name in folder.children() if name.startswith("READING")]


def test_where_nothing_can_be_written_reading_works_all_the_same(faulty_url: str, faults: object) -> None:
    from tests.support.faulty import FAULTS

    root = Store.open(faulty_url)
    save(root, 1)
    FAULTS.plan(1)
    with reading(root.child("checkpoint-1")):
        FAULTS.plan(None)
        load_checkpoint(root, "checkpoint-1", SingleProcess()).model()


# ------------------------------------------------------------------------------------------------------- what is needed


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_a_flipped_bit_in_the_newest_does_not_cost_the_newest_good_one(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2, 3):
        save(root, step)
    flip(tmp_path / "checkpoint-3" / "model.safetensors")
    assert rotate(root, keep=1, protect=()) == ["checkpoint-1"]
    found = newest_good(root, on_damage=lambda _: None)
    assert found is not None
    assert found.step == 2


def test_one_just_written_is_known_by_its_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2):
        save(root, step)
    read: list[str] = []
    monkeypatch.setattr(Store, "digest", lambda self, rel: read.append(rel))
    assert rotate(root, keep=1, protect=(), just_written="checkpoint-2") == ["checkpoint-1"]
    assert read == []


def test_its_sizes_are_looked_at_all_the_same(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2):
        save(root, step)
    (tmp_path / "checkpoint-2" / "optimizer.safetensors").write_bytes(b"")
    assert rotate(root, keep=1, protect=(), just_written="checkpoint-2") == []
    assert steps(root) == [2, 1]


def test_models_alone_do_not_cost_the_newest_that_can_be_resumed(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    alone: dict[str, Any] = {"optimizer": None, "scheduler": None, "scaler": None, "rng": {}}
    save(root, 1)
    save(root, 2)
    for step in (3, 4, 5):
        save(root, step, **alone)
    assert rotate(root, keep=1, protect=()) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert steps(root) == [5, 2]
    assert newest_good(root, on_damage=pytest.fail) == list_checkpoints(root)[0]
    resumable = newest_good(root, on_damage=pytest.fail, resumable=True)
    assert resumable is not None
    assert resumable.step == 2
    save(root, 6)
    assert rotate(root, keep=1, protect=()) == ["checkpoint-2", "checkpoint-5"]


def test_the_commit_is_there_or_nothing_is(tmp_path: Path) -> None:
    """What a remover that died between its two deletions leaves does not count as a checkpoint."""
    root = Store.open(tmp_path)
    save(root, 1)
    root.child("checkpoint-1").delete(COMMIT)
    assert steps(root) == []
