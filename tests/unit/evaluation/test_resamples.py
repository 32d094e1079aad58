"""Resamples of the same rows are the same for every model, so their differences are paired."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer_lib.evaluation.resamples import Remembered, intervals
from trainer_lib.outputs import EvalPrediction
from trainer_lib.recipes.held_out_metrics import measure_classes, measure_numbers, measure_tokens
from trainer_lib.recipes.preference_scores import measure_preferences

SEED = "0123456789abcdef" * 4


def _accuracy(p: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.asarray(p.predictions).argmax(-1) == p.label_ids).mean())}


def test_a_better_model_is_better_on_each_resample_of_the_rows() -> None:
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 50)
    good = np.eye(2)[labels]
    bad = good.copy()
    bad[:5] = bad[:5, ::-1]
    values = []
    for predictions in (good, bad):
        remembered = Remembered(_accuracy)
        assert remembered.resampled(SEED, 20) == {}
        remembered(EvalPrediction(predictions, labels))
        values.append(remembered.resampled(SEED, 20)["accuracy"])
        assert remembered.resampled(SEED, 20)["accuracy"] == values[-1]
    assert values[0] == [1.0] * 20
    assert np.mean(values[1]) == pytest.approx(0.9, abs=0.03)
    assert len(set(values[1])) > 3


def test_an_interval_holds_the_share_of_the_resamples_that_is_asked_for() -> None:
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 2, 400)
    scores = np.eye(2)[np.where(draw.random(400) < 0.8, labels, 1 - labels)]
    remembered = Remembered(_accuracy)
    measured = remembered(EvalPrediction(scores, labels))["accuracy"]
    resampled = remembered.resampled(SEED, 500)
    found = intervals(resampled, 0.95)
    # The standard error of a share of 0.8 of 400 rows is 0.02.
    assert found["accuracy_low"] == pytest.approx(measured - 0.04, abs=0.01)
    assert found["accuracy_high"] == pytest.approx(measured + 0.04, abs=0.01)
    narrow = intervals(resampled, 0.5)
    assert found["accuracy_low"] < narrow["accuracy_low"] < narrow["accuracy_high"] < found["accuracy_high"]
    assert intervals(resampled, None) == {}


def _classes(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    labels = draw.choice(4, rows, p=[0.27, 0.25, 0.24, 0.24])
    guessed = np.where(draw.random(rows) < 0.3, labels, draw.integers(0, 4, rows))
    return np.eye(4)[guessed], labels, labels


def _numbers(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    labels = draw.normal(3.0, 2.0, rows)
    return labels + draw.normal(0.0, 1.0, rows), labels, labels


def _tokens(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = draw.integers(0, 500, (rows, 8))
    return np.stack((draw.gamma(40, 1.2, rows), np.full(rows, 8.0)), axis=1), tokens, tokens


def _preferences(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return draw.normal(0, 1, (rows, 2)), np.zeros(rows), draw.integers(1, 50, (rows, 4)).astype(float)


MEASURES: dict[str, Any] = {
    "classes": (_classes, lambda p: measure_classes(p.predictions, p.label_ids[0], p.whole_labels[0])),
    "numbers": (_numbers, lambda p: measure_numbers(p.predictions, p.label_ids[0], p.whole_labels[0])),
    "tokens": (_tokens, lambda p: measure_tokens(p.predictions, p.label_ids[0], p.whole_labels[0])),
    "preferences": (_preferences, lambda p: measure_preferences(p.predictions, p.label_ids[1], p.whole_labels[1])),
}


def _with_intervals(name: str, seed: int, rows: int, resamples: int) -> tuple[dict[str, float], dict[str, float]]:
    make, compute = MEASURES[name]
    predictions, labels, known = make(np.random.default_rng(seed), rows)
    remembered = Remembered(compute)
    values = remembered(EvalPrediction(predictions, (labels, known)))
    return values, intervals(remembered.resampled(f"{seed + 1_000_000:016x}", resamples), 0.95)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("rows", [12, 60, 300])
def test_a_value_lies_in_its_own_interval(name: str, rows: int) -> None:
    for seed in range(8):
        values, bounds = _with_intervals(name, seed, rows, 100)
        for metric, value in values.items():
            assert bounds[f"{metric}_low"] <= value * (1 + 1e-5) + 1e-9, (metric, seed)
            assert value * (1 - 1e-5) - 1e-9 <= bounds[f"{metric}_high"], (metric, seed)


@pytest.mark.parametrize(
    ("name", "rows", "true"),
    [
        ("classes", 200, {"accuracy": 0.3 + 0.7 / 4, "accuracy_over_majority": 0.3 + 0.7 / 4 - 0.27}),
        ("numbers", 600, {"mean_rmse": 2.0, "rmse_below_mean": 1.0}),
    ],
)
def test_ninety_five_of_a_hundred_intervals_hold_the_truth(name: str, rows: int, true: dict[str, float]) -> None:
    held = dict.fromkeys(true, 0)
    for seed in range(400):
        _, bounds = _with_intervals(name, seed, rows, 200)
        for metric, value in true.items():
            held[metric] += bounds[f"{metric}_low"] <= value <= bounds[f"{metric}_high"]
    assert all(0.93 <= count / 400 <= 0.97 for count in held.values()), held
