"""Retention and readers: a checkpoint that is being read stays, and a reader that died does not keep it for ever."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import save_untrained, steps
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints, rotate_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.commit import COMMIT
from trainer_lib.distributed import SingleProcess
from trainer_lib.locks import readers as module
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.readers import protect_from_removal, withdraw_if_unread
from trainer_lib.storage import Store


def test_several_may_read_at_once(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    save_untrained(root, 1)
    folder = root.child("checkpoint-1")
    with protect_from_removal(folder):
        with protect_from_removal(folder):
            assert len(module.list_readers(folder)) == 2
        assert not withdraw_if_unread(folder)
    assert withdraw_if_unread(folder)
    assert root.children() == []


@pytest.mark.parametrize(
    ("minutes", "counts"), [(0, True), (-59, True), (59, True), (-61, False), (61, False), (None, False)]
)
def test_a_mark_from_another_machine_counts_for_an_hour(minutes: int | None, counts: bool, tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    save_untrained(root, 1)
    since = "yesterday" if minutes is None else (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat()
    mark = replace(Holder.this_process(module.TTL_S), machine="elsewhere", since=since)
    root.write_bytes("checkpoint-1/READING-1.json", mark.to_bytes())
    root.write_bytes("checkpoint-1/READING-2.json", b"torn")
    assert withdraw_if_unread(root.child("checkpoint-1")) is not counts


def test_a_long_reader_renews_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    save_untrained(root, 1)
    folder = root.child("checkpoint-1")
    monkeypatch.setattr(module, "RENEW_S", 0.02)
    names: set[str] = set()
    enough = threading.Event()
    with protect_from_removal(folder):
        while len(names) < 3 and not enough.wait(0.005):
            now = {name for name in folder.children() if name.startswith("READING")}
            assert now, "a moment without a mark"
            names |= now
    assert not [name for name in folder.children() if name.startswith("READING")]


def test_where_nothing_can_be_written_reading_works_all_the_same(faulty_url: str, faults: object) -> None:
    from tests.support.faulty import FAULTS

    root = Store.open(faulty_url)
    save_untrained(root, 1)
    FAULTS.plan(1)
    with protect_from_removal(root.child("checkpoint-1")):
        FAULTS.plan(None)
        load_checkpoint(root, "checkpoint-1", SingleProcess()).read_model()


# ------------------------------------------------------------------------------------------------------- what is needed


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_a_flipped_bit_in_the_newest_does_not_cost_the_newest_good_one(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2, 3):
        save_untrained(root, step)
    flip(tmp_path / "checkpoint-3" / "model.safetensors")
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-1"]
    found = find_newest_intact(root, on_damage=lambda _: None)
    assert found is not None
    assert found.step == 2


def test_one_that_is_read_stays_and_costs_no_newer_one(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2, 3, 4):
        save_untrained(root, step)
    with protect_from_removal(root.child("checkpoint-1")):
        assert rotate_checkpoints(root, keep=3, protect=()) == []
        assert steps(root) == [4, 3, 2, 1]
    assert rotate_checkpoints(root, keep=3, protect=()) == ["checkpoint-1"]


def test_one_just_written_is_known_by_its_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2):
        save_untrained(root, step)
    read: list[str] = []
    monkeypatch.setattr(Store, "digest", lambda self, rel: read.append(rel))
    assert rotate_checkpoints(root, keep=1, protect=(), just_written="checkpoint-2") == ["checkpoint-1"]
    assert read == []


def test_its_sizes_are_looked_at_all_the_same(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    for step in (1, 2):
        save_untrained(root, step)
    (tmp_path / "checkpoint-2" / "optimizer.safetensors").write_bytes(b"")
    assert rotate_checkpoints(root, keep=1, protect=(), just_written="checkpoint-2") == []
    assert steps(root) == [2, 1]


def test_models_alone_do_not_cost_the_newest_that_can_be_resumed(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    alone: dict[str, Any] = {"optimizer": None, "scheduler": None, "scaler": None, "rng": {}}
    save_untrained(root, 1)
    save_untrained(root, 2)
    for step in (3, 4, 5):
        save_untrained(root, step, **alone)
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert steps(root) == [5, 2]
    assert find_newest_intact(root, on_damage=pytest.fail) == list_checkpoints(root)[0]
    resumable = find_newest_intact(root, on_damage=pytest.fail, resumable=True)
    assert resumable is not None
    assert resumable.step == 2
    save_untrained(root, 6)
    assert rotate_checkpoints(root, keep=1, protect=()) == ["checkpoint-2", "checkpoint-5"]


def test_the_commit_is_there_or_nothing_is(tmp_path: Path) -> None:
    """What a remover that died between its two deletions leaves does not count as a checkpoint."""
    root = Store.open(tmp_path)
    save_untrained(root, 1)
    root.child("checkpoint-1").delete(COMMIT)
    assert steps(root) == []
