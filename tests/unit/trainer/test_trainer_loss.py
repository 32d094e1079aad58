"""The loss of a step is the mean over all target items of the global batch, however that is cut up."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.gradients import assert_close, gradients
from tests.support.seq2seq import t5
from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.toys import Classifier, Stream, TokenModel, classification_rows, token_rows
from tests.support.training import note_heads, trainer
from trainer_lib import ModelOutput, Trainer
from trainer_lib.data.loading.iterable import IterableLoader
from trainer_lib.data.loading.loader import EvalLoader, Micro, TrainLoader
from trainer_lib.distributed.communicator import DataParallel, SingleProcess
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation.evaluation_loop import iterate_rounds
from trainer_lib.trainer.weighting import CountedItems, MicroBatches

TOKENS = token_rows(24)
ROWS = [{"x": row["x"].double(), "labels": row["labels"]} for row in classification_rows(24)]
DECODED, TEXTS = lm_rows(24), text_rows(24)
QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# transformers' losses are computed in single precision.
SINGLE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-7}
classifier = partial(bert, **QUIET)
masked = partial(bert, cls="BertForMaskedLM", **QUIET)
ENCODED = partial(t5, vocab_size=32)
IN_TURN: dict[str, Any] = {"train_sampling_strategy": "sequential", "global_batch_size": 2, "num_train_epochs": 1}


@settings(max_examples=12)
@given(micro=st.integers(1, 9), batch=st.integers(1, 24))
def test_any_cut_of_a_batch_with_unequal_token_counts_has_the_same_loss_and_gradients(micro: int, batch: int) -> None:
    given: dict[str, Any] = {"model": TokenModel, "batch": batch}
    assert_close(gradients(TOKENS, micro=micro, **given), gradients(TOKENS, micro=batch, **given))


@settings(max_examples=8)
@given(micro=st.integers(1, 9), batch=st.integers(1, 24), smoothing=st.sampled_from([0.0, 0.1]), decoder=st.booleans())
def test_any_cut_of_a_batch_of_transformers_has_the_same_loss_and_gradients(
    micro: int, batch: int, smoothing: float, decoder: bool
) -> None:
    rows: list[Any] = DECODED if decoder else TEXTS
    given: dict[str, Any] = {"model": llama if decoder else classifier, "batch": batch}
    given["label_smoothing_factor"] = smoothing
    assert_close(gradients(rows, micro=micro, **given), gradients(rows, micro=batch, **given), **SINGLE)


class SumOverItems(TokenModel):
    """Divides a sum by the count it is given, as transformers' models do."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        logits = super().forward(input_ids)["logits"]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / num_items_in_batch, "logits": logits}


class Routed(SumOverItems):
    """Adds the loss of routers, as transformers' mixtures do."""

    config: Any = SimpleNamespace(router_aux_loss_coef=0.5)

    def forward(self, input_ids: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        outputs = super().forward(input_ids, labels, items)
        return {**outputs, "loss": outputs["loss"] + 0.5, "aux_loss": torch.ones(())}


def test_an_evaluation_while_training_has_the_whole_loss_of_routers(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_dataset": TOKENS[:4], "eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    one = trainer(tmp_path, TOKENS, model=Routed(), gradient_accumulation_steps=3, **given)
    one.train()
    [within] = [entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry]
    assert within == one.evaluate()["eval_loss"]


def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    flat = outputs["logits"].flatten(0, 1)
    loss: torch.Tensor = nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum") / num_items_in_batch
    return loss


def ignoring(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def without(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


class TakesItems(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(inputs["input_ids"])
        loss = divided(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class IgnoresItems(Trainer):
    """By far the most common override: the parameter is there for the signature's sake."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class PassesOn(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)


class OfOld(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False) -> Any:  # type: ignore[override]
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = without(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class PassesToTheModel(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OldStep(Trainer):
    """A training step of old takes two arguments."""

    def training_step(self, model: Any, inputs: Any) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(model, inputs, self._trainflow.run.weights.num_items)  # type: ignore[union-attr]


class Plain(Classifier):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)


class AsTuple(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return tuple(super().forward(x, labels).values())


class AsOutput(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return ModelOutput(**super().forward(x, labels))


class Shifting(TokenModel):
    """Never predicts the first label."""

    shifts_labels = True

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        logits = super().forward(input_ids)["logits"]
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def rows_without_targets(count: int, *without: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [dict(row) for row in token_rows(count)]
    for number in without:
        rows[number]["labels"] = torch.full((7,), -100)
    return rows


def pad(samples: list[Any]) -> dict[str, torch.Tensor]:
    fill, padded = {"input_ids": 0, "attention_mask": 0, "labels": -100}, nn.utils.rnn.pad_sequence
    return {name: padded([row[name] for row in samples], batch_first=True, padding_value=fill[name]) for name in fill}


RAGGED = [{name: value[: 3 + number % 5] for name, value in row.items()} for number, row in enumerate(DECODED)]
SHIFTED = [row for row in TOKENS if int((row["labels"] != -100).sum()) > 1][:16]
#: Rows, micro-batch, batch and settings of a step; what the step of one micro-batch has otherwise.
CUTS: dict[str, tuple[list[Any], int, int, dict[str, Any], dict[str, Any]]] = {
    **{
        f"a loss function {func.__name__} the count": (TOKENS, 3, 12, {"compute_loss_func": func}, {})
        for func in (divided, ignoring, without)
    },
    "a model divides by the count": (TOKENS, 5, 12, {"model": SumOverItems}, {"model": TokenModel}),
    **{
        f"an override: {cls.__name__}": (TOKENS, 3, 12, {"cls": cls}, {})
        for cls in (TakesItems, IgnoresItems, PassesOn, OfOld, OldStep)
    },
    "an override passes the count on": (TOKENS, 5, 12, {"model": SumOverItems, "cls": PassesOn}, {"model": TokenModel}),
    "micro-batches without targets": (rows_without_targets(8, 2, 3), 2, 8, {}, {}),
    **{
        f"classes of samples: {model.__name__}": (ROWS, 5, 12, {"model": model}, {"model": Plain})
        for model in (Plain, AsTuple, AsOutput)
    },
    "labels that the model shifts": (SHIFTED, 2, 16, {"model": Shifting}, {}),
}
TRANSFORMERS: dict[str, tuple[list[Any], int, int, dict[str, Any], dict[str, Any]]] = {
    "a model that ignores the count": (DECODED, 5, 12, {"model": masked}, {}),
    "rows that pad to unequal lengths": (RAGGED, 3, 16, {"model": llama, "data_collator": pad}, {}),
    "a decoder is given the count": (DECODED, 5, 12, {"model": llama, "cls": PassesToTheModel}, {}),
    "a classifier is given the count": (TEXTS, 5, 12, {"model": classifier, "cls": PassesToTheModel}, {}),
    "an encoder-decoder": (DECODED, 5, 12, {"model": ENCODED}, {}),
    "a smoothed encoder-decoder": (DECODED, 5, 12, {"model": ENCODED, "label_smoothing_factor": 0.1}, {}),
}


@pytest.mark.parametrize("case", [*CUTS, *TRANSFORMERS])
def test_every_model_override_and_function_has_the_exact_loss(case: str) -> None:
    rows, micro, batch, given, other = {**CUTS, **TRANSFORMERS}[case]
    given = {"model": TokenModel, **given}
    whole = {name: value for name, value in given.items() if name not in ("cls", "compute_loss_func")}
    expected = gradients(rows, micro=batch, batch=batch, **{**whole, **other})
    bounds = SINGLE if case in TRANSFORMERS else {}
    assert_close(gradients(rows, micro=micro, batch=batch, **given), expected, **bounds)


def test_the_count_notes_computations_and_no_looks() -> None:
    items = CountedItems.of(12, torch.device("cpu"))
    assert items.device.type == "cpu" and not items.is_floating_point()
    assert torch.is_tensor(items)
    copy: Any = items.to(torch.float32).clamp(min=1)
    looked = items.used
    assert float(torch.ones(()) / copy) == pytest.approx(1 / 12)
    assert (looked, items.used, copy.used) == (False, True, True)


# ------------------------------------------------------------------------------------------------- batches of a step
class Drops(Trainer):
    """Leaves out the first batch that its parent drew, and counts the others by itself."""

    def get_batch_samples(self, *args: Any) -> Any:
        batches, _ = super().get_batch_samples(*args)
        return batches[1:], self._get_num_items_in_batch(batches[1:])


class Splits(Trainer):
    """Computes every batch that its parent drew in pieces of two samples."""

    def get_batch_samples(self, *args: Any) -> Any:
        batches, items = super().get_batch_samples(*args)
        pieces = (zip(*(value.split(2) for value in batch.values()), strict=True) for batch in batches)
        return [dict(zip(batches[0], each, strict=True)) for batch in pieces for each in batch], items


class DrawsOnce(Trainer):
    """Draws one batch more than it computes, with counts of its own."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *_: Any) -> Any:
        batches = [next(epoch_iterator) for _ in range(num_batches)][:-1]
        return batches, sum(self._trainflow.forward.target_items(batch) for batch in batches)


@pytest.mark.parametrize(("cls", "first", "last"), [(Drops, 4, 16), (Splits, 0, 16), (DrawsOnce, 0, 12)])
def test_an_override_may_drop_or_split_the_batches_of_a_step(cls: type[Trainer], first: int, last: int) -> None:
    rows = token_rows(16)
    whole = gradients(rows[first:last], micro=last - first, batch=last - first, model=TokenModel)
    assert_close(gradients(rows, micro=4, batch=16, model=TokenModel, cls=cls), whole)


def test_the_samples_of_batches_are_known_after_some_were_dropped_or_split() -> None:
    class Source:
        def micros(self, epoch: int, start_step: int) -> Any:
            return iter([Micro("a", True, 3), Micro("b", True, 2), Micro("c", False, 0)])

    source: Any = Source()
    batches = MicroBatches(source, 0, 0)
    drawn = list(batches)
    assert batches.samples_of(drawn) == [3, 2, 0] and batches.samples_of([drawn[0], "piece"]) == [3, None]
    assert batches.samples_of(["copy of b", "copy of c"]) == [2, 0]
    batches.drawn = batches.drawn[2:]
    assert batches.samples_of(["half a dummy", "the other half"]) == [0, 0]


# ------------------------------------------------------------------------------------------------------ without targets


@pytest.mark.parametrize(
    ("rows", "arguments", "at"),
    [
        (rows_without_targets(8, *range(8)), {}, 4),  # an epoch
        (rows_without_targets(8, *range(8)), {"max_steps": 3}, 3),  # a run that ends inside of an epoch
        (rows_without_targets(60, *range(40)), {}, 10),  # the first steps, long before a log
        (rows_without_targets(60, *range(20, 50)), {"logging_steps": 5, "logging_strategy": "steps"}, 20),  # a window
    ],
)
def test_a_run_without_targets_fails(rows: list[Any], arguments: Any, at: int, tmp_path: Path) -> None:
    one = trainer(tmp_path, rows, model=TokenModel(), **{**IN_TURN, "logging_strategy": "no", **arguments})
    with pytest.raises(DataError, match=r"None of the \d+ steps up to step \d+ has a target.*is -100") as failed:
        one.train()
    assert one.state.global_step == at
    assert failed.value.value == "0 % of the labels are targets"
    assert "The first such row: 7 labels [-100, -100, -100, -100, -100, -100, -100]." in failed.value.message
    assert "template" in str(failed.value.remedy) and "learning_rate" not in str(failed.value)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_a_step_without_targets_changes_nothing_and_is_counted(optim: str, tmp_path: Path) -> None:
    """Neither the weights, which would decay, nor the moments."""
    heads = note_heads()
    one = trainer(
        tmp_path,
        rows_without_targets(12, 0, 4, 5, 8),  # the third step has none; a micro-batch of the first and the fifth
        model=TokenModel(),
        callbacks=[heads],
        **{**IN_TURN, "per_device_train_batch_size": 1, "optim": optim, "weight_decay": 0.1, "logging_steps": 1},
        logging_strategy="steps",
    )
    metrics = one.train().metrics
    assert [torch.equal(*pair) for pair in itertools.pairwise(heads.kept)] == [False, True, False, False, False]
    assert (metrics["steps_without_targets"], metrics["batches_without_targets"]) == (1, 4)
    assert "nonfinite_steps" not in metrics and math.isfinite(metrics["train_loss"])
    logged = [entry for entry in one.state.log_history if "loss" in entry]
    assert [entry.get("steps_without_targets", 0) for entry in logged] == [0, 0, 1, 1, 1, 1]


def test_a_loss_that_needs_no_targets_trains_without_any(tmp_path: Path) -> None:
    class Unsupervised(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *_: Any, **__: Any) -> Any:
            return model(inputs["input_ids"])["logits"].square().mean()

    one = trainer(tmp_path, rows_without_targets(24, *range(24)), model=TokenModel(), cls=Unsupervised, **IN_TURN)
    assert "steps_without_targets" not in one.train().metrics


# ------------------------------------------------------------------------------- world and data-parallel size
class Half(SingleProcess):
    """The last of four processes, two of which pretend to work on the same half of the data: the second."""

    rank = local_rank = 3
    world_size = local_world_size = 4
    data_parallel = DataParallel(1, 2)


def build(folder: Path, **given: Any) -> Trainer:
    built = trainer(folder, ROWS, eval_dataset=ROWS, train_sampling_strategy="sequential", **given)
    built._trainflow.world = dataclasses.replace(built._trainflow.world, comm=Half())
    return built


@pytest.mark.parametrize(
    ("given", "total", "micro"),
    [
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, 12, 3),
        ({"per_device_train_batch_size": 6, "accelerator_config": {"split_batches": True}}, 6, 3),
        ({"per_device_train_batch_size": 3, "global_batch_size": 12}, 12, 3),
    ],
)
def test_the_batch_follows_the_parallel_size(given: dict[str, Any], total: int, micro: int, tmp_path: Path) -> None:
    built = build(tmp_path, **given)
    assert built.get_total_train_batch_size(built.args) == total
    loader = built.get_train_dataloader()
    assert isinstance(loader, TrainLoader) and (loader.plan.global_batch, loader.plan.micro_batch) == (total, micro)
    # Each round of two shares, of which this process takes the second.
    assert [loader.plan.share(0, step) for step in range(total // (2 * micro))] == [
        (first + micro, first + 2 * micro) for first in range(0, total, 2 * micro)
    ]


def test_a_batch_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    refusal = "per_device_train_batch_size = 5: The batch cannot be divided among 2 processes"
    with pytest.raises(ConfigError, match=refusal):
        build(tmp_path, per_device_train_batch_size=5, accelerator_config={"split_batches": True}).train()


def test_evaluation_takes_this_share_of_any_loader(tmp_path: Path) -> None:
    built = build(tmp_path, per_device_eval_batch_size=4)
    loader = built.get_eval_dataloader()
    assert isinstance(loader, EvalLoader) and loader.slices == [(4, 8), (12, 16), (20, 24)]
    dealt = list(iterate_rounds(["a", "b", "c"], built._trainflow.comm))
    assert [(micro.batch, micro.real) for micro in dealt] == [("b", True), ("c", False)]


def test_a_stream_is_cut_into_shares(tmp_path: Path) -> None:
    built = build(tmp_path, per_device_train_batch_size=2, max_steps=2)
    built.train_dataset = Stream(ROWS)
    loader = built.get_train_dataloader()
    assert isinstance(loader, IterableLoader) and loader.global_batch == 4
    assert [len(batch["labels"]) for batch in loader] == [2] * 6  # 12 of the 24 rows
