"""Divided over processes (FSDP), a model trains, is measured, clipped, stopped and saved as on one process."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.support.distributed import loaded, run_distributed
from tests.support.overrides import SURFACE, exercise
from tests.support.toys import Augmented, Classifier, StatefulStream, TokenModel, classification_rows, token_rows
from tests.support.training import LOGGED, At, accuracy, losses, norms, trainer, whole_state
from trainer_lib import Trainer, TrainerCallback, TrainingArguments
from trainer_lib.checkpoint.catalogue import find_newest_intact, list_checkpoints
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.evaluation.evaluation_loop import stream_predictions
from trainer_lib.storage import Store
from trainer_lib.storage.commit import verify_files
from trainer_lib.strategies.fsdp import parameter_bytes

TOKENS = token_rows(23)
ROWS = classification_rows(23)
#: 23 sequences with unequal token counts, in global batches of 10: the last step has 3.
RAGGED: dict[str, Any] = {"num_train_epochs": 1, "global_batch_size": 10, "per_device_train_batch_size": 2, **LOGGED}
BY_SIZE = {"min_num_params": 80}


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded("accelerate", "datasets", "s3fs", "torch._dynamo.backends.common"):
        yield


class Deep(TokenModel):
    """Blocks between embedding and head; dropout, and a buffer that every forward counts in."""

    def __init__(self, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        self.seen += self.training
        logits = self.head(torch.tanh(hidden).cumsum(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Block(nn.Module):
    """5 rows: they do not divide by two."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 5), nn.Linear(5, 8), nn.Dropout(dropout)
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = hidden + self.dropout(self.down(torch.relu(self.up(hidden))))
        return found


def trained(folder: str, *, model: nn.Module | None = None, **given: Any) -> dict[str, Any]:
    """A training's losses and norms, step by step; what it ended with, whole; and what this rank held of it."""
    torch.manual_seed(0)
    one = trainer(folder, TOKENS, model=model or Deep(), **{**RAGGED, **given})
    one.train()
    return {
        "losses": losses(one),
        "norms": norms(one),
        "state": {name: value.numpy() for name, value in whole_state(one).items()},
        "bytes": parameter_bytes(one.model),
        "divided": sorted(name for name, each in one.model.named_parameters() if isinstance(each, DTensor)),
        "strategy": one._trainflow.engine.strategy.describe(),
    }


def several(folder: str, cases: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: trained(f"{folder}/{number}", **given) for number, (name, given) in enumerate(cases.items())}


def close(one: dict[str, Any], alone: dict[str, Any]) -> None:
    assert one["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert one["norms"] == pytest.approx(alone["norms"], rel=1e-6)
    for name, value in one["state"].items():
        if name == "seen":  # each process's own forwards
            assert 0 < value <= alone["state"][name]
            continue
        np.testing.assert_allclose(value, alone["state"][name], rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(str(tmp_path_factory.mktemp("alone")))


EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
TWO: dict[str, dict[str, Any]] = {
    **{mode: {"fsdp": mode} for mode in ("full_shard", "shard_grad_op", "no_shard", "full_shard offload")},
    "classes": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}},
    "size": {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": BY_SIZE},
    "prefetched": {"fsdp": "full_shard", "fsdp_config": {**BY_SIZE, "forward_prefetch": True}},
    "on demand": {"fsdp": "full_shard", "fsdp_config": {**BY_SIZE, "backward_prefetch": "backward_post"}},
    "recomputed": {"fsdp": "full_shard", "fsdp_config": {**BY_SIZE, "activation_checkpointing": True}},
    "but for products": {
        "fsdp": "full_shard",
        "fsdp_config": BY_SIZE,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"blocks": "Block", "save": "mm", "offload": True},
    },
    "each batch": {"fsdp": "full_shard", "accelerator_config": EACH_BATCH},
    "unused": {"fsdp": "full_shard", "ddp_find_unused_parameters": True},
}


def of_two(folder: str) -> dict[str, Any]:
    return {
        "folder": Path(folder),
        "modes": several(f"{folder}/modes", TWO),
        "own": divided(f"{folder}/own"),
        "measured": both(f"{folder}/both"),
        "saved": saving(f"{folder}/saved"),
        "went on": damaged(f"{folder}/damaged"),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks find in one group: forming it takes longer than most trainings."""
    return run_distributed(of_two, 2, str(tmp_path_factory.mktemp("two")), timeout_s=180)


def test_each_mode_trains_like_one_process(alone: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """Unequal token counts per rank, ranks without samples in the last step, accumulation, clipping."""
    ranks = [rank["modes"] for rank in two]
    whole = alone["bytes"][1]
    for name in TWO:
        first, second = (rank[name] for rank in ranks)
        for rank in (first, second):
            close(rank, alone)
            assert rank["strategy"]["strategy"] == "fsdp"
            assert len(rank["divided"]) == len(alone["state"]) - 1  # all but the buffer
        assert first["state"].keys() == alone["state"].keys()
        assert not second["state"], "only the first rank holds the whole"
        if name == "no_shard":
            assert first["bytes"] == second["bytes"] == (whole, whole)
        else:
            assert first["bytes"][0] + second["bytes"][0] == whole
            assert first["bytes"][0] < 0.6 * whole


def hybrid(folder: str) -> dict[str, dict[str, Any]]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two machines of two
    cases: dict[str, dict[str, Any]] = {
        "machines": {"fsdp": "hybrid_shard auto_wrap", "fsdp_config": BY_SIZE},
        "kept": {"fsdp": "hybrid_shard_zero2"},
        "four": {"fsdp": "hybrid_shard", "fsdp_config": {"hybrid_group_size": 4}},
        "full": {"fsdp": "full_shard"},
    }
    return several(folder, cases)


def test_hybrid_modes_divide_within_a_group_and_copy_between_groups(alone: dict[str, Any], tmp_path: Any) -> None:
    ranks = run_distributed(hybrid, 4, str(tmp_path))
    whole = alone["bytes"][1]
    for name in ("machines", "kept", "four", "full"):
        held = [rank[name]["bytes"][0] for rank in ranks]
        for rank in ranks:
            close(rank[name], alone)
        if name in ("machines", "kept"):
            assert held[:2] == held[2:]
            assert sum(held[:2]) == whole
        else:
            assert sum(held) == whole


# -------------------------------------------------------------------------------------- optimizers, formats, own values
NUMERIC: dict[str, dict[str, Any]] = {
    **{name: {"optim": name} for name in ("sgd", "lion", "adamw_torch_fused", "rmsprop")},
    "unclipped": {"max_grad_norm": 0.0},
}


def divided(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = several(folder, {name: {"fsdp": "full_shard", **given} for name, given in NUMERIC.items()})
    found["bf16"] = trained(f"{folder}/bf16", fsdp="full_shard", fsdp_config=BY_SIZE, bf16=True)
    found["fp16"] = trained(f"{folder}/fp16", fsdp="full_shard", fp16=True)
    compiled: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 1}
    found["compiled"] = trained(f"{folder}/compiled", fsdp="full_shard", fsdp_config=BY_SIZE, **compiled)["losses"]
    # A layer that one rank does not use: it counts as zero there, as among replicas.
    for name, given in (("replicas", {}), ("divided", {"fsdp": "full_shard", "ddp_find_unused_parameters": True})):
        torch.manual_seed(0)
        found[name] = trained(f"{folder}/{name}", model=Conditional(), **given)["losses"]
    # An optimizer that was made for the whole parameters.
    torch.manual_seed(0)
    model = Deep()
    own = torch.optim.SGD(model.parameters(), lr=0.01)
    one = trainer(f"{folder}/own", TOKENS, model=model, optimizers=(own, None), fsdp="full_shard", **RAGGED)
    one.train()
    found["own"] = losses(one)
    with pytest.raises(ConfigError, match="has stepped on them"):
        stale = torch.optim.SGD((other := Deep()).parameters(), lr=0.01, momentum=0.9)
        other.head.weight.grad = torch.ones_like(other.head.weight)
        stale.step()
        trainer(f"{folder}/stale", TOKENS, model=other, optimizers=(stale, None), fsdp="full_shard", **RAGGED).train()
    # Without taking over the first rank's values, each keeps the rows of its own.
    torch.manual_seed(one._trainflow.comm.rank)
    apart = trainer(f"{folder}/apart", TOKENS, model=(kept := Unseeded()), **UNSYNCHRONISED)
    apart.evaluate(TOKENS[:2])
    weight: Any = kept.head.weight
    found["rows"] = (float(weight.to_local().mean()), one._trainflow.comm.rank)
    return found


class Conditional(TokenModel):
    """The first rank alone uses all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        logits = self.head(self.extra(hidden) if os.environ["RANK"] == "0" else hidden)
        assert labels is not None
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Unseeded(TokenModel):
    """Every process's own number in every weight."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.parameters():
            nn.init.constant_(each, float(os.environ.get("RANK", "0")))


UNSYNCHRONISED: dict[str, Any] = {"fsdp": "full_shard", "fsdp_config": {"sync_module_states": False}}


def test_optimizers_formats_and_values_of_ones_own(
    alone: dict[str, Any], two: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected = several(str(tmp_path), NUMERIC)
    first, second = (rank["own"] for rank in two)
    for name, found in expected.items():
        close(first[name], found)
    assert first["bf16"]["losses"] == pytest.approx(alone["losses"], rel=5e-3)
    assert first["bf16"]["losses"] != alone["losses"]
    assert first["fp16"]["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert first["divided"] == pytest.approx(first["replicas"], rel=1e-6)
    assert first["compiled"] == pytest.approx(alone["losses"][:1], rel=1e-6)
    assert first["own"] == pytest.approx(expected["sgd"]["losses"], rel=1e-6)
    assert [rank["rows"] for rank in (first, second)] == [(0.0, 0), (1.0, 1)]


# ---------------------------------------------------------------------------------------- measuring a divided model
DIVIDED: dict[str, Any] = {"fsdp": "shard_grad_op", "fsdp_config": {"min_num_params": 20}}
#: Computed or written by rank 0 for all.
FIRST_RANK = {"_save", "create_model_card", "metrics_format"}
#: The strategy moves the model to the device itself, part by part: the whole may not fit there.
UNCALLED = {"_move_model_to_device"}


class OwnLoader(Trainer):
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(eval_dataset, batch_size=2, collate_fn=self.data_collator)


def metrics(p: Any) -> dict[str, float]:
    return {**accuracy(p), "rows": float(len(p.label_ids))}


def measured(folder: str, given: dict[str, Any]) -> dict[str, list[Any]]:
    """Evaluations before and after a training, of sets with whole, ragged and missing batches."""
    seen: dict[str, list[Any]] = {}
    options: dict[str, Any] = {"per_device_eval_batch_size": 3, "eval_accumulation_steps": 2, "max_steps": 2, **given}
    torch.manual_seed(0)
    training = trainer(folder, ROWS, model=Classifier(dropout=0.0), compute_metrics=metrics, **options)

    def evaluate(name: str, by: Trainer, rows: Any) -> None:
        result = by.evaluate(rows)
        seen[name] = [result["eval_loss"], result["eval_accuracy"], result["eval_rows"]]

    for when in ("before", "after"):
        for count in (1, 6, 10):
            evaluate(f"{when} {count}", training, ROWS[:count])
        evaluate(f"{when} stream", training, StatefulStream(ROWS[:7]))
        if when == "before":
            predictions = training.predict(ROWS[:4]).predictions
            seen["predictions"] = [] if predictions is None else np.asarray(predictions).tolist()
            training.train()
    torch.manual_seed(0)
    other = trainer(f"{folder}-own", ROWS, cls=OwnLoader, model=Classifier(0.0), compute_metrics=metrics, **given)
    evaluate("own loader", other, ROWS[:5])
    return seen


def alone_and_gathered(folder: str) -> list[Any]:
    """Streaming on one rank: served while the model is whole, refused afterwards; what the accelerator gathers."""
    training = trainer(folder, ROWS, model=Classifier(dropout=0.0), max_steps=1, **DIVIDED)
    rank = training._trainflow.comm.rank
    rows = [ids.tolist() for ids, _ in stream_predictions(training, ROWS, start=3 * rank, stop=3 * rank + 1 + rank)]
    training.train()
    with pytest.raises(ConfigError, match="none of them can predict by itself"):
        list(stream_predictions(training, ROWS, start=0, stop=1))
    gathered = training.accelerator.gather_for_metrics(torch.tensor([rank])).tolist()
    assert float(training.accelerator.clip_grad_norm_(training.model.parameters(), 1.0)) >= 0
    return [rows, gathered]


def both(folder: str) -> tuple[dict[str, list[Any]], list[Any]]:
    return measured(f"{folder}/measured", DIVIDED), alone_and_gathered(f"{folder}/alone")


def test_every_row_is_measured_once_whatever_is_left_for_a_rank(two: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = measured(str(tmp_path), {})
    (first, streamed), (second, streamed_too) = (rank["measured"] for rank in two)
    assert second.pop("predictions") == []
    assert np.allclose(first.pop("predictions"), expected.pop("predictions"), rtol=1e-6)
    assert first == second
    for name, values in expected.items():
        # Another global batch was trained on than on one process; each row is still counted once.
        if name.startswith("after"):
            assert first[name][2] == values[2], name
        else:
            assert np.allclose(first[name], values, rtol=1e-6), name
    assert (streamed, streamed_too) == ([[[0]], [0, 1]], [[[3, 4]], [0, 1]])


# ------------------------------------------------------------------------------------------------------------ overrides
def exercised(folder: str) -> list[str]:
    """`exercise`, with every Trainer of this process divided."""
    original = TrainingArguments.__post_init__

    def divided(self: TrainingArguments) -> None:
        self.fsdp, self.fsdp_config = "full_shard", {"state_dict_type": "FULL_STATE_DICT"}
        original(self)

    TrainingArguments.__post_init__ = divided  # type: ignore[method-assign]
    return exercise(folder)


@pytest.mark.parametrize("how", [exercise, exercised])
def test_every_overridable_method_is_called_on_both_ranks(how: Any, tmp_path: Path) -> None:
    first, second = run_distributed(how, 2, str(tmp_path))
    assert set(first) == set(SURFACE["called"]) - (UNCALLED if how is exercised else set())
    assert set(first) - set(second) <= FIRST_RANK


# ------------------------------------------------------------------------------- what is saved, and who goes on from it
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
    return {"samples": halt.samples, "losses": losses(one), "state": whole_state(one)}


def parts(world: int, folder: str, *args: Any) -> list[dict[str, Any]]:
    return run_distributed(part, world, folder, *args) if world > 1 else [part(folder, *args)]


def together(ranks: list[dict[str, Any]]) -> list[list[int]]:
    return [
        sorted(itertools.chain.from_iterable(step)) for step in zip(*(one["samples"] for one in ranks), strict=True)
    ]


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return part(str(tmp_path_factory.mktemp("unstopped")), None, {})


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
def test_one_goes_on_from_what_another_saved(name: str, unstopped: dict[str, Any], tmp_path: Path) -> None:
    """The same samples in the same order, none lost, none twice; the same losses."""
    samples: list[list[int]] = []
    for (world, given), stop in zip(CROSSINGS[name], (2, 5, None), strict=True):
        ranks = parts(world, str(tmp_path), stop, given)
        samples += together(ranks)
    assert samples == together([unstopped])
    assert ranks[0]["losses"] == pytest.approx(unstopped["losses"], rel=1e-5)
    for key, value in unstopped["state"].items():
        torch.testing.assert_close(ranks[0]["state"][key], value, rtol=1e-4, atol=1e-6)


def test_parts_on_s3_are_read_row_by_row(unstopped: dict[str, Any], s3_url: str) -> None:
    parts(2, s3_url, 2, SHARDED)
    [found] = parts(1, s3_url, None, {})
    assert found["losses"] == pytest.approx(unstopped["losses"], rel=1e-5)


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

    one.add_callback(At(2, lambda: plugin.set_state_dict_type("FULL_STATE_DICT")))
    one.train()
    with pytest.raises(ConfigError, match="LOCAL_STATE_DICT"):
        plugin.set_state_dict_type("LOCAL_STATE_DICT")
    one.save_model(f"{folder}/model")
    whole = one.accelerator.get_state_dict(one.model_wrapped)
    return {name: value.clone() for name, value in whole.items() if not value.is_meta}


def test_how_a_checkpoint_is_written_is_asked_at_each_save(two: list[dict[str, Any]]) -> None:
    (weights, none), folder = (rank["saved"] for rank in two), two[0]["folder"] / "saved"
    assert none == {}
    first, last = folder / "checkpoint-1", folder / "checkpoint-3"
    assert sorted(path.name for path in (first / "shards").iterdir()) == [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    assert not (first / "model.safetensors").exists()
    for rank in (0, 1):  # any reader of safetensors reads a part; parts are of about one size
        rows = load_file(first / "shards" / f"rank-{rank:05d}.safetensors")
        assert rows["model/head.weight"].shape[0] == (6, 5)[rank]
    assert not (last / "shards").exists()
    for file in (last / "model.safetensors", folder / "model" / "model.safetensors"):
        assert load_file(file).keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in load_file(file).items())
    store = Store.open(str(folder))
    assert [verify_files(store.child(info.name), info.commit) for info in list_checkpoints(store)] == [[], [], []]
    assert not load_checkpoint(store, "checkpoint-2", SingleProcess()).is_sharded
    assert load_checkpoint(store, "checkpoint-1", SingleProcess()).is_sharded


def change_byte(checkpoint: Path, place: int) -> None:
    file = checkpoint / "shards" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_rows_are_compared_with_their_digests(two: list[dict[str, Any]], tmp_path: Path) -> None:
    """Bytes that were changed so that sizes stay are found when they are read."""
    shutil.copytree(two[0]["folder"] / "damaged" / "checkpoint-2", tmp_path / "checkpoint-2")
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


def test_a_damaged_part_leads_back_to_the_checkpoint_before(two: list[dict[str, Any]]) -> None:
    assert [rank["went on"] for rank in two] == [[3, 4], [3, 4]]
