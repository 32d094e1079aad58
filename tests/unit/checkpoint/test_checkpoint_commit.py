"""A checkpoint is there whole or not at all, on every store, whatever fails while it is written."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.checkpoints import FILES, Net, no_damage, save, snapshot, trained
from tests.support.faulty import Died, Faults, Kind
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.snapshot import estimate_bytes
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.commit import COMMIT, verify_files
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import (
    ConfigError,
    StorageFullError,
    TrainflowError,
)
from trainer_lib.locks.claim import WRITING
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


def _writes(url: str, faults: Faults) -> int:
    faults.plan(None)
    save(Store.open(f"{url}/counting"))
    return faults.count


@pytest.mark.parametrize("kind", ["error", "full", "short", "silent", "after", "die"])
def test_a_save_that_fails_at_each_write_in_turn_leaves_the_one_before(
    kind: Kind, faulty_url: str, faults: Faults
) -> None:
    writes = _writes(faulty_url, faults)
    assert writes > 3 * len(FILES)
    root = Store.open(faulty_url)
    first = save(root, 1)
    second = snapshot(2)
    for at in range(1, writes + 1):
        faults.plan(at, kind)
        told = None
        try:
            told = save_checkpoint(root, second, SingleProcess())
        except (TrainflowError, Died) as error:
            assert isinstance(error, StorageFullError) or kind != "full", error
        faults.plan(None)
        found = find_newest_intact(root, on_damage=lambda _: None)
        assert found is not None
        if told is not None:
            assert found == told
        else:
            # Whole and committed although the writer does not know it, or absent: nothing between.
            assert found == first or (found.step == 2 and verify_files(root.child(found.name), found.commit) == [])
        if kind not in ("die", "after") and told is None:
            left = {info.path for info in root.list() if info.path.startswith("checkpoint-2")}
            assert left <= {f"checkpoint-2/{WRITING}"}  # the space is given back
        root.delete_tree("checkpoint-2")
    assert find_newest_intact(root, on_damage=no_damage) == first


def test_after_a_death_at_each_write_the_same_save_works(faulty_url: str, faults: Faults) -> None:
    writes = _writes(faulty_url, faults)
    root = Store.open(faulty_url)
    second = snapshot(2)
    for at in range(1, writes + 1):
        faults.plan(at, "die")
        with pytest.raises(Died):
            save_checkpoint(root, second, SingleProcess())
        faults.plan(None)
        info = save_checkpoint(root, second, SingleProcess())
        assert [file.path for file in root.child(info.name).list()] == sorted([*FILES, COMMIT])


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
