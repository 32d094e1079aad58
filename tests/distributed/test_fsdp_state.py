"""What is saved of a divided model: by every process its part or by the first the whole, for anybody to go on from."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.distributed.test_fsdp import LOGGED, ROWS, TOKENS, Deep
from tests.support.distributed import run_distributed
from tests.support.toys import Augmented, Classifier
from tests.support.training import trainer
from trainer_lib import TrainerCallback
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.sharded import ShardedTensors
from trainer_lib.commit import read_commit, verify_files
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import Store

SHARDED: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 60}}
FULL: dict[str, Any] = {"fsdp": "shard_grad_op", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
RUN: dict[str, Any] = {"num_train_epochs": 2, "global_batch_size": 6, "per_device_train_batch_size": 2, **LOGGED}


class Halt(TrainerCallback):
    """Saves and stops after a step, and notes the samples that this rank read in each."""

    def __init__(self, step: int | None, data: Augmented) -> None:
        self.step, self.data = step, data
        self.samples: list[list[int]] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        read = iter(self.data.read)  # micro-batch by micro-batch; a filler is one sample of weight zero
        items = self.trainer._trainflow.run.weights.items
        taken = [rows if count else [] for count in items for rows in [list(itertools.islice(read, count or 1))]]
        self.samples.append(sorted(itertools.chain.from_iterable(taken)))
        self.data.read.clear()
        control.should_training_stop = control.should_save = state.global_step == self.step


def part(folder: str, stop: int | None, given: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    data = Augmented(ROWS)
    halt = Halt(stop, data)
    one = trainer(folder, data, model=Classifier(dropout=0.0), callbacks=[halt], **RUN, **given)
    halt.trainer = one
    one.train("auto")
    state = one._trainflow.engine.strategy.model_state(one.model_wrapped)
    return {
        "samples": halt.samples,
        "losses": [entry["loss"] for entry in one.state.log_history if "loss" in entry],
        "state": {name: value for name, value in state.items() if not value.is_meta},
    }


def parts(world: int, folder: str, *args: Any) -> list[dict[str, Any]]:
    return run_distributed(part, world, folder, *args) if world > 1 else [part(folder, *args)]


def together(ranks: list[dict[str, Any]]) -> list[list[int]]:
    return [
        sorted(itertools.chain.from_iterable(step)) for step in zip(*(one["samples"] for one in ranks), strict=True)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return part(str(tmp_path_factory.mktemp("alone")), None, {})


CROSSINGS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "divided by two, then one process, then three": [(2, SHARDED), (1, {}), (3, SHARDED)],
    "replicas, then divided, then replicas": [(2, {}), (2, SHARDED), (2, {})],
    "whole from divided, then divided by three": [(2, FULL), (3, SHARDED), (1, {})],
    "in the background, on groups of two, then one": [
        (4, {"fsdp": "hybrid_shard", "fsdp_config": {"hybrid_group_size": 2}, "save_async": True}),
        (2, {**FULL, "save_async": True}),
        (1, {}),
    ],
}


@pytest.mark.parametrize("name", CROSSINGS)
def test_one_goes_on_from_what_another_saved(name: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """The same samples in the same order, none lost, none twice; the same losses."""
    samples: list[list[int]] = []
    for (world, given), stop in zip(CROSSINGS[name], (2, 5, None), strict=True):
        ranks = parts(world, str(tmp_path), stop, given)
        samples += together(ranks)
    assert samples == together([alone])
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for key, value in alone["state"].items():
        torch.testing.assert_close(ranks[0]["state"][key], value, rtol=1e-4, atol=1e-6)


def test_parts_on_s3_are_read_row_by_row(alone: dict[str, Any], s3_url: str) -> None:
    parts(2, s3_url, 2, SHARDED)
    [found] = parts(1, s3_url, None, {})
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)


# ---------------------------------------------------------------------------------------------------- what lies there
def saving(folder: str) -> dict[str, Any]:
    """Checkpoints in parts, then whole, as the accelerator's plugin is told; the model at the end."""
    one = trainer(folder, TOKENS, model=Deep(), max_steps=3, save_strategy="steps", save_steps=1, **SHARDED)
    plugin = one.accelerator.state.fsdp_plugin
    assert one.is_fsdp_enabled and plugin.state_dict_type == "SHARDED_STATE_DICT"
    helper = one.accelerator
    assert helper.state.deepspeed_plugin is None and helper.is_fsdp2 and helper.is_composable_parallelism_enabled
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.ignored_modules) == (2, True, None)
    with pytest.raises(ConfigError, match="cannot train a second one"):
        helper.prepare(nn.Linear(1, 1))
    assert type(helper.prepare_model(nn.Linear(1, 1), evaluation_mode=True)) is nn.Linear

    class Told(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                plugin.set_state_dict_type("FULL_STATE_DICT")

    one.add_callback(Told())
    one.train()
    with pytest.raises(ConfigError, match="LOCAL_STATE_DICT"):
        plugin.set_state_dict_type("LOCAL_STATE_DICT")
    one.save_model(f"{folder}/model")
    whole = one.accelerator.get_state_dict(one.model_wrapped)
    return {name: value.clone() for name, value in whole.items() if not value.is_meta}


def test_how_a_checkpoint_is_written_is_asked_at_each_save(tmp_path: Path) -> None:
    weights, none = run_distributed(saving, 2, str(tmp_path))
    assert none == {}
    first, last = tmp_path / "checkpoint-1", tmp_path / "checkpoint-3"
    assert sorted(path.name for path in (first / "shards").iterdir()) == [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    assert not (first / "model.safetensors").exists()
    for rank in (0, 1):  # any reader of safetensors reads a part; parts are of about one size
        rows = load_file(first / "shards" / f"rank-{rank:05d}.safetensors")
        assert rows["model/head.weight"].shape[0] == (6, 5)[rank]
    assert not (last / "shards").exists()
    for file in (last / "model.safetensors", tmp_path / "model" / "model.safetensors"):
        assert load_file(file).keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in load_file(file).items())
    store = Store.open(str(tmp_path))
    assert [verify_files(store.child(info.name), info.commit) for info in list_checkpoints(store)] == [[], [], []]
    by_parts = load_checkpoint(store, "checkpoint-2", SingleProcess())
    assert not by_parts.is_sharded
    assert load_checkpoint(store, "checkpoint-1", SingleProcess()).is_sharded


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    run_distributed(part, 2, str(folder), 2, SHARDED)
    return folder / "checkpoint-2"


def change_byte(checkpoint: Path, place: int) -> None:
    file = checkpoint / "shards" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_rows_are_compared_with_their_digests(sharded: Path, tmp_path: Path) -> None:
    """Bytes that were changed so that sizes stay are found when they are read."""
    shutil.copytree(sharded, tmp_path / "checkpoint-2")
    change_byte(tmp_path / "checkpoint-2", -3)
    loaded = load_checkpoint(Store.open(str(tmp_path)), "checkpoint-2", SingleProcess())
    with pytest.raises(DamagedError, match=r"rank-00001\.safetensors"):
        dict(loaded.read_model())
        dict(loaded.read_optimizer().tensors)  # type: ignore[union-attr]
    told: list[str] = []
    assert find_newest_intact(Store.open(str(tmp_path)), on_damage=told.append) is None
    assert "rank-00001.safetensors" in told[0]


def damaged(folder: str) -> list[int]:
    """Three saves; a byte of the newest one's second part changes; then on to step four."""
    first = trainer(folder, TOKENS, model=Deep(), max_steps=3, save_strategy="steps", save_steps=1, **SHARDED)
    first.train()
    if first._trainflow.comm.rank == 1:
        change_byte(Path(folder) / "checkpoint-3", -5)
    first._trainflow.comm.barrier()
    second = trainer(folder, TOKENS, model=Deep(), max_steps=4, **LOGGED, **SHARDED)
    second.train(resume_from_checkpoint=True)
    return [entry["step"] for entry in second.state.log_history if "loss" in entry]


def test_a_damaged_part_leads_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    assert run_distributed(damaged, 2, str(tmp_path)) == [[3, 4], [3, 4]]


HOSTILE: dict[str, Any] = {
    "a file that is not committed": lambda index, chunks: chunks[0].__setitem__(0, "../../etc/passwd"),
    "a position beyond the end": lambda index, chunks: chunks[0].__setitem__(3, 2**40),
    "a negative position": lambda index, chunks: chunks[0].__setitem__(3, -8),
    "rows twice": lambda index, chunks: chunks.append(chunks[0]),
    "rows that are missing": lambda index, chunks: chunks.pop(),
    "a huge shape": lambda index, chunks: index["tensors"][HEAD].__setitem__("shape", [2**61, 2**61]),
    "a shape that is not one": lambda index, chunks: index["tensors"][HEAD].__setitem__("shape", ["6"]),
    "an unknown type": lambda index, chunks: index["tensors"][HEAD].__setitem__("dtype", "OBJECT"),
    "tied to nothing": lambda index, chunks: index["tied"].__setitem__("model/other", "model/none"),
    "no tensors": lambda index, chunks: index.__delitem__("tensors"),
    "a digest that is not one": lambda index, chunks: chunks[0].__setitem__(4, []),
    "a chunk that is not one": lambda index, chunks: chunks.__setitem__(0, 7),
}
HEAD = "model/head.weight"


@pytest.mark.parametrize("name", HOSTILE)
def test_an_index_that_lies_is_refused(name: str, sharded: Path) -> None:
    index = json.loads((sharded / "shards.json").read_text())
    HOSTILE[name](index, index["tensors"][HEAD]["chunks"])
    store = Store.open(str(sharded))
    commit = read_commit(store)
    assert commit is not None
    with pytest.raises(DamagedError, match=r"shards\.json"):
        ShardedTensors(store, "model", index, {entry.path: entry for entry in commit.files})
