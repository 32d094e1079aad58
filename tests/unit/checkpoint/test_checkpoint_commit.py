"""A checkpoint is there whole or not at all, on every store, whatever fails while it is written."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.checkpoints import Net, save, snapshot, trained
from tests.support.faulty import Died, Faults, Kind
from trainer_lib.checkpoint.catalogue import WRITING, list_checkpoints, newest_good
from trainer_lib.checkpoint.optimizer import restore_optimizer
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.writer import bytes_needed, save_checkpoint
from trainer_lib.commit import COMMIT, verify
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import (
    ConfigError,
    StorageFullError,
    TrainflowError,
)
from trainer_lib.storage import Store

FILES = [
    "config.json", "data.json", "model.safetensors", "optimizer.json", "optimizer.safetensors", "rng/rank-00000.json",
    "scaler.json", "scheduler.json", "tokenizer/vocab.txt", "trainer_state.json", "training_args.json",
]  # fmt: skip


def no_damage(what: str) -> None:
    pytest.fail(what)


# ---------------------------------------------------------------------------------------------- every kind of store


def test_everything_that_was_saved_is_loaded(any_store: Store) -> None:
    saved = snapshot(2)
    info = save_checkpoint(any_store, saved, SingleProcess())

    assert (info.step, info.name, info.url) == (2, "checkpoint-2", f"{any_store.url}/checkpoint-2")
    assert [entry.path for entry in info.commit.files] == FILES
    assert info.commit.meta == {"strategy": "single", "global_samples": 16, "step": 2, "world_size": 1}
    assert any_store.child("checkpoint-2").children() == sorted({name.split("/")[0] for name in FILES} | {COMMIT})
    assert newest_good(any_store, on_damage=no_damage) == info

    loaded = load_checkpoint(any_store, "checkpoint-2", SingleProcess())
    assert loaded.commit == info.commit
    assert (loaded.scheduler, loaded.scaler, loaded.data) == (saved.scheduler, saved.scaler, saved.data)
    assert loaded.trainer_state == saved.trainer_state
    assert loaded.rng(0) == saved.rng
    assert loaded.file("tokenizer/vocab.txt") == b"a\nb\n"
    assert loaded.has_optimizer
    found = loaded.model()
    assert found.keys() == saved.model.keys()
    for name, tensor in saved.model.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    optimizer = loaded.optimizer()
    assert optimizer is not None
    assert saved.optimizer is not None
    assert optimizer.groups == saved.optimizer.groups
    assert optimizer.tensors.keys() == saved.optimizer.tensors.keys()
    assert all(torch.equal(optimizer.tensors[name], tensor) for name, tensor in saved.optimizer.tensors.items())


def test_training_goes_on_from_it_bit_for_bit(any_store: Store) -> None:
    net, optimizer = trained(2)
    save(any_store, 2)
    loaded = load_checkpoint(any_store, "checkpoint-2", SingleProcess())
    other = Net()
    other.load_state_dict(loaded.model())
    resumed = torch.optim.AdamW(other.parameters(), lr=0.5)
    found = loaded.optimizer()
    assert found is not None
    restore_optimizer(resumed, other.named_parameters(), found)

    for model, optim in ((net, optimizer), (other, resumed)):
        for step in range(3):
            optim.zero_grad()
            model(torch.arange(5).roll(step)).backward()
            optim.step()
    for one, two in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_saving_the_same_step_again_replaces_it(any_store: Store) -> None:
    save(any_store, 2, files={"old.txt": b"1"})
    info = save(any_store, 2, data={"position": 99})
    assert newest_good(any_store, on_damage=no_damage) == info
    assert load_checkpoint(any_store, "checkpoint-2", SingleProcess()).data == {"position": 99}
    assert not any_store.exists("checkpoint-2/old.txt")


def test_what_an_interrupted_save_left_is_cleared_first(any_store: Store) -> None:
    folder = any_store.child("checkpoint-2")
    folder.write_bytes("model.safetensors", b"half")
    folder.write_bytes("model-00001-of-00002.safetensors", b"of another layout")
    folder.write_bytes(WRITING, b"torn")
    save(any_store, 2)
    assert [info.path for info in folder.list()] == sorted([*FILES, COMMIT])


def test_only_the_model_can_be_saved(any_store: Store) -> None:
    info = save(any_store, 2, optimizer=None, scheduler=None, scaler=None, rng={}, files={})
    names = [entry.path for entry in info.commit.files]
    assert names == ["data.json", "model.safetensors", "trainer_state.json", "training_args.json"]
    loaded = load_checkpoint(any_store, info.name, SingleProcess())
    assert not loaded.has_optimizer
    assert (loaded.optimizer(), loaded.scheduler, loaded.scaler) == (None, None, None)
    with pytest.raises(ConfigError, match="no random state of rank 0"):
        loaded.rng(0)


def test_an_uncommitted_one_cannot_be_loaded(any_store: Store) -> None:
    save(any_store, 2)
    any_store.delete(f"checkpoint-2/{COMMIT}")
    assert list_checkpoints(any_store) == []
    for name in ("checkpoint-2", "checkpoint-9"):
        with pytest.raises(ConfigError, match="no committed checkpoint") as caught:
            load_checkpoint(any_store, name, SingleProcess())
        assert caught.value.value == f"{any_store.url}/{name}"


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
    loaded.model()
    loaded.optimizer()
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
        found = newest_good(root, on_damage=lambda _: None)
        assert found is not None
        if told is not None:
            assert found == told
        else:
            # Whole and committed although the writer does not know it, or absent: nothing between.
            assert found == first or (found.step == 2 and verify(root.child(found.name), found.commit) == [])
        if kind not in ("die", "after") and told is None:
            left = {info.path for info in root.list() if info.path.startswith("checkpoint-2")}
            assert left <= {f"checkpoint-2/{WRITING}"}  # the space is given back
        root.delete_tree("checkpoint-2")
    assert newest_good(root, on_damage=no_damage) == first


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
    needed = bytes_needed(snapshot(2), 1)
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
    assert f"save_total_limit=2 will give {sizes[0] + sizes[1]:,} bytes back" in told
    assert "the disk must hold 3 for a moment" in told
    assert list_checkpoints(root)[-1].step == 1


def test_what_an_interrupted_save_of_the_same_step_left_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Store.open(tmp_path)
    needed = bytes_needed(snapshot(2), 1)
    root.write_bytes("checkpoint-2/model.safetensors", bytes(needed - 1000))
    monkeypatch.setattr(Store, "free_bytes", lambda self: 1000)
    save(root, 2)
    assert [info.step for info in list_checkpoints(root)] == [2]


def test_the_space_check_is_an_upper_bound(tmp_path: Path) -> None:
    info = save(Store.open(tmp_path))
    assert sum(entry.size for entry in info.commit.files) <= bytes_needed(snapshot(2), 1)


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
