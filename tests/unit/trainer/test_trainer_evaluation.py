"""Evaluating and predicting: every row once, in order, whatever the model returns; metrics as people write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.toys import Classifier, Stream, TokenModel, classification_rows, token_rows
from tests.support.training import trainer
from trainer_lib import Trainer
from trainer_lib.evaluation.stream import stream_predictions

ROWS = classification_rows(11)
LABELS = [row["labels"] for row in ROWS]


def accuracy(p: Any) -> dict[str, Any]:
    predictions, labels = p
    return {"accuracy": (predictions.argmax(-1) == labels).mean()}


def test_predictions_are_the_models_own_in_dataset_order(tmp_path: Path) -> None:
    one = trainer(tmp_path, None, per_device_eval_batch_size=4, compute_metrics=accuracy)
    found = one.predict(ROWS)
    model = one.model.eval()
    with torch.no_grad():
        expected = model(torch.stack([row["x"] for row in ROWS]), torch.tensor(LABELS))
    assert np.allclose(found.predictions, expected["logits"].numpy(), atol=1e-6)
    assert found.label_ids.tolist() == LABELS
    assert found.metrics is not None
    assert found.metrics["test_loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert found.metrics["test_accuracy"] == (expected["logits"].argmax(-1).numpy() == LABELS).mean()
    assert found.metrics.keys() > {"test_runtime", "test_samples_per_second", "test_steps_per_second"}


def test_labels_are_not_needed_to_predict(tmp_path: Path) -> None:
    one = trainer(tmp_path, None)
    found = one.predict([{"x": row["x"]} for row in ROWS])
    assert found.predictions.shape == (11, 3)
    assert found.label_ids is None
    assert "test_loss" not in (found.metrics or {})


def test_evaluation_is_logged_and_restores_the_mode_of_the_model(tmp_path: Path) -> None:
    one = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=accuracy)
    one.model.train()
    metrics = one.evaluate(metric_key_prefix="dev")
    assert one.model.training
    assert set(one.state.log_history[0]) - {"step", "epoch"} == metrics.keys() - {"epoch"}
    assert {"dev_loss", "dev_accuracy"} <= metrics.keys()
    assert isinstance(metrics["dev_accuracy"], float)


def test_the_loss_is_the_mean_over_all_targets_for_any_batch_size(tmp_path: Path) -> None:
    rows, model = token_rows(9), TokenModel()
    losses = [
        trainer(tmp_path, None, model=model, eval_dataset=rows, per_device_eval_batch_size=size).evaluate()
        for size in (1, 4, 9)
    ]
    for found in losses:
        assert found["eval_loss"] == pytest.approx(losses[-1]["eval_loss"], rel=1e-6)


class Ragged(nn.Module):
    """Logits as wide as the batch's longest row, and a nested second output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = ids.float() * self.weight
        return {"loss": logits.sum(), "logits": logits, "hidden": (logits[:, :1], [logits[:, 0]]), "cache": None}


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return {"ids": ids, "labels": ids}


def test_ragged_and_nested_outputs_are_padded_with_minus_100(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metrics(p: Any) -> dict[str, float]:
        seen.append(p)
        p.label_ids[p.label_ids == -100] = 0  # what many people's metrics do
        return {"n": 1}

    one = trainer(
        tmp_path, None, model=Ragged(), data_collator=padded, compute_metrics=metrics, per_device_eval_batch_size=2
    )
    found = one.predict([[1], [1, 2], [1, 2, 3]])
    logits, (first, (second,)) = found.predictions
    assert logits.tolist() == [[1, 0, -100], [1, 2, -100], [1, 2, 3]]
    assert first.shape == (3, 1)
    assert second.tolist() == [1, 1, 1]
    assert seen[0].label_ids.tolist() == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    only = one.predict([[1], [1, 2]], ignore_keys=["hidden"])
    assert only.predictions.shape == (2, 2)


def test_logits_may_be_reduced_before_they_are_kept(tmp_path: Path) -> None:
    def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert labels is not None
        return logits.argmax(-1)

    one = trainer(tmp_path, None, preprocess_logits_for_metrics=argmax, compute_metrics=lambda p: {})
    assert one.predict(ROWS).predictions.shape == (11,)


def test_several_sets_are_evaluated_by_name(tmp_path: Path) -> None:
    one = trainer(tmp_path, None, eval_dataset={"easy": ROWS[:5], "hard": ROWS[5:]}, compute_metrics=accuracy)
    assert {"eval_easy_loss", "eval_hard_accuracy"} <= one.evaluate().keys()
    assert one.evaluate("hard")["eval_loss"] == pytest.approx(one.evaluate(ROWS[5:])["eval_loss"])
    assert {"eval_other_loss"} <= one.evaluate({"other": ROWS}).keys()


def test_streams_and_loaders_of_ones_own_are_evaluated(tmp_path: Path) -> None:
    class Quiet(Stream):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from self.rows

    expected = trainer(tmp_path, None, eval_dataset=ROWS).evaluate()["eval_loss"]
    assert trainer(tmp_path, None, eval_dataset=Quiet(ROWS)).evaluate()["eval_loss"] == pytest.approx(expected)

    class Own(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            data: Any = ROWS
            return torch.utils.data.DataLoader(data, batch_size=3, collate_fn=self.data_collator)

        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return torch.utils.data.SubsetRandomSampler(range(10, -1, -1))

    assert trainer(tmp_path, None, cls=Own).evaluate()["eval_loss"] == pytest.approx(expected)
    assert sorted(trainer(tmp_path, None, cls=Own).predict(ROWS).label_ids.tolist()) == sorted(LABELS)


def test_a_loader_without_batches_leaves_the_measuring_to_the_subclass(tmp_path: Path) -> None:
    class Measuring(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            nothing: Any = []
            return torch.utils.data.DataLoader(nothing)

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            assert (output.num_samples, output.predictions) == (0, None)
            return output._replace(metrics={**(output.metrics or {}), "eval_own": 1.0})

    one = trainer(tmp_path, ROWS, eval_dataset="nothing", cls=Measuring, eval_strategy="steps", eval_steps=1)
    assert one.evaluate()["eval_own"] == 1.0
    one.train()
    assert all("eval_loss" not in entry for entry in one.state.log_history)


def test_evaluating_leaves_no_trace_in_the_training(tmp_path: Path) -> None:
    """Not even in its random numbers: metrics that draw (a bootstrap) are common."""

    def bootstrap(p: Any) -> dict[str, float]:
        return {"x": float(np.random.rand() + torch.rand(()).item())}

    weights = []
    settings: dict[str, dict[str, Any]] = {"never": {}, "before": {}, "at steps": {"eval_strategy": "steps"}}
    given: dict[str, Any] = {"eval_dataset": ROWS, "compute_metrics": bootstrap, "num_train_epochs": 2, "eval_steps": 1}
    for when, more in settings.items():
        one = trainer(tmp_path / when, ROWS, **given, **more)
        if when == "before":
            one.compute_metrics = None  # it draws from the generators of this process, which no training protects yet
            assert one.evaluate()["eval_loss"] > 0
        one.train()
        weights.append(one.model.state_dict()["head.weight"])
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_rows_are_streamed_in_ranges_without_keeping_them(tmp_path: Path) -> None:
    one = trainer(tmp_path, None, per_device_eval_batch_size=4)
    whole = one.predict(ROWS).predictions
    streamed = list(stream_predictions(one, ROWS, start=2, stop=99))
    assert [rows.tolist() for rows, _ in streamed] == [[2, 3, 4, 5], [6, 7, 8, 9], [10]]
    assert np.allclose(np.concatenate([logits for _, logits in streamed]), whole[2:], atol=1e-6)


def test_outputs_of_every_form_are_understood(tmp_path: Path) -> None:
    class Tensor(Classifier):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x)["logits"]

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, labels)

    found = trainer(tmp_path, None, model=Tensor(), compute_loss_func=loss).predict(ROWS)
    assert found.predictions.shape == (11, 3)
    assert found.metrics is not None and found.metrics["test_loss"] > 0

    class Tuple(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return tuple(super().forward(x, labels).values())

    assert trainer(tmp_path, None, model=Tuple()).predict(ROWS).predictions.shape == (11, 3)
