"""A checkpoint is there whole or not at all, whatever fails while it is written, and whoever else writes it."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.checkpoints import Net, no_damage, save, snapshot, trained
from tests.support.conformance import fault_each_write, faulty
from tests.support.faulty import Faults, Kind
from trainer_lib.checkpoint import writer
from trainer_lib.checkpoint.added_files import add_files
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.snapshot import Snapshot, estimate_bytes
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import CodeError, ConfigError, LeaseLostError, StorageError, StorageFullError, TrainflowError
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store

# --------------------------------------------------------------------------------------------------- what others read


def test_the_weights_load_with_safetensors_as_they_are(tmp_path: Path) -> None:
    info = save(Store.open(tmp_path))
    net = Net()
    safetensors.torch.load_model(net, Path(info.url) / "model.safetensors")
    for one, two in zip(net.state_dict().values(), trained()[0].state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_secrets_are_not_written(tmp_path: Path) -> None:
    info = save(Store.open(tmp_path))
    args = json.loads((Path(info.url) / "training_args.json").read_text())
    assert args == {"learning_rate": 0.01, "hub_token": "<HUB_TOKEN>", "nested": {"api_key": "<API_KEY>"}}
    assert all(b"s3cr3t" not in path.read_bytes() for path in Path(info.url).rglob("*") if path.is_file())


def test_nothing_is_pickled_or_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise AssertionError("pickle")

    for module, names in ((pickle, ("dump", "dumps", "load", "loads", "Unpickler")), (torch, ("load", "save"))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    root = Store.open(tmp_path)
    save(root)
    loaded = load_checkpoint(root, "checkpoint-2", SingleProcess())
    loaded.read_model()
    loaded.read_optimizer()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".safetensors", ".txt")


# --------------------------------------------------------------------------------------------------- stores that fail


@pytest.mark.parametrize("kind", ["error", "full", "short", "silent", "after", "slow", "die"])
def test_a_save_that_fails_at_each_write_in_turn_leaves_the_one_before(kind: Kind, faulty_url: str) -> None:
    root = Store.open(faulty_url)
    tally = fault_each_write(root, root, kind)
    assert tally.hit == tally.writes > 30


@pytest.mark.parametrize("kind", ["error", "full", "silent", "after", "die"])
def test_a_save_that_fails_at_each_write_to_the_disk_leaves_the_one_before(
    kind: Kind, tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power cut here
    plain = Store.open(tmp_path)
    tally = fault_each_write(faulty(plain), plain, kind)
    assert tally.hit == tally.writes > (45 if kind == "die" else 30)
    assert tally.committed > 0 or kind != "die"


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    save(root, 1)
    needed = estimate_bytes(snapshot(2), 1)
    monkeypatch.setattr(Store, "free_bytes", lambda self: 1234)
    with pytest.raises(StorageFullError, match=f"needs {needed:,} bytes, 1,234 are free"):
        save(root, 2)
    assert root.children() == ["checkpoint-1"]
    monkeypatch.setattr(Store, "free_bytes", lambda self: needed)
    save(root, 2)


def test_what_retention_would_give_back_is_said_when_space_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Store.open(tmp_path)
    sizes = [sum(entry.size for entry in save(root, step).commit.files) for step in (1, 2, 3)]
    monkeypatch.setattr(Store, "free_bytes", lambda self: 1234)
    with pytest.raises(StorageFullError) as caught:
        save_checkpoint(root, snapshot(4), SingleProcess(), keep=2)
    told = str(caught.value.remedy)
    assert f"save_total_limit=2 frees {sizes[0] + sizes[1]:,} bytes" in told
    assert "the disk must hold 3 checkpoints for a moment" in told
    assert list_checkpoints(root)[-1].step == 1


def test_what_an_interrupted_save_of_the_same_step_left_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Store.open(tmp_path)
    needed = estimate_bytes(snapshot(2), 1)
    root.write_bytes("checkpoint-2/model.safetensors", bytes(needed - 1000))
    monkeypatch.setattr(Store, "free_bytes", lambda self: 1000)
    save(root, 2)
    assert [info.step for info in list_checkpoints(root)] == [2]


def test_the_space_check_is_an_upper_bound(tmp_path: Path) -> None:
    info = save(Store.open(tmp_path))
    assert sum(entry.size for entry in info.commit.files) <= estimate_bytes(snapshot(2), 1)


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


def test_two_saves_of_one_process_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Store.open(tmp_path)
    errors: list[TrainflowError] = []
    write = writer._write_shared

    def meanwhile(store: Store, given: Snapshot) -> Any:
        monkeypatch.setattr(writer, "_write_shared", write)
        with pytest.raises(StorageError, match="being written") as caught:
            save(root, 2)
        errors.append(caught.value)
        return write(store, given)

    monkeypatch.setattr(writer, "_write_shared", meanwhile)
    info = save(root, 2)
    assert len(errors) == 1
    assert find_newest_intact(root, on_damage=no_damage) == info


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
    """Rank 0 of a world whose other ranks answer from a script."""

    rank = 0
    local_rank = 0

    def __init__(self, failing: TrainflowError | None = None, at: int = 0, shared: Store | None = None) -> None:
        self.world_size = 2
        self._shared = shared
        self.local_world_size = 2
        self._failing, self._at, self._agreed = failing, at, 0

    def agree(self, error: TrainflowError | None) -> None:
        self._agreed += 1
        error = error or (self._failing if self._agreed == self._at else None)
        if error is not None:
            raise error

    def gather_json(self, obj: Any) -> list[Any] | None:
        if self._shared is not None:
            self._shared.write_bytes("checkpoint-2/rng/rank-00001.json", b"{}")
        return [
            obj,
            [
                [
                    {
                        "path": "rng/rank-00001.json",
                        "size": 2,
                        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
                    }
                ],
                {},  # of a shard: it has none
            ],
        ]

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


def _write(folder: Path) -> None:
    (folder / "notes.txt").write_bytes(b"one")


@pytest.mark.parametrize(("path", "data"), [("notes.txt", b"one"), ("of-rank-1.txt", b"two")])
def test_two_machines_add_equal_files_or_files_of_different_names(path: str, data: bytes) -> None:
    added = add_files(Store.open("memory://added/equal"), WithAnotherMachine(path, data), _write)
    assert added.keys() == {"notes.txt", path}


def test_one_name_with_different_bytes_on_two_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="different bytes") as caught:
        add_files(Store.open("memory://added/different"), WithAnotherMachine("notes.txt", b"two"), _write)
    assert (caught.value.field, caught.value.value) == ("save_model", "notes.txt")
