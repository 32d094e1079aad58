"""What a model got right and wrong, in a few numbers that a picture is drawn from."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from trainer_lib.evaluation.outcomes import HARDEST, MAX_ROWS, SAMPLES, summarize_outcomes


def test_classes_are_counted_and_wrong_rows_are_among_the_samples() -> None:
    labels = np.array([0, 1, 2, 2] * 10)
    scores = np.eye(3)[labels]
    scores[37] = [0, 0, 1]  # a 1 that is taken for a 2
    found = summarize_outcomes(scores, labels, lambda row: 100 + row)
    assert found is not None
    assert (found["kind"], found["rows"]) == ("classes", 40)
    assert found["matrix"] == [[10, 0, 0], [0, 9, 1], [0, 0, 20]]
    assert found["samples"][0] == [100, 0, 0]
    assert found["samples"][SAMPLES:] == [[137, 1, 2]]
    assert len(found["hardest"]) == 40
    assert found["hardest"][0] == [137, 1, 2, pytest.approx(1.55144, abs=1e-5)]
    assert found["hardest"][1][3] == pytest.approx(0.551445, abs=1e-5)
    # All have a confidence of e / (e + 2).
    assert found["reliability"] == [[pytest.approx(0.576117, abs=1e-5), 0.975, 40]]
    json.dumps(found, allow_nan=False)


def test_a_row_that_the_model_rules_out_is_the_hardest_and_its_loss_is_no_number() -> None:
    scores = np.array([[0.0, 0.0], [0.0, -np.inf], [3.0, 0.0]])
    found = summarize_outcomes(scores, np.array([0, 1, 1]))
    assert found is not None
    assert [row for row, *_ in found["hardest"]] == [1, 2, 0]
    assert found["hardest"][0] == [1, 1, 0, None]
    json.dumps(found, allow_nan=False)


def test_classes_whose_probability_alone_is_known_are_counted_and_calibrated() -> None:
    labels, guessed = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])
    found = summarize_outcomes(guessed, labels, confidence=np.array([0.9, 0.9, 0.55, 0.9]), classes=3)
    assert found is not None
    assert found["matrix"] == [[2, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert found["reliability"] == [[0.55, 0.0, 1], [pytest.approx(0.9), 1.0, 3]]
    assert found["samples"][:2] == [[0, 0, 0], [1, 1, 1]]
    assert found["hardest"] == []
    assert summarize_outcomes(guessed, labels) is None


@pytest.mark.parametrize("shape", [(5000,), (5000, 1)])
def test_numbers_are_thinned_and_the_worst_row_is_a_sample(shape: tuple[int, ...]) -> None:
    measured = np.linspace(0, 1, 5000, dtype=np.float32).reshape(shape)
    predicted = measured + 0.125
    predicted[4321] = 9.0
    found = summarize_outcomes(predicted, measured)
    assert found is not None
    assert (found["kind"], found["rows"]) == ("numbers", 5000)
    assert len(found["measured"]) == len(found["predicted"]) == MAX_ROWS
    assert 4321 in [row for row, _, _ in found["samples"]]
    assert found["samples"][0] == [0, 0.0, 0.125]
    assert len(found["hardest"]) == HARDEST
    assert found["hardest"][0][0] == 4321
    assert found["hardest"][0][3] == pytest.approx(9.0 - 4321 / 4999, abs=1e-4)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("predictions", "labels"),
    [
        (np.zeros((4, 7, 3)), np.zeros((4, 7), int)),  # tokens
        (np.zeros((4, 3)), np.zeros((4, 3), np.float32)),  # several numbers of a row
        (np.zeros((4, 3)), np.array([0, 1, -100, 2])),  # ignored labels
        (np.zeros((4, 3)), np.array([0, 1, 2, 3])),  # a label without a score
        (np.array([1.0, np.nan], np.float32), np.ones(2, np.float32)),
        (np.zeros((0, 3)), np.zeros(0, int)),
        (np.zeros((4, 5000)), np.zeros(4, int)),
        ([1, 2], np.zeros(2, int)),
        (np.zeros((4, 3)), None),
    ],
)
def test_other_outputs_have_no_picture(predictions: Any, labels: Any) -> None:
    assert summarize_outcomes(predictions, labels) is None
