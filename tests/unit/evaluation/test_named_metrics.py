"""Metrics by name: their values, the outputs that they suit, and those of slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from flows.spec.prepared_checks import check_splits
from flows.spec.spec import parse_spec
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.named_metrics import NamedMetrics, measure, measure_slices
from trainer_lib.evaluation.resamples import Remembered, intervals
from trainer_lib.metric_names import CLASS_METRICS, NUMBER_METRICS, read_metrics
from trainer_lib.outputs import EvalPrediction
from trainer_lib.verb_results import PreparedSplit

DRAW = np.random.default_rng(0)
LABELS = DRAW.integers(0, 3, 200)
SCORES = DRAW.normal(size=(200, 3)) + 1.5 * np.eye(3)[LABELS]
TRUTH = DRAW.normal(size=200).astype(np.float32)
PREDICTED = TRUTH + 0.3 * DRAW.normal(size=200)


def test_metrics_of_classes_are_those_of_scikit_learn() -> None:
    found = measure(list(CLASS_METRICS), SCORES, LABELS)
    assert set(found) == set(CLASS_METRICS)
    guessed = SCORES.argmax(axis=1)
    probabilities = np.exp(SCORES) / np.exp(SCORES).sum(axis=1, keepdims=True)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(LABELS, guessed))
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(LABELS, guessed))
    assert found["f1_weighted"] == pytest.approx(metrics.f1_score(LABELS, guessed, average="weighted"))
    assert found["log_loss"] == pytest.approx(metrics.log_loss(LABELS, probabilities))
    assert found["f1_micro"] == pytest.approx(found["accuracy"])


def test_areas_are_those_of_scikit_learn_and_left_out_where_all_rows_are_of_one_class() -> None:
    names = ["roc_auc", "average_precision"]
    probabilities = np.exp(SCORES) / np.exp(SCORES).sum(axis=1, keepdims=True)
    found = measure(names, SCORES, LABELS)
    assert found["roc_auc"] == pytest.approx(metrics.roc_auc_score(LABELS, probabilities, multi_class="ovr"))
    assert found["average_precision"] == pytest.approx(metrics.average_precision_score(LABELS, probabilities))
    two, is_second = SCORES[:, :2], (LABELS == 1).astype(int)
    assert measure(names, two, is_second)["roc_auc"] == pytest.approx(
        metrics.roc_auc_score(is_second, two[:, 1] - two[:, 0])
    )
    assert measure([*names, "accuracy"], two, np.ones(200, int)).keys() == {"accuracy"}
    few = LABELS[LABELS < 2]
    assert 0.5 < measure(names, SCORES[LABELS < 2], few)["roc_auc"] <= 1, "of the classes that are there"
    # Slices and resamples of one class are without them, and the others are as they were.
    compute = NamedMetrics(None, read_metrics([*names, "accuracy"]))
    given: Any = EvalPrediction(two[:40], np.arange(40) % 4 // 3)
    sliced = measure_slices(compute, given, {"group": ["b" if row % 4 == 3 else "a" for row in range(40)]})
    assert {name for name in sliced if not name.startswith("rows")} == {"accuracy/group/a", "accuracy/group/b"}
    rare: Any = EvalPrediction(two[:20], (np.arange(20) == 3).astype(int))
    remembered = Remembered(compute)
    remembered(rare)
    resampled = remembered.resampled("0" * 16, 200)
    # A resample lacks the only row of its class in 36 % of the cases.
    assert 100 < len(resampled["roc_auc"]) < 160 < len(resampled["accuracy"]) == 200
    assert {"roc_auc_low", "accuracy_low"} <= set(intervals(resampled, 0.95))
    assert all(np.isfinite(each) for each in resampled["roc_auc"])


def test_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    for outputs in (PREDICTED, PREDICTED[:, None], (PREDICTED, "hidden states")):
        found = measure(list(NUMBER_METRICS), outputs, TRUTH)
        assert set(found) == set(NUMBER_METRICS)
        assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(TRUTH, PREDICTED))
        assert found["r2"] == pytest.approx(metrics.r2_score(TRUTH, PREDICTED))
        assert found["median_absolute_error"] == pytest.approx(metrics.median_absolute_error(TRUTH, PREDICTED))
        assert found["bias"] == pytest.approx(float((PREDICTED - TRUTH).mean()))


def test_calibration_compares_confidence_and_accuracy() -> None:
    sure = np.array([[8.0, 0.0]] * 10)  # a confidence of 0.9997
    half_right = np.array([0, 1] * 5)
    assert measure(["calibration_error"], sure, half_right)["calibration_error"] == pytest.approx(0.4997, abs=1e-4)
    assert measure(["calibration_error"], sure, np.zeros(10, int))["calibration_error"] < 0.001


def test_a_metric_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="not for outputs") as caught:
        measure(["accuracy", "rmse"], SCORES, LABELS)
    assert caught.value.value == "rmse"
    assert "f1_macro" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="not for outputs"):
        measure(["accuracy"], PREDICTED, TRUTH)
    with pytest.raises(ConfigError, match="not for outputs") as caught:
        measure(["accuracy"], np.zeros((2, 3, 4)), np.zeros((2, 3), int))
    assert "compute_metrics" in str(caught.value.remedy)


def test_the_recipes_own_values_stay() -> None:
    given: Any = EvalPrediction(SCORES, LABELS)
    both = NamedMetrics(lambda p: {"accuracy": -1.0, "mine": 2.0}, read_metrics(["accuracy", "f1_macro"]))(given)
    assert (both["accuracy"], both["mine"]) == (-1.0, 2.0)
    assert both["f1_macro"] == measure(["f1_macro"], SCORES, LABELS)["f1_macro"]
    assert list(NamedMetrics(None, read_metrics(["accuracy"]))(given)) == ["accuracy"]


def test_slices_are_measured_on_their_rows_alone() -> None:
    groups = ["a/b" if row % 4 else "c" for row in range(200)]
    given: Any = EvalPrediction(SCORES, LABELS)
    found = measure_slices(NamedMetrics(None, read_metrics(["accuracy"])), given, {"group": groups})
    assert set(found) == {f"{name}/group/{value}" for name in ("accuracy", "rows") for value in ("a_b", "c")}
    assert found["rows/group/c"] == 50
    assert found["accuracy/group/c"] == measure(["accuracy"], SCORES[::4], LABELS[::4])["accuracy"]
    with pytest.raises(ConfigError, match="more than 50 different values"):
        measure_slices(NamedMetrics(None, read_metrics(["accuracy"])), given, {"row": range(200)})


def test_few_slices_get_intervals_and_none_of_few_rows() -> None:
    given: Any = EvalPrediction(SCORES, LABELS)
    asked: list[int] = []

    def bounds(part: EvalPrediction) -> dict[str, float]:
        asked.append(len(part.label_ids))
        return {"accuracy_low": 0.1, "accuracy_high": 0.9}

    compute = NamedMetrics(None, read_metrics(["accuracy"]))
    columns: dict[str, list[Any]] = {"group": ["few" if row < 9 else "many" for row in range(200)]}
    found = measure_slices(compute, given, columns, bounds)
    assert asked == [191]
    assert found["accuracy_low/group/many"] == 0.1
    assert "accuracy_low/group/few" not in found
    columns["other"] = [row % 18 for row in range(200)]
    assert len(measure_slices(compute, given, columns, bounds)) == 2 * 20 + 2 * 19
    columns["other"] = [row % 19 for row in range(200)]
    assert len(measure_slices(compute, given, columns, bounds)) == 2 * 21


def test_typos_are_refused_before_the_training() -> None:
    spec = {"name": "x", "recipe": "tabular-classification", "storage": "s"}
    with pytest.raises(ConfigError) as caught:
        parse_spec({**spec, "evaluate": {"metrics": ["f1_marco"]}})
    assert 'Did you mean "f1_macro"?' in f"{caught.value.message} {caught.value.remedy}"
    found = parse_spec({**spec, "evaluate": {"metrics": ["f1_macro"], "slices": ["sexe"]}})
    split = PreparedSplit(rows=1, columns={"sex": "string", "age": "float64"})
    prepared = dict.fromkeys(("train", "test"), split)
    with pytest.raises(ConfigError, match="rows of the split 'test' have no such column") as late:
        check_splits(found, prepared)
    assert late.value.remedy == 'Did you mean "sex"?'
    check_splits(parse_spec({**spec, "evaluate": {"slices": ["sex"]}}), prepared)
