"""Step by step the same numbers as the Trainer of transformers: same seeds, model and data, sequential order.

Without dropout: torch's DataLoader draws a seed from the generator that dropout draws from, ours leaves it alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.training import trainer

STEPS = 6
QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NUMBERS = ("loss", "grad_norm", "learning_rate")


def peer(folder: Path, rows: list[Any], model: Any, **given: Any) -> list[dict[str, float]]:
    """What the Trainer of transformers logs."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Noting(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            noted.append(dict(logs))

    noted: list[dict[str, float]] = []
    settings: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}
    settings |= {"dataloader_pin_memory": False, "optim": "adamw_torch"}
    args = TrainingArguments(output_dir=str(folder), **settings, **given)
    Trainer(model, args, train_dataset=rows, callbacks=[Noting()]).train()
    return [{name: float(entry[name]) for name in NUMBERS} for entry in noted if "loss" in entry]


def ours(folder: Path, rows: list[Any], model: Any, **given: Any) -> list[dict[str, float]]:
    one = trainer(folder, rows, model=model, optim="adamw_torch", **given)
    one.train()
    return [{name: entry[name] for name in NUMBERS} for entry in one.state.log_history if "loss" in entry]


def golden(**given: Any) -> dict[str, Any]:
    return {
        "max_steps": STEPS,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "train_sampling_strategy": "sequential",
        "seed": 7,
        **given,
    }


def assert_equal_numbers(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert len(one) == len(other) > 0
    for step, (left, right) in enumerate(zip(one, other, strict=True), 1):
        for name in NUMBERS:
            assert left[name] == pytest.approx(right[name], rel=2e-6, abs=1e-12), f"{name} of step {step}"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
    ],
    ids=["plain", "clipping", "smoothing"],
)
def test_a_language_model_trains_as_with_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    rows = lm_rows(40)
    expected = peer(tmp_path / "peer", rows, llama(), **golden(**given))
    assert_equal_numbers(ours(tmp_path / "ours", rows, llama(), **golden(**given)), expected)


@pytest.mark.parametrize(
    "given",
    [{"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}, {"label_smoothing_factor": 0.1}],
    ids=["clipping", "smoothing"],
)
def test_a_classifier_trains_as_with_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    rows = text_rows(40)

    def model() -> Any:
        made = bert(**QUIET)
        # Its loss is a mean and ignores the count, which the peer has to be told: see the test below.
        made.accepts_loss_kwargs = False
        return made

    expected = peer(tmp_path / "peer", rows, model(), **golden(**given))
    assert_equal_numbers(ours(tmp_path / "ours", rows, model(), **golden(**given)), expected)


def test_a_model_that_ignores_the_count_is_accumulated_rightly_without_being_told(tmp_path: Path) -> None:
    """The peer takes ``**kwargs`` for a promise, and sums the means of the micro-batches: twice the loss it logs."""
    rows, given = text_rows(40), golden(gradient_accumulation_steps=2)
    whole = ours(tmp_path / "one", rows, bert(**QUIET), **golden(per_device_train_batch_size=4))
    assert_equal_numbers(ours(tmp_path / "two", rows, bert(**QUIET), **given), whole)
    assert peer(tmp_path / "peer", rows, bert(**QUIET), **given)[0]["loss"] == pytest.approx(2 * whole[0]["loss"])
