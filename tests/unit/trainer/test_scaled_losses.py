"""Losses beside the Trainer of transformers: those of real models step by step, and those that their author scales.

Without dropout: torch's DataLoader draws a seed from the generator that dropout draws from, ours leaves it alone.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer_lib
from tests.support.gradients import assert_close, gradients
from tests.support.patterns import ROWS, Bounds, Case, Either, Make, Small, assert_same
from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.toys import TokenModel, token_rows
from trainer_lib import Trainer
from trainer_lib.errors import DataError
from trainer_lib.trainer.model.forward import LossRule
from trainer_lib.trainer.weighting import LossScale, StepWeights

EXACT = Bounds(1e-6, 1e-6, 1e-6)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction=reduction)


class Times(Either):
    """Computes its own loss, as a mixin on the Trainer of either library."""

    times = 7

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return self.times * model(**inputs)["loss"]


class StatesThatItIsScaled(Times):
    loss_is_scaled_for_ga = True


class StatesThatItIsNot(Times):
    loss_is_scaled_for_ga = False


class SaysThatTheModelScales(Times):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True


class SaysThatTheModelDoesNot(Times):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert num_items_in_batch is None
        return super().compute_loss(model, inputs)


class SwitchesScalingOff(Times):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func="anything, to switch scaling off", **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return cross_entropy(model(x=inputs["x"])["logits"], inputs["labels"], "sum") / 100


class DividesByTheMicroBatches(SwitchesScalingOff):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return model(**inputs)["loss"] / self.current_gradient_accumulation_steps


def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, times: int = 1) -> Any:
    return times * cross_entropy(outputs["logits"], labels, "sum") / num_items_in_batch


class LossModule(nn.Module):
    def forward(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        return divided(outputs, labels, num_items_in_batch)


class LossObject:
    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        return cross_entropy(outputs["logits"], labels, "sum") / int(num_items_in_batch)


def by_the_arguments(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return cross_entropy(outputs["logits"], labels) / settings.gradient_accumulation_steps


class settings:  # stands for the arguments that a script keeps in a global
    gradient_accumulation_steps = 4


MIXINS = (StatesThatItIsScaled, StatesThatItIsNot, SaysThatTheModelScales, SaysThatTheModelDoesNot)
FUNCTIONS = (divided, partial(divided, times=2), LossModule(), LossObject(), by_the_arguments)
VARIANTS = [
    *((mixin, {}) for mixin in (*MIXINS, DividesByTheMicroBatches, SwitchesScalingOff)),
    *((Either, {"compute_loss_func": func}) for func in FUNCTIONS),
]


def _first_step(mixin: type, rows: list[Any] = ROWS, **given: Any) -> Case:
    """A step at a rate of one, after which the weights show the gradients."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.0, "max_steps": 1, **given}
    settings |= {"optim": "sgd", "learning_rate": 1.0, "train_dataset": rows}
    return Case(lambda make: make(mixin, **settings))


@pytest.mark.parametrize(("mixin", "given"), VARIANTS)
def test_gradients_and_loss_are_those_of_transformers(mixin: Any, given: dict[str, Any], tmp_path: Path) -> None:
    assert_same(_first_step(mixin, **given), tmp_path, EXACT)


@pytest.mark.parametrize("stated", [True, False])
def test_a_stated_loss_counts_without_targets_too(stated: bool, tmp_path: Path) -> None:
    """As in contrastive and reinforcement losses, whose labels, if there are any, are not what is trained on."""

    class Stating(Either):
        loss_is_scaled_for_ga = stated

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return model(x=inputs["x"])["logits"].pow(2).mean()

    rows = [{**row, "labels": -100} if place in range(4, 8) else row for place, row in enumerate(ROWS)]
    assert_same(_first_step(Stating, rows), tmp_path, EXACT)


class OverRanks(Trainer):
    """Divides by the count, and takes back the mean over ranks by itself, as the reference needs it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss = cross_entropy(model(x=inputs["x"])["logits"], inputs["labels"], "sum") / num_items_in_batch
        return loss * self.accelerator.num_processes


def test_a_loss_that_was_scaled_for_all_ranks_is_not_scaled_for_them_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = OverRanks(Small(), trainer_lib.TrainingArguments(output_dir=folder, use_cpu=True, report_to="none"))
        assert LossRule.of(one, computes_own=True).divided is LossScale.STEP
    weights = StepWeights(data_parallel_size=4, over_ranks=True)
    weights.items, weights.samples, weights.num_items = [2], [2], 16
    assert [weights.weight(scale) for scale in LossScale] == [0.5, 4.0, 1.0, 1.0, 1.0]


def test_a_step_whose_items_are_not_known_is_the_mean_of_its_micro_batches() -> None:
    class Unknown(Trainer):
        def get_batch_samples(self, *args: Any) -> Any:
            return super().get_batch_samples(*args)[0], None

    rows = [row for row in token_rows(24) if int((row["labels"] != -100).sum()) == 3][:4]
    whole = gradients(rows, micro=len(rows), batch=len(rows), model=TokenModel)
    assert_close(gradients(rows, micro=2, batch=len(rows), model=TokenModel, cls=Unknown), whole)


# -- batches without a tensor ------------------------------------------------------------------------------------------
def test_a_batch_whose_samples_nothing_tells_is_refused(tmp_path: Path) -> None:
    class Bag:
        """A batch of the user's own, without a length."""

    one = Make(trainer_lib, tmp_path)()
    with pytest.raises(DataError, match="__len__") as refused:
        one._trainflow.forward.target_items(Bag())
    assert refused.value.field == "data_collator"


CLIPPED: dict[str, Any] = {"max_grad_norm": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 2}
GOLDEN = Bounds(rel=2e-6, abs=1e-12)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_accumulation_steps": 3, **CLIPPED},
    "smoothed": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
}


def _case(model: Any, rows: list[Any], **given: Any) -> Case:
    settings: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": 2, "optim": "adamw_torch", "seed": 7}
    settings |= {"learning_rate": 5e-3, "weight_decay": 0.1, "train_dataset": rows, **given}
    return Case(lambda make: make(model=model(), **settings))


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_language_model_trains_as_with_the_trainer_of_transformers(settings: str, tmp_path: Path) -> None:
    assert_same(_case(llama, lm_rows(40), **SETTINGS[settings]), tmp_path, GOLDEN)


def classifier(**given: Any) -> Any:
    return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **given)


def told() -> Any:
    """Its loss is a mean and ignores the count, which the reference has to be told: it would sum the means."""
    made = classifier()
    made.accepts_loss_kwargs = False
    return made


@pytest.mark.parametrize("settings", ["clipped", "smoothed"])
def test_a_classifier_trains_as_with_the_trainer_of_transformers(settings: str, tmp_path: Path) -> None:
    assert_same(_case(told, text_rows(40), **SETTINGS[settings]), tmp_path, GOLDEN)


def test_a_model_that_ignores_the_count_is_accumulated_rightly_without_being_told(tmp_path: Path) -> None:
    """The reference takes ``**kwargs`` for a promise, and sums the means of the micro-batches: twice the loss."""
    import transformers

    rows = text_rows(40)
    whole, parts = (
        _case(classifier, rows, per_device_train_batch_size=4),
        _case(classifier, rows, gradient_accumulation_steps=2),
    )
    losses: list[list[float]] = []
    for lib, case in ((trainer_lib, whole), (trainer_lib, parts), (transformers, parts)):
        one = case.pattern(Make(lib, tmp_path / str(len(losses))))
        one.train()
        losses.append([entry["loss"] for entry in one.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=2e-6) and losses[2][0] == pytest.approx(2 * losses[0][0])
