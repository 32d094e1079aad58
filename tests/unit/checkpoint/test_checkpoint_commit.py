"""A checkpoint is there whole or not at all, whatever fails while it is written, and whoever else writes it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import save, snapshot
from tests.support.conformance import fault_each_write, faulty
from tests.support.faulty import Faults, Kind
from trainer_lib.checkpoint import writer
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.checkpoint.snapshot import Snapshot, estimate_bytes
from trainer_lib.checkpoint.writer import add_files, save_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import CodeError, ConfigError, LeaseLostError, StorageError, StorageFullError, TrainflowError
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store


# --------------------------------------------------------------------------------------------------- what others read
def test_secrets_are_not_written(tmp_path: Path) -> None:
    info = save(Store.open(tmp_path))
    args = json.loads((Path(info.url) / "training_args.json").read_text())
    assert args == {"learning_rate": 0.01, "hub_token": "<HUB_TOKEN>", "nested": {"api_key": "<API_KEY>"}}
    assert all(b"s3cr3t" not in path.read_bytes() for path in Path(info.url).rglob("*") if path.is_file())


# --------------------------------------------------------------------------------------------------- stores that fail
@pytest.mark.parametrize("kind", ["error", "full", "short", "silent", "after", "die"])
def test_a_save_that_fails_at_each_write_in_turn_leaves_the_one_before(kind: Kind, faulty_url: str) -> None:
    root = Store.open(faulty_url)
    assert fault_each_write(root, root, kind)[0] > 30
    assert kind not in ("silent", "die") or fault_each_write(root, root, kind, by_blocks=True)[0] > 30


@pytest.mark.parametrize("kind", ["full", "die"])
def test_a_save_that_fails_at_each_write_to_the_disk_leaves_the_one_before(
    kind: Kind, tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power cut here
    plain = Store.open(tmp_path)
    writes, committed = fault_each_write(faulty(plain), plain, kind)
    assert writes > (45 if kind == "die" else 30)
    assert committed > 0 or kind != "die"


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    sizes = [sum(entry.size for entry in save(root, step).commit.files) for step in (1, 2, 3)]
    needed = estimate_bytes(snapshot(4), 1)
    assert max(sizes) <= needed, "an upper bound"
    monkeypatch.setattr(Store, "free_bytes", lambda self: 1234)
    with pytest.raises(StorageFullError, match=f"needs {needed:,} bytes, 1,234 are free") as caught:
        save_checkpoint(root, snapshot(4), SingleProcess(), keep=2)
    told = str(caught.value.remedy)
    assert f"save_total_limit=2 frees {sizes[0] + sizes[1]:,} bytes" in told
    assert "the disk must hold 3 checkpoints for a moment" in told
    assert root.children() == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    # What an interrupted save of the same step left counts as free.
    root.write_bytes("checkpoint-4/model.safetensors", bytes(needed - 1234))
    save(root, 4)
    monkeypatch.setattr(Store, "free_bytes", lambda self: needed)
    save(root, 5)
    assert [info.step for info in list_checkpoints(root)] == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"data": {"x": object()}}, "data.json"),
        ({"scheduler": {"fn": object()}}, "checkpoint"),
        ({"trainer_state": {"x": {1, 2}}}, "trainer_state.json"),
        ({"model": {"w": torch.zeros(2, dtype=torch.complex128)}}, "checkpoint"),
        ({"files": {"../escape": b""}}, "checkpoint"),
        ({"files": {"COMMIT.json": b""}}, "checkpoint"),
        ({"files": {"model.safetensors": b""}}, "checkpoint"),
        ({"files": {"rng/rank-00000.json": b""}}, "checkpoint"),
    ],
)
def test_a_state_that_cannot_be_written_is_refused_whole(changes: dict[str, Any], where: str, tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    with pytest.raises(ConfigError) as caught:
        save(root, 2, **changes)
    assert caught.value.field == where
    assert root.children() == []


def test_a_writer_that_was_replaced_cannot_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    write = writer._write_shared
    theirs = replace(Holder.this_process(), machine="elsewhere")

    def replaced(store: Store, given: Snapshot) -> Any:
        store.write_bytes(WRITING, theirs.to_bytes())
        return write(store, given)

    monkeypatch.setattr(writer, "_write_shared", replaced)
    with pytest.raises(LeaseLostError, match="taken this checkpoint's folder over"):
        save(root, 2)
    assert list_checkpoints(root) == []
    assert root.read_bytes(f"checkpoint-2/{WRITING}") == theirs.to_bytes()  # not ours to remove


# --------------------------------------------------------------------------------------------------------- many ranks
class Ranks:
    """Rank 0 of a world whose other rank answers from a script."""

    rank = local_rank = 0
    world_size = local_world_size = 2

    def __init__(self, failing: TrainflowError | None = None, at: int = 0, shared: Store | None = None) -> None:
        self._failing, self._at, self._shared, self._agreed = failing, at, shared, 0

    def agree(self, error: TrainflowError | None) -> None:
        self._agreed += 1
        error = error or (self._failing if self._agreed == self._at else None)
        if error is not None:
            raise error

    def gather_json(self, obj: Any) -> list[Any] | None:
        if isinstance(obj, str):  # the digest of equal copies
            return [obj, obj]
        if self._shared is not None:
            self._shared.write_bytes("checkpoint-2/rng/rank-00001.json", b"{}")
        theirs = {"path": "rng/rank-00001.json", "size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
        return [obj, [[theirs], {}]]  # the rank has no shard

    def broadcast_json(self, obj: Any) -> Any:
        return json.loads(json.dumps(obj))


@pytest.mark.parametrize("at", [1, 2])
def test_a_failure_of_another_rank_at_any_point_leaves_nothing(at: int, tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    comm: Any = Ranks(CodeError("rank 1 failed", rank=1), at, root)
    with pytest.raises(CodeError, match="rank 1 failed"):
        save_checkpoint(root, snapshot(2), comm)
    assert root.children() == []


def test_a_rank_whose_files_are_not_on_this_storage_prevents_the_commit(tmp_path: Path) -> None:
    comm: Any = Ranks()
    with pytest.raises(StorageError, match=r"rng/rank-00001\.json: missing") as caught:
        save_checkpoint(Store.open(tmp_path), snapshot(2), comm)
    assert "must share the storage" in str(caught.value.remedy)


class WithAnotherMachine(SingleProcess):
    """Rank 0 of two machines; the other machine has uploaded one file."""

    world_size = 2

    def __init__(self, path: str, data: bytes) -> None:
        self._other = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def gather_json(self, obj: Any) -> list[Any] | None:
        return [*(super().gather_json(obj) or []), [self._other]]


def test_two_machines_add_equal_files_or_files_of_different_names(memory_url: str) -> None:
    def write(folder: Path) -> None:
        (folder / "notes.txt").write_bytes(b"one")

    store = Store.open(memory_url)
    for path, data in (("notes.txt", b"one"), ("of-rank-1.txt", b"two")):
        assert add_files(store.child(path), WithAnotherMachine(path, data), write).keys() == {"notes.txt", path}
    with pytest.raises(ConfigError, match="different bytes") as caught:
        add_files(store.child("different"), WithAnotherMachine("notes.txt", b"two"), write)
    assert (caught.value.field, caught.value.value) == ("save_model", "notes.txt")
