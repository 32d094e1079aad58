"""Metrics by name and of packages: their values, the outputs that they suit, those of slices and resamples."""

from __future__ import annotations

import importlib
import sys
from math import exp, sqrt
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trainer_lib.base.metric_names import CLASS_METRICS, NUMBER_METRICS, MetricCall, read_metrics
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.metrics import NamedMetrics, measure_slices
from trainer_lib.evaluation.resamples import Remembered
from trainer_lib.protocol.requests import PreparedSplit
from trainer_lib.recipes import causal_language_modeling, preference_optimization
from trainer_lib.recipes.shared.targets import measure_classes, measure_numbers
from trainflow.flows.spec.checks import check_splits
from trainflow.flows.spec.spec import parse_spec

SEED = "0123456789abcdef" * 4


def sk() -> Any:
    return importlib.import_module("sklearn.metrics")  # seconds: not for every worker that collects this file


DRAW = np.random.default_rng(0)
LABELS = DRAW.integers(0, 3, 200)
SCORES = DRAW.normal(size=(200, 3)) + 1.5 * np.eye(3)[LABELS]
GUESSED = SCORES.argmax(axis=1)
PROBABILITIES = np.exp(SCORES) / np.exp(SCORES).sum(axis=1, keepdims=True)
TRUTH = DRAW.normal(size=200).astype(np.float32)
PREDICTED = TRUTH + 0.3 * DRAW.normal(size=200)


AREA = "torchmetrics.classification:MulticlassAUROC"


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


def measure(names: Any, outputs: Any, labels: Any) -> dict[str, float]:
    return measured(*names, outputs=outputs, labels=labels)


def require_named(calls: Any, given: Any) -> None:
    NamedMetrics(None, calls).require(given)


def test_functions_of_scikit_learn_get_the_best_class_or_the_probabilities() -> None:
    found = measured(
        "sklearn.metrics:cohen_kappa_score",
        {"name": "sklearn.metrics:fbeta_score", "as": "f2", "beta": 2, "average": "macro"},
        {"name": "sklearn.metrics:top_k_accuracy_score", "k": 2},
        "sklearn.metrics:log_loss",
        {"name": "sklearn.metrics:roc_auc_score", "multi_class": "ovr"},
        "accuracy",
    )
    assert found["cohen_kappa_score"] == pytest.approx(sk().cohen_kappa_score(LABELS, GUESSED))
    assert found["f2"] == pytest.approx(sk().fbeta_score(LABELS, GUESSED, beta=2, average="macro"))
    assert found["top_k_accuracy_score"] == pytest.approx(sk().top_k_accuracy_score(LABELS, SCORES, k=2))
    assert found["log_loss"] == pytest.approx(sk().log_loss(LABELS, PROBABILITIES))
    assert found["roc_auc_score"] == pytest.approx(sk().roc_auc_score(LABELS, PROBABILITIES, multi_class="ovr"))
    assert found["accuracy"] == pytest.approx((GUESSED == LABELS).mean())
    two = measured("sklearn.metrics:roc_auc_score", outputs=SCORES[:, :2], labels=LABELS % 2)
    assert two["roc_auc_score"] == pytest.approx(sk().roc_auc_score(LABELS % 2, SCORES[:, 1] - SCORES[:, 0]))


def test_classes_and_functions_of_torchmetrics() -> None:
    found = measured(
        {"name": "torchmetrics.classification:MulticlassF1Score", "num_classes": 3},
        {"name": AREA, "num_classes": 3, "input": "probabilities"},
        {"name": "torchmetrics.functional:accuracy", "task": "multiclass", "num_classes": 3},
        {"name": "torchmetrics:CohenKappa", "task": "multiclass", "num_classes": 3},
    )
    assert found["MulticlassF1Score"] == pytest.approx(sk().f1_score(LABELS, GUESSED, average="macro"), abs=1e-6)
    expected = sk().roc_auc_score(LABELS, PROBABILITIES, multi_class="ovr")
    assert found["MulticlassAUROC"] == pytest.approx(expected, abs=1e-6)
    assert found["accuracy"] == pytest.approx((GUESSED == LABELS).mean())
    assert found["CohenKappa"] == pytest.approx(sk().cohen_kappa_score(LABELS, GUESSED), abs=1e-6)


def test_numbers_are_given_as_they_are() -> None:
    names = ["sklearn.metrics:mean_absolute_percentage_error", "torchmetrics:SpearmanCorrCoef", "rmse"]
    pinball = {"name": "sklearn.metrics:d2_pinball_score", "alpha": 0.9}
    found = measured(*names, pinball, outputs=PREDICTED[:, None], labels=TRUTH)
    expected = sk().mean_absolute_percentage_error(TRUTH, PREDICTED)
    assert found["mean_absolute_percentage_error"] == pytest.approx(expected)
    expected = sk().d2_pinball_score(TRUTH, PREDICTED, alpha=0.9)
    assert found["d2_pinball_score"] == pytest.approx(expected)
    assert 0.9 < found["SpearmanCorrCoef"] <= 1


def test_objects_that_compute_of_predictions_and_references() -> None:
    right = float((GUESSED == LABELS).mean())
    assert measured("somewhere:matching") == {"matching": right}
    assert measured({"name": "somewhere:Matching", "as": "m", "scale": 2}) == {"m": pytest.approx(2 * right)}
    assert measured({"name": "somewhere:both", "as": "b"}) == {"b_right": 200 * right, "b_rows": 200.0}


def test_each_call_begins_anew_and_parts_that_cannot_be_measured_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(remembered.resampled(20)["auc"]) == 20
    torchmetrics = importlib.import_module("torchmetrics")  # two seconds that processes with other files need not pay
    monkeypatch.setattr(sys.modules["somewhere"], "mse", torchmetrics.MeanSquaredError(), False)
    first, again = (measured("somewhere:mse", outputs=PREDICTED, labels=TRUTH) for _ in range(2))
    assert first == again, "an object's state is not shared"


@pytest.mark.parametrize(
    ("entry", "value", "remedy"),
    [
        ("sklearn.metric:f1_score", "sklearn.metric", "correct the name"),
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
        ({"name": AREA, "num_classes": 3}, AREA, "input: probabilities"),
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


def test_metrics_of_classes_are_those_of_scikit_learn() -> None:
    found = measure(list(CLASS_METRICS), SCORES, LABELS)
    assert set(found) == set(CLASS_METRICS)
    assert found["accuracy"] == pytest.approx(sk().accuracy_score(LABELS, GUESSED))
    assert found["balanced_accuracy"] == pytest.approx(sk().balanced_accuracy_score(LABELS, GUESSED))
    assert found["f1_weighted"] == pytest.approx(sk().f1_score(LABELS, GUESSED, average="weighted"))
    assert found["log_loss"] == pytest.approx(sk().log_loss(LABELS, PROBABILITIES))
    assert found["f1_micro"] == pytest.approx(found["accuracy"])


def test_areas_are_those_of_scikit_learn_and_left_out_where_all_rows_are_of_one_class() -> None:
    names = ["roc_auc", "average_precision"]
    found = measure(names, SCORES, LABELS)
    assert found["roc_auc"] == pytest.approx(sk().roc_auc_score(LABELS, PROBABILITIES, multi_class="ovr"))
    assert found["average_precision"] == pytest.approx(sk().average_precision_score(LABELS, PROBABILITIES))
    two, is_second = SCORES[:, :2], (LABELS == 1).astype(int)
    assert measure(names, two, is_second)["roc_auc"] == pytest.approx(
        sk().roc_auc_score(is_second, two[:, 1] - two[:, 0])
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
    resampled = remembered.resampled(200)
    # A resample lacks the only row of its class in 36 % of the cases.
    assert 100 < len(resampled["roc_auc"]) < 160 < len(resampled["accuracy"]) == 200
    assert {"roc_auc_low", "accuracy_low"} <= set(remembered.intervals(resampled, 0.95))
    assert all(np.isfinite(each) for each in resampled["roc_auc"])


def test_named_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    for outputs in (PREDICTED, PREDICTED[:, None], (PREDICTED, "hidden states")):
        found = measure(list(NUMBER_METRICS), outputs, TRUTH)
        assert set(found) == set(NUMBER_METRICS)
        assert found["rmse"] == pytest.approx(sk().root_mean_squared_error(TRUTH, PREDICTED))
        assert found["r2"] == pytest.approx(sk().r2_score(TRUTH, PREDICTED))
        assert found["median_absolute_error"] == pytest.approx(sk().median_absolute_error(TRUTH, PREDICTED))
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
    prepared = dict.fromkeys(("train", "test"), PreparedSplit(rows=1, columns={"sex": "string", "age": "float64"}))
    with pytest.raises(ConfigError, match="rows of the split 'test' have no such column") as late:
        check_splits(found, prepared)
    assert late.value.remedy == 'Did you mean "sex"?'
    check_splits(parse_spec({**spec, "evaluate": {"slices": ["sex"]}}), prepared)


def _accuracy(p: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.asarray(p.predictions).argmax(-1) == p.label_ids).mean())}


def test_a_better_model_is_better_on_each_resample_of_the_rows() -> None:
    labels = np.random.default_rng(0).integers(0, 2, 50)
    good = np.eye(2)[labels]
    bad = good.copy()
    bad[:5] = bad[:5, ::-1]
    values = []
    for predictions in (good, bad):
        remembered = Remembered(_accuracy, SEED)
        assert remembered.resampled(20) == {}
        remembered(EvalPrediction(predictions, labels))
        values.append(remembered.resampled(20)["accuracy"])
        assert remembered.resampled(20)["accuracy"] == values[-1]
    assert values[0] == [1.0] * 20 and np.mean(values[1]) == pytest.approx(0.9, abs=0.03)
    assert len(set(values[1])) > 3


def test_an_interval_holds_the_share_of_the_resamples_that_is_asked_for() -> None:
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 2, 400)
    scores = np.eye(2)[np.where(draw.random(400) < 0.8, labels, 1 - labels)]
    remembered = Remembered(_accuracy, SEED)
    measured = remembered(EvalPrediction(scores, labels))["accuracy"]
    resampled = remembered.resampled(500)
    found = remembered.intervals(resampled, 0.95)
    # The standard error of a share of 0.8 of 400 rows is 0.02.
    assert found["accuracy_low"] == pytest.approx(measured - 0.04, abs=0.01)
    assert found["accuracy_high"] == pytest.approx(measured + 0.04, abs=0.01)
    narrow = remembered.intervals(resampled, 0.5)
    assert found["accuracy_low"] < narrow["accuracy_low"] < narrow["accuracy_high"] < found["accuracy_high"]
    assert remembered.intervals(resampled, None) == {}


def _classes(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    labels = draw.choice(4, rows, p=[0.27, 0.25, 0.24, 0.24])
    guessed = np.where(draw.random(rows) < 0.3, labels, draw.integers(0, 4, rows))
    return np.eye(4)[guessed], labels


def _numbers(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    labels = draw.normal(3.0, 2.0, rows)
    return labels + draw.gamma(2.0, 0.5, rows) - 1.0, labels


def _tokens(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = draw.integers(0, 500, (rows, 8))
    return np.stack((draw.gamma(40, 1.2, rows), np.full(rows, 8.0)), axis=1), tokens


def _preferences(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    return draw.normal(0, 1, (rows, 2)), (np.zeros(rows), draw.integers(1, 50, (rows, 4)).astype(float))


MEASURES: dict[str, Any] = {
    "classes": (_classes, lambda p: measure_classes(p.predictions, p.label_ids, p.whole_labels)),
    "numbers": (_numbers, lambda p: measure_numbers(p.predictions, p.label_ids, p.whole_labels)),
    "tokens": (_tokens, causal_language_modeling.compute_metrics),
    "preferences": (_preferences, preference_optimization.compute_metrics),
}


def _with_intervals(name: str, seed: int, rows: int, resamples: int) -> tuple[dict[str, float], dict[str, float]]:
    make, compute = MEASURES[name]
    remembered = Remembered(compute, f"{seed + 1_000_000:016x}")
    values = remembered(EvalPrediction(*make(np.random.default_rng(seed), rows)))
    return values, remembered.intervals(remembered.resampled(resamples), 0.95)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("rows", [12, 60, 300])
def test_a_value_lies_in_its_own_interval(name: str, rows: int) -> None:
    for seed in range(8):
        values, bounds = _with_intervals(name, seed, rows, 100)
        for metric, value in values.items():
            assert bounds[f"{metric}_low"] <= value <= bounds[f"{metric}_high"], (metric, seed)


@pytest.mark.parametrize(
    ("name", "rows", "resamples", "true"),
    [
        ("classes", 200, 100, {"accuracy": 0.3 + 0.7 / 4, "accuracy_over_majority": 0.3 + 0.7 / 4 - 0.27}),
        ("numbers", 200, 200, {"rmse": sqrt(0.5), "mae": 4 * exp(-2), "r2": 0.875, "rmse_below_mean": 2 - sqrt(0.5)}),
    ],
)
def test_ninety_five_of_a_hundred_intervals_hold_the_truth(
    name: str, rows: int, resamples: int, true: dict[str, float]
) -> None:
    held = dict.fromkeys(true, 0)
    for seed in range(400):
        _, bounds = _with_intervals(name, seed, rows, resamples)
        for metric, value in true.items():
            held[metric] += bounds[f"{metric}_low"] <= value <= bounds[f"{metric}_high"]
    assert all(0.93 <= count / 400 <= 0.97 for count in held.values()), held
