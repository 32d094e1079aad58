"""Resamples of the same rows are the same for every model, so their differences are paired."""

from __future__ import annotations

import numpy as np
import pytest

from trainer_lib.evaluation.resamples import Remembered, intervals
from trainer_lib.outputs import EvalPrediction

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
