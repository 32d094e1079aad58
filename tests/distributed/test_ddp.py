"""Several processes train like one: same losses, same weights, same samples; they stop, fail and resume together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.distributed import run_distributed
from tests.support.toys import Augmented, Classifier, StatefulStream, TokenModel, classification_rows, token_rows
from tests.support.training import (
    LOGGED,
    StopAt,
    accuracy,
    assert_equal,
    final_state,
    logged,
    losses,
    trainer,
    whole_state,
)
from trainer_lib import Trainer
from trainer_lib.errors import NonFiniteError, Preempted
from trainer_lib.evaluation.evaluation_loop import stream_predictions

TOKENS = token_rows(23)
ROWS = classification_rows(23)


def train_on_tokens(folder: str, **given: Any) -> Trainer:
    """Train two epochs over 23 sequences of unequal token counts, in global batches of 10: the last step has 3."""
    settings = {"num_train_epochs": 2, "global_batch_size": 10, "per_device_train_batch_size": 2, **LOGGED, **given}
    one = trainer(folder, TOKENS, model=TokenModel(), **settings)
    one.train()
    return one


def train_on_poisoned_rank(folder: str, **given: Any) -> str:
    """Train on rows of which only rank 1's samples of step 2 have a NaN: every rank skips the step and gives up with
    finite weights. Returns "<step of the error> <number of logs>", or that nothing was noticed."""
    rows = [dict(row) for row in ROWS[:12]]
    for index in range(4, 12):
        rows[index]["x"] = rows[index]["x"] * float("nan") if (index // 2) % 2 else rows[index]["x"]
    settings = {"per_device_train_batch_size": 2, "max_steps": 9, "max_nonfinite_steps": 2, **LOGGED, **given}
    one = trainer(folder, rows, train_sampling_strategy="sequential", **settings)
    try:
        one.train()
    except NonFiniteError as error:
        state = one._trainflow.engine.strategy.checkpoint_tensors(
            one._trainflow.engine.strategy.local_state(one.model_wrapped)
        )
        assert all(bool(torch.isfinite(value).all()) for value in state.values() if not value.is_meta)
        return f"{error.step} {len(one.state.log_history)}"
    return "did not notice"


def tokens(folder: str, **given: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    one = train_on_tokens(folder, **given)
    state = {name: value.numpy() for name, value in one.model.state_dict().items()}
    return {"state": state, "logs": logged(one), "strategy": one._trainflow.engine.strategy.name}


def close(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["state"].items():
        np.testing.assert_allclose(value, other["state"][name], rtol=2e-5, atol=1e-6, err_msg=name)
    for mine, theirs in zip(one["logs"], other["logs"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"total_flos"}:  # padding is work: how wide a micro-batch is depends on its rows
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def test_three_processes_train_like_one(tmp_path: Path) -> None:
    """Unequal token counts per rank, ranks without samples in the last step, accumulation, clipping."""
    alone = tokens(str(tmp_path / "one"))
    assert alone["strategy"] == "single"
    ranks = run_distributed(tokens, 3, str(tmp_path / "many"))
    for rank in ranks:
        assert rank["strategy"] == "ddp"
        close(alone, rank)
        for name, value in rank["state"].items():
            assert np.array_equal(value, ranks[0]["state"][name]), "ranks drifted apart"


def with_a_step_without_targets(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    rows = [dict(row) for row in token_rows(23)]
    for row in rows[10:20]:
        row["labels"] = torch.full((7,), -100)
    settings: dict[str, Any] = {"logging_strategy": "epoch", "train_sampling_strategy": "sequential", **given}
    settings |= {"global_batch_size": 10, "per_device_train_batch_size": 2, "num_train_epochs": 2, "weight_decay": 0.1}
    torch.manual_seed(0)
    one = trainer(folder, rows, model=TokenModel(), **settings)
    one.train()
    return {"state": {name: value.numpy() for name, value in whole_state(one).items()}, "logs": logged(one)}


def in_one_group(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        strategy: with_a_step_without_targets(f"{folder}/{strategy}", given)
        for strategy, given in (("ddp", {}), ("fsdp", {"fsdp": "full_shard"}))
    }
    parts: tuple[Callable[[str], Any], ...] = (per_rank_means, unusual, train_on_poisoned_rank, evaluated, streaming)
    return found | {part.__name__: part(f"{folder}/{part.__name__}") for part in parts}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of two ranks in one group: forming it takes longer than these trainings."""
    return run_distributed(in_one_group, 2, str(tmp_path_factory.mktemp("two")), timeout_s=120)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_leave_a_step_without_targets_out(strategy: str, two: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = with_a_step_without_targets(str(tmp_path), {})
    assert [alone["logs"][-1][name] for name in ("steps_without_targets", "batches_without_targets")] == [2, 10]
    for rank in (rank[strategy] for rank in two):
        close({**alone, "state": {name: alone["state"][name] for name in rank["state"]}}, rank)


def per_rank_means(folder: str) -> dict[str, Any]:
    return tokens(folder, average_tokens_across_devices=False)


def test_without_averaging_over_ranks_each_has_its_own_mean(two: list[dict[str, Any]], tmp_path: Path) -> None:
    one, other = (rank["per_rank_means"] for rank in two)
    exact = tokens(str(tmp_path))
    assert np.array_equal(one["state"]["head.weight"], other["state"]["head.weight"])
    assert not np.allclose(one["state"]["head.weight"], exact["state"]["head.weight"], rtol=1e-5)


class Frozen(Classifier):
    """One part frozen, one never used, a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.body.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.add_(len(x))
        return super().forward(x, labels)


class Facade(Trainer):
    """A training step as subclasses of old write it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        inputs = self._prepare_inputs(inputs)
        loss: torch.Tensor = self.compute_loss(model, inputs) / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        assert self.accelerator.gather(loss.detach()).shape == (self.accelerator.num_processes,)
        assert self.accelerator.unwrap_model(model) is self.model
        return loss.detach()


def unusual(folder: str) -> list[float]:
    """Parameters after trainings with frozen and unused ones, and through steps of old."""
    steps: dict[str, Any] = {"gradient_accumulation_steps": 2}
    ends = [
        trainer(f"{folder}/frozen", ROWS, model=Frozen(), max_steps=4, save_strategy="steps", **steps),
        trainer(f"{folder}/old", ROWS[:16], cls=Facade, model=Classifier(0.0), max_steps=2, **steps),
    ]
    for training in ends:
        training.train()
    return [float(value.detach().sum()) for training in ends for value in training.model.parameters()]


def test_frozen_and_unused_parameters_and_steps_of_old_train_under_replication(two: list[dict[str, Any]]) -> None:
    assert two[0]["unusual"] == two[1]["unusual"]


RESUMABLE: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
RESUMABLE |= {"num_train_epochs": 2, "logging_strategy": "steps", "logging_steps": 3}
RESUMABLE |= {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def stoppable(folder: str, stop: int | None) -> dict[str, Any] | int:
    """Train; with `stop`, one rank only gets a SIGTERM, in an evaluation."""
    callbacks = [StopAt(stop, "on_prediction_step")] if stop and os.environ["RANK"] == "1" else []
    one = trainer(
        folder, Augmented(ROWS), eval_dataset=ROWS[:9], callbacks=callbacks, dataloader_num_workers=1, **RESUMABLE
    )
    try:
        one.train("auto")
    except Preempted as stopped:
        assert stopped.step is not None
        return stopped.step
    return final_state(one)


def test_one_ranks_signal_stops_all_at_one_step_and_resuming_is_exact(tmp_path: Path) -> None:
    whole = run_distributed(stoppable, 2, str(tmp_path / "whole"), None)
    stops = run_distributed(stoppable, 2, str(tmp_path / "cut"), 2)
    assert stops[0] == stops[1]
    assert stops[0] in (2, 3, 4)
    for before, after in zip(whole, run_distributed(stoppable, 2, str(tmp_path / "cut"), None), strict=True):
        assert_equal(before, after)


def test_a_nan_on_one_rank_is_skipped_by_all(two: list[dict[str, Any]]) -> None:
    assert [rank["train_on_poisoned_rank"] for rank in two] == ["3 2"] * 2


def evaluated(folder: str) -> list[dict[str, Any]]:
    def failing(p: Any) -> dict[str, float]:
        raise ZeroDivisionError("no positives")

    with pytest.raises(Exception, match="no positives"):  # of rank 0, on every rank
        trainer(folder, None, eval_dataset=ROWS[:5], compute_metrics=failing).evaluate()
    return [evaluate(f"{folder}/{count}", count) for count in (1, 10)]


def evaluate(folder: str, count: int) -> dict[str, Any]:
    seen: list[Any] = []

    def metrics(p: Any) -> dict[str, float]:
        seen.append((p.predictions.shape, p.label_ids.tolist()))
        return accuracy(p)

    settings: dict[str, Any] = {"per_device_eval_batch_size": 3, "eval_accumulation_steps": 2}
    training = trainer(folder, None, eval_dataset=ROWS[:count], compute_metrics=metrics, **settings)
    measured = training.evaluate()
    predicted = training.predict(ROWS[:count]).predictions
    first = 5 * training._trainflow.comm.rank
    streamed = stream_predictions(training, ROWS, start=first, stop=first + 4)
    return {
        "loss": measured["eval_loss"],
        "accuracy": measured["eval_accuracy"],
        "seen": seen,
        "kept": None if predicted is None else predicted.tolist(),
        "rows": [(rows.tolist(), logits.shape) for rows, logits in streamed],
    }


def test_evaluation_counts_every_row_once_in_order(two: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = evaluated(str(tmp_path))
    zeros, others = (rank["evaluated"] for rank in two)
    for count, expected, zero, other in zip((1, 10), alone, zeros, others, strict=True):
        assert zero["seen"][0] == ((count, 3), [row["labels"] for row in ROWS[:count]])
        assert np.allclose(zero["kept"], expected["kept"], atol=1e-6)
        for rank in (zero, other):
            assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert rank["accuracy"] == expected["accuracy"]
        assert other["kept"] is None and other["seen"] == []
        assert other["rows"] == [([5, 6, 7], (3, 3)), ([8], (1, 3))]


def streaming(folder: str) -> list[float]:
    settings = {"max_steps": 5, "global_batch_size": 6, "per_device_train_batch_size": 3, **LOGGED}
    torch.manual_seed(0)
    training = trainer(folder, StatefulStream(ROWS), model=Classifier(dropout=0.0), **settings)
    training.train()
    return losses(training)


def test_a_stream_trains_the_same_on_several_processes(two: list[dict[str, Any]], tmp_path: Path) -> None:
    zero, one = (rank["streaming"] for rank in two)
    assert zero == one
    assert zero == pytest.approx(streaming(str(tmp_path)), rel=1e-5)
