"""Metrics of packages: scikit-learn, torchmetrics, and objects that compute of predictions and references."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torchmetrics
from sklearn import metrics

from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.named_metrics import NamedMetrics, measure_slices, require_named
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.metric_names import MetricCall, read_metrics
from trainer_lib.outputs import EvalPrediction

DRAW = np.random.default_rng(0)
LABELS = DRAW.integers(0, 3, 200)
SCORES = DRAW.normal(size=(200, 3)) + 1.5 * np.eye(3)[LABELS]
GUESSED = SCORES.argmax(axis=1)
PROBABILITIES = np.exp(SCORES) / np.exp(SCORES).sum(axis=1, keepdims=True)
TRUTH = DRAW.normal(size=200).astype(np.float32)
PREDICTED = TRUTH + 0.3 * DRAW.normal(size=200)


class Matching:
    """As an object of the package evaluate."""

    def compute(self, predictions: Any, references: Any, scale: float = 1.0) -> dict[str, float]:
        return {"matching": scale * float((np.asarray(predictions) == np.asarray(references)).mean())}


def both(predictions: Any, references: Any) -> dict[str, float]:
    return {"right": float((predictions == references).sum()), "rows": float(len(references))}


def broken(y_true: Any, y_pred: Any) -> float:
    raise RuntimeError("out of order")


def by_class(y_true: Any, y_pred: Any) -> Any:
    return np.zeros(3)


def strange(first: Any, second: Any) -> float:
    return 0.0


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("somewhere")
    module.__dict__.update(matching=Matching(), Matching=Matching, both=both, broken=broken, number=3)
    module.__dict__.update(by_class=by_class, strange=strange)
    monkeypatch.setitem(sys.modules, "somewhere", module)


def measured(*entries: Any, outputs: Any = SCORES, labels: Any = LABELS) -> dict[str, float]:
    given: Any = EvalPrediction(outputs, labels)
    return NamedMetrics(None, read_metrics(list(entries)))(given)


def test_functions_of_scikit_learn_get_the_best_class_or_the_probabilities() -> None:
    found = measured(
        "sklearn.metrics:cohen_kappa_score",
        {"name": "sklearn.metrics:fbeta_score", "as": "f2", "beta": 2, "average": "macro"},
        {"name": "sklearn.metrics:top_k_accuracy_score", "k": 2},
        "sklearn.metrics:log_loss",
        {"name": "sklearn.metrics:roc_auc_score", "multi_class": "ovr"},
        "accuracy",
    )
    assert found["cohen_kappa_score"] == pytest.approx(metrics.cohen_kappa_score(LABELS, GUESSED))
    assert found["f2"] == pytest.approx(metrics.fbeta_score(LABELS, GUESSED, beta=2, average="macro"))
    assert found["top_k_accuracy_score"] == pytest.approx(metrics.top_k_accuracy_score(LABELS, SCORES, k=2))
    assert found["log_loss"] == pytest.approx(metrics.log_loss(LABELS, PROBABILITIES))
    assert found["roc_auc_score"] == pytest.approx(metrics.roc_auc_score(LABELS, PROBABILITIES, multi_class="ovr"))
    assert found["accuracy"] == pytest.approx((GUESSED == LABELS).mean())
    two = measured("sklearn.metrics:roc_auc_score", outputs=SCORES[:, :2], labels=LABELS % 2)
    assert two["roc_auc_score"] == pytest.approx(metrics.roc_auc_score(LABELS % 2, SCORES[:, 1] - SCORES[:, 0]))


def test_classes_and_functions_of_torchmetrics() -> None:
    found = measured(
        {"name": "torchmetrics.classification:MulticlassF1Score", "num_classes": 3},
        {"name": "torchmetrics.classification:MulticlassAUROC", "num_classes": 3, "input": "probabilities"},
        {"name": "torchmetrics.functional:accuracy", "task": "multiclass", "num_classes": 3},
        {"name": "torchmetrics:CohenKappa", "task": "multiclass", "num_classes": 3},
    )
    assert found["MulticlassF1Score"] == pytest.approx(metrics.f1_score(LABELS, GUESSED, average="macro"), abs=1e-6)
    expected = metrics.roc_auc_score(LABELS, PROBABILITIES, multi_class="ovr")
    assert found["MulticlassAUROC"] == pytest.approx(expected, abs=1e-6)
    assert found["accuracy"] == pytest.approx((GUESSED == LABELS).mean())
    assert found["CohenKappa"] == pytest.approx(metrics.cohen_kappa_score(LABELS, GUESSED), abs=1e-6)


def test_numbers_are_given_as_they_are() -> None:
    found = measured(
        "sklearn.metrics:mean_absolute_percentage_error",
        "torchmetrics:SpearmanCorrCoef",
        {"name": "sklearn.metrics:d2_pinball_score", "alpha": 0.9},
        "rmse",
        outputs=PREDICTED[:, None],
        labels=TRUTH,
    )
    assert found["mean_absolute_percentage_error"] == pytest.approx(
        metrics.mean_absolute_percentage_error(TRUTH, PREDICTED)
    )
    expected = metrics.d2_pinball_score(TRUTH, PREDICTED, alpha=0.9)
    assert found["d2_pinball_score"] == pytest.approx(expected)
    assert 0.9 < found["SpearmanCorrCoef"] <= 1


def test_objects_that_compute_of_predictions_and_references() -> None:
    right = float((GUESSED == LABELS).mean())
    assert measured("somewhere:matching") == {"matching": right}
    assert measured({"name": "somewhere:Matching", "as": "m", "scale": 2}) == {"m": pytest.approx(2 * right)}
    assert measured({"name": "somewhere:both", "as": "b"}) == {"b_right": 200 * right, "b_rows": 200.0}


def test_each_call_begins_anew_and_parts_that_cannot_be_measured_are_left_out() -> None:
    calls = read_metrics(
        [
            {"name": "torchmetrics.classification:MulticlassF1Score", "as": "f1", "num_classes": 3},
            {"name": "sklearn.metrics:roc_auc_score", "as": "auc", "multi_class": "ovr"},
        ]
    )
    compute = NamedMetrics(None, calls)
    given: Any = EvalPrediction(SCORES, LABELS)
    whole = compute(given)
    assert compute(given) == whole, "nothing of the call before"
    sliced = measure_slices(compute, given, {"label": LABELS.tolist()})
    assert {name.partition("/")[0] for name in sliced} == {"f1", "rows"}, "an area needs more than one class"
    remembered = Remembered(compute)
    remembered(given)
    assert len(remembered.resampled("0" * 16, 20)["auc"]) == 20


@pytest.mark.parametrize(
    ("entry", "value", "remedy"),
    [
        ("sklearn.metric:f1_score", "sklearn.metric", 'Did you mean "sklearn.metrics"?'),
        ("sklaern.metrics:f1_score", "sklaern", 'Did you mean "sklearn"?'),
        ("nowhere_at_all:f1_score", "nowhere_at_all", "Install the package"),
        ("sklearn.metrics:f1_scroe", "f1_scroe", 'Did you mean "f1_score"?'),
        ("somewhere:number", "somewhere:number", "Name a function"),
        ("subprocess:Popen", "subprocess:Popen", "y_true and y_pred"),
        ("os:system", "os:system", "y_true and y_pred"),
        ("somewhere:strange", "somewhere:strange", "y_true and y_pred"),
        ({"name": "sklearn.metrics:fbeta_score", "betta": 2}, "betta", 'Did you mean "beta"?'),
        ("sklearn.metrics:fbeta_score", "sklearn.metrics:fbeta_score", "beta"),
        ({"name": "torchmetrics.classification:MulticlassF1Score", "num_clases": 3}, None, "arguments"),
        ("somewhere:broken", "somewhere:broken", "arguments"),
        ("somewhere:by_class", "somewhere:by_class", "average: macro"),
        ("sklearn.metrics:f1_score", "sklearn.metrics:f1_score", "arguments"),  # of several classes it needs average
        (
            {"name": "torchmetrics.classification:MulticlassAUROC", "num_classes": 3},
            "torchmetrics.classification:MulticlassAUROC",
            "input: probabilities",
        ),
    ],
)
def test_what_cannot_be_imported_or_called_is_refused(entry: Any, value: str | None, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_named(read_metrics([entry]), EvalPrediction(SCORES, LABELS))
    assert caught.value.field == "evaluate.metrics"
    assert value is None or caught.value.value == value
    assert remedy in str(caught.value.remedy)


def test_nothing_is_called_to_find_out_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(sys.modules["somewhere"], "Danger", type("Danger", (), {"__init__": called.append}), False)
    with pytest.raises(ConfigError):
        measured("somewhere:Danger")
    assert called == []


def test_a_sample_without_all_classes_refuses_nothing_that_all_rows_allow() -> None:
    few: Any = EvalPrediction(SCORES[LABELS == 1], LABELS[LABELS == 1])
    require_named(read_metrics([{"name": "sklearn.metrics:roc_auc_score", "multi_class": "ovr"}]), few)
    negative: Any = EvalPrediction(-np.abs(PREDICTED), np.abs(TRUTH))  # as an untrained model may predict
    require_named(read_metrics(["sklearn.metrics:mean_squared_log_error"]), negative)
    with pytest.raises(ConfigError, match="neither scores"):
        require_named(read_metrics(["somewhere:both"]), EvalPrediction(np.zeros((2, 3, 4)), np.zeros((2, 3), int)))
    with pytest.raises(ConfigError, match="are numbers"):
        entry = {"name": "sklearn.metrics:max_error", "input": "scores"}
        require_named(read_metrics([entry]), EvalPrediction(PREDICTED, TRUTH))


@pytest.mark.parametrize(
    ("entry", "value", "remedy"),
    [
        ("f1_marco", "f1_marco", 'Did you mean "f1_macro"?'),
        ("sklearn.metrics.f1_score", "sklearn.metrics.f1_score", "Choose one of"),
        ("sklearn.metrics:f1-score", "sklearn.metrics:f1-score", "package.module:name"),
        ("sklearn..metrics:f1_score", "sklearn..metrics:f1_score", "package.module:name"),
        ({"name": "accuracy", "k": 2}, "k", "Remove it"),
        ({"name": "a:b", "input": "logits"}, "logits", "classes, probabilities, scores"),
        ({"name": "a:b", "as": "x/y"}, "x/y", "letters"),
        ({"as": "x"}, "{'as': 'x'}", "name"),
    ],
)
def test_entries_of_a_spec_are_read_without_an_import(entry: Any, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MetricCall.of(entry)
    assert (caught.value.field, str(caught.value.value)) == ("evaluate.metrics", value)
    assert remedy in str(caught.value.remedy)


def test_two_metrics_have_two_names() -> None:
    entries: list[Any] = ["sklearn.metrics:f1_score", {"name": "torchmetrics:f1_score"}]
    with pytest.raises(ConfigError, match="one name") as caught:
        read_metrics(entries)
    assert caught.value.value == "f1_score"
    assert [each.result for each in read_metrics([entries[0], {"name": "a:f1_score", "as": "other"}])][1] == "other"


def test_states_of_torchmetrics_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = torchmetrics.MeanSquaredError()
    monkeypatch.setattr(sys.modules["somewhere"], "mse", metric, False)
    found = [measured("somewhere:mse", outputs=PREDICTED, labels=TRUTH) for _ in range(2)]
    assert found[0] == found[1]
