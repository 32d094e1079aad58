"""Step by step the same numbers as the Trainer of transformers: same seeds, model and data, sequential order.

Without dropout: torch's DataLoader draws a seed from the generator that dropout draws from, ours leaves it alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.patterns import Bounds, Case, Make, assert_same
from tests.support.tiny_models import bert, llama, lm_rows, text_rows

CLIPPED: dict[str, Any] = {"max_grad_norm": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 2}
EXACT = Bounds(rel=2e-6, abs=1e-12)
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
    assert_same(_case(llama, lm_rows(40), **SETTINGS[settings]), tmp_path, EXACT)


def classifier(**given: Any) -> Any:
    return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **given)


def told() -> Any:
    """Its loss is a mean and ignores the count, which the reference has to be told: see the test below."""
    made = classifier()
    made.accepts_loss_kwargs = False
    return made


@pytest.mark.parametrize("settings", ["clipped", "smoothed"])
def test_a_classifier_trains_as_with_the_trainer_of_transformers(settings: str, tmp_path: Path) -> None:
    assert_same(_case(told, text_rows(40), **SETTINGS[settings]), tmp_path, EXACT)


def test_a_model_that_ignores_the_count_is_accumulated_rightly_without_being_told(tmp_path: Path) -> None:
    """The reference takes ``**kwargs`` for a promise, and sums the means of the micro-batches: twice the loss."""
    import transformers

    import trainer_lib

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
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)
    assert losses[2][0] == pytest.approx(2 * losses[0][0])
