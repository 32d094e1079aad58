"""The loss of a step is the mean over all target items of the global batch, however that is cut up."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import gradients as _gradients
from tests.support.gradients import assert_close
from tests.support.toys import Classifier, TokenModel, classification_rows, token_rows
from tests.support.training import note_heads, trainer
from trainer_lib import ModelOutput, Trainer
from trainer_lib.errors import DataError

TOKENS = token_rows(24)
ROWS = classification_rows(24)
gradients = partial(_gradients.gradients, model=TokenModel)


@settings(max_examples=12)
@given(micro=st.integers(1, 9), batch=st.integers(1, 24))
def test_any_cut_of_a_batch_with_unequal_token_counts_has_the_same_loss_and_gradients(micro: int, batch: int) -> None:
    assert_close(gradients(TOKENS, micro=micro, batch=batch), gradients(TOKENS, micro=batch, batch=batch))


class SumOverItems(TokenModel):
    """Divides a sum by the count it is given, as transformers' models do."""

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: Any = None
    ) -> dict[str, torch.Tensor]:
        logits = super().forward(input_ids)["logits"]
        assert labels is not None
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / num_items_in_batch, "logits": logits}


def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    flat = outputs["logits"].flatten(0, 1)
    loss: torch.Tensor = nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum") / num_items_in_batch
    return loss


def ignoring(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def without(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("func", [divided, ignoring, without])
def test_a_loss_function_may_use_the_count_ignore_it_or_not_take_it(func: Any) -> None:
    assert_close(gradients(TOKENS, micro=3, batch=12, compute_loss_func=func), gradients(TOKENS, micro=12, batch=12))


def test_a_model_may_divide_by_the_count_itself() -> None:
    assert_close(gradients(TOKENS, micro=5, batch=12, model=SumOverItems), gradients(TOKENS, micro=12, batch=12))


class TakesItems(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(inputs["input_ids"])
        loss = divided(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class IgnoresItems(Trainer):
    """By far the most common override: the parameter is there for the signature's sake."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class PassesOn(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)


class OfOld(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False) -> Any:  # type: ignore[override]
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = without(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class Oldest(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
        return model(**inputs)["loss"]


@pytest.mark.parametrize("cls", [TakesItems, IgnoresItems, PassesOn, OfOld, Oldest])
def test_overrides_of_all_ages_have_the_exact_loss(cls: type[Trainer]) -> None:
    assert_close(gradients(TOKENS, micro=3, batch=12, cls=cls), gradients(TOKENS, micro=12, batch=12))


def test_an_override_may_pass_the_count_on_to_a_model_that_uses_it() -> None:
    assert_close(
        gradients(TOKENS, micro=5, batch=12, model=SumOverItems, cls=PassesOn), gradients(TOKENS, micro=12, batch=12)
    )


def test_a_training_step_of_old_takes_two_arguments() -> None:
    steps: list[Any] = []

    class Stepping(Trainer):
        def training_step(self, model: Any, inputs: Any) -> torch.Tensor:  # type: ignore[override]
            steps.append(inputs)
            return super().training_step(model, inputs, self._trainflow.run.weights.num_items)  # type: ignore[union-attr]

    assert_close(gradients(TOKENS, micro=3, batch=12, cls=Stepping), gradients(TOKENS, micro=12, batch=12))
    assert len(steps) == 4


def test_micro_batches_without_any_target_count_nothing() -> None:
    rows = [dict(row) for row in TOKENS[:8]]
    for row in rows[2:4]:
        row["labels"] = torch.full((7,), -100)
    assert_close(gradients(rows, micro=2, batch=8), gradients(rows, micro=8, batch=8))


class Plain(Classifier):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)


class AsTuple(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x, labels)
        return tuple(outputs.values())


class AsOutput(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return ModelOutput(**super().forward(x, labels))


@pytest.mark.parametrize("model", [Plain, AsTuple, AsOutput])
def test_classifiers_count_samples_and_may_return_tuples_dicts_or_outputs(model: type[nn.Module]) -> None:
    rows = [{"x": row["x"].double(), "labels": row["labels"]} for row in ROWS]
    assert_close(gradients(rows, micro=5, batch=12, model=model), gradients(rows, micro=12, batch=12, model=Plain))


def test_label_smoothing_is_torchs_own_and_exact() -> None:
    rows = [{"x": row["x"].double(), "labels": row["labels"]} for row in ROWS]
    found, loss = gradients(rows, micro=4, batch=8, model=Plain, label_smoothing_factor=0.1)
    torch.manual_seed(0)
    model = Plain().double()
    x, labels = torch.stack([row["x"] for row in rows[:8]]), torch.tensor([row["labels"] for row in rows[:8]])
    expected = nn.functional.cross_entropy(model(x)["logits"].float(), labels, label_smoothing=0.1)
    torch.autograd.backward(expected)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_shifting_models_never_predict_the_first_label() -> None:
    class Shifting(TokenModel):
        shifts_labels = True

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            logits = super().forward(input_ids)["logits"]
            assert labels is not None
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"loss": loss, "logits": logits}

    rows = [row for row in TOKENS if int((row["labels"] != -100).sum()) > 1]
    whole = gradients(rows, micro=len(rows), batch=len(rows), model=Shifting)
    assert_close(gradients(rows, micro=2, batch=len(rows), model=Shifting), whole)


def rows_without_targets(count: int, *without: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [dict(row) for row in token_rows(count)]
    for number in without:
        rows[number]["labels"] = torch.full((7,), -100)
    return rows


IN_TURN: dict[str, Any] = {"train_sampling_strategy": "sequential", "global_batch_size": 2, "num_train_epochs": 1}


@pytest.mark.parametrize(
    ("rows", "arguments", "at"),
    [
        (rows_without_targets(8, *range(8)), {}, 4),  # an epoch
        (rows_without_targets(8, *range(8)), {"max_steps": 3}, 3),  # a run that ends inside of an epoch
        (rows_without_targets(60, *range(40)), {}, 10),  # the first steps, long before a log
        (rows_without_targets(60, *range(20, 50)), {"logging_steps": 5, "logging_strategy": "steps"}, 20),  # a window
    ],
)
def test_a_run_that_learns_nothing_fails_and_shows_a_row(
    rows: list[dict[str, Any]], arguments: dict[str, Any], at: int, tmp_path: Path
) -> None:
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
