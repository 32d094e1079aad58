"""Metrics by name: of classes or of numbers, by scikit-learn where it has them; of all rows, and of slices of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer_lib.errors import ConfigError
from trainer_lib.evaluation.called_metrics import CalledMetric, Outputs
from trainer_lib.evaluation.nested import take_rows
from trainer_lib.metric_names import CLASS_METRICS, FIELD, NUMBER_METRICS, MetricCall
from trainer_lib.outputs import EvalPrediction

SLICES = "evaluate.slices"
MAX_SLICES = 50
MAX_INTERVALS = 20
"""Slices of a split that get intervals: each costs as many resamples as all rows do."""
_FEW = 10  # rows that say next to nothing when they are drawn again
_BINS = 15  # Guo et al., On calibration of modern neural networks, 2017


class NamedMetrics:
    """A `compute_metrics` that adds metrics by name to those of another one, whose own values stay.

    Args:
        compute_metrics: the recipe's function; None: it has none.
        calls: the metrics that the spec asks for.

    Raises:
        ConfigError: one of a package cannot be imported, or is not a metric.
    """

    def __init__(self, compute_metrics: Callable[..., Any] | None, calls: Iterable[MetricCall]) -> None:
        self._compute = compute_metrics
        given = list(calls)
        self._named = [call for call in given if call.module is None]
        self._names = [call.name for call in self._named]
        self._called = [CalledMetric(call) for call in given if call.module is not None]

    def __call__(self, p: EvalPrediction) -> dict[str, Any]:
        """Measure predictions and labels ``[rows, …]``. Raises ConfigError for metrics that do not suit them."""
        outputs = self._read(p)
        found = self._measure(outputs)
        for metric in self._called:
            found |= metric(outputs)
        return self._with_own(found, p)

    def of_part(self, p: EvalPrediction) -> dict[str, Any]:
        """Measure some of the rows, without those metrics of packages that cannot be measured on them."""
        outputs = self._read(p)
        found = self._measure(outputs)
        for metric in self._called:
            found |= metric.measure_part(outputs)
        return self._with_own(found, p)

    def require(self, p: EvalPrediction) -> None:
        """Raise ConfigError for metrics that could not be measured on outputs like these, whatever their values."""
        outputs = self._read(p)
        for metric in self._called:
            metric.require(outputs)

    def _read(self, p: EvalPrediction) -> Outputs:
        return _read_outputs(self._names, p.predictions, p.label_ids)

    def _measure(self, outputs: Outputs) -> dict[str, Any]:
        found = _measure_named(self._names, outputs)
        return {call.result: found[call.name] for call in self._named if call.name in found}

    def _with_own(self, found: Mapping[str, Any], p: EvalPrediction) -> dict[str, Any]:
        return {**found, **({} if self._compute is None else self._compute(p))}


def require_named(calls: Iterable[MetricCall], given: EvalPrediction) -> None:
    """Raise ConfigError for metrics that cannot be imported, or not be measured on outputs like the given ones."""
    NamedMetrics(None, calls).require(given)


def measure(names: Sequence[str], predictions: Any, labels: Any) -> dict[str, float]:
    """The metrics of these names.

    Args:
        names: of classes or of numbers, not of both.
        predictions: scores ``[rows, classes]``, or numbers ``[rows]`` or ``[rows, 1]``; of several outputs the first.
        labels: whole ones ``[rows]``, or numbers of the size of the predictions.

    Raises:
        ConfigError: a metric is of the other kind, or the outputs are neither.
    """
    return _measure_named(names, _read_outputs(names, predictions, labels))


def _read_outputs(names: Sequence[str], predictions: Any, labels: Any) -> Outputs:
    outputs, truth = (np.asarray(each[0] if isinstance(each, tuple) else each) for each in (predictions, labels))
    is_classes = outputs.ndim == 2 and truth.ndim == 1 and truth.dtype.kind in "iu" and outputs.shape[1] > 1
    is_numbers = outputs.size == truth.size == len(truth) and truth.dtype.kind == "f"
    known = CLASS_METRICS if is_classes else NUMBER_METRICS if is_numbers else {}
    wrong = next((name for name in names if name not in known), None)
    shapes = f"outputs {list(outputs.shape)} and labels {list(truth.shape)} of {truth.dtype}"
    if wrong is not None:
        fitting = f"These are for them: {', '.join(known)}." if known else "Write compute_metrics in the recipe."
        raise ConfigError(f"This metric is not for {shapes}.", field=FIELD, value=wrong, remedy=fitting)
    if is_classes:
        return Outputs(truth, scores=outputs.astype(np.float64))
    if is_numbers:
        return Outputs(truth.reshape(-1).astype(np.float64), numbers=outputs.reshape(-1).astype(np.float64))
    what = f"Metrics by name are neither scores of classes nor one number a row: {shapes}."
    raise ConfigError(what, field=FIELD, remedy="Write compute_metrics in the recipe.")


def _measure_named(names: Sequence[str], outputs: Outputs) -> dict[str, float]:
    if not names:
        return {}
    if outputs.scores is not None:
        return _of_classes(names, outputs.scores, outputs.labels)
    return _of_numbers(names, np.asarray(outputs.numbers), outputs.labels)


def measure_slices(
    compute: Callable[[EvalPrediction], Mapping[str, Any]],
    given: EvalPrediction,
    columns: Mapping[str, Iterable[Any]],
    bounds: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """The metrics of the rows that have one value in a column, as ``<metric>/<column>/<value>``, for each value.

    Args:
        compute: what measured all rows.
        given: predictions and labels of all rows, trees of arrays ``[rows, …]``.
        columns: column -> its value in each row.
        bounds: gives the ends of the intervals of some rows' metrics, `<metric>_low` and `<metric>_high`; asked for up
            to 20 slices in all, each of 10 rows or more. None: no intervals.

    Raises:
        ConfigError: a column has more than 50 different values.
    """
    measure_part = getattr(compute, "of_part", compute)
    found: dict[str, float] = {}
    slices = {column: find_slices(column, values) for column, values in columns.items()}
    if sum(map(len, slices.values())) > MAX_INTERVALS:
        bounds = None
    for column, places in slices.items():
        for value, rows in sorted(places.items()):
            part = take_rows(given, np.array(rows))
            measured = {**measure_part(part), "rows": len(rows)}
            if bounds is not None and len(rows) >= _FEW:
                measured |= bounds(part)
            numbers = {name: each for name, each in measured.items() if isinstance(each, int | float | np.number)}
            found |= {f"{name}/{column}/{value}": float(each) for name, each in numbers.items()}
    return found


def find_slices(column: str, values: Iterable[Any], *, split: str | None = None) -> dict[str, list[int]]:
    """The rows of each value of a column, by the value as the names of metrics have it.

    Args:
        split: whose rows these are, for the error.

    Raises:
        ConfigError: the column has more than 50 different values; read no further than that.
    """
    places: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        places.setdefault(re.sub(r"[^\w .:-]", "_", str(value)), []).append(row)
        if len(places) > MAX_SLICES:
            whose = "" if split is None else f" of the split '{split}'"
            raise ConfigError(
                f"The column{whose} has more than {MAX_SLICES} different values, the most that slices can have.",
                field=SLICES,
                value=column,
                remedy="Name a column of few values.",
            )
    return places


def _of_classes(names: Sequence[str], scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from sklearn import metrics

    guessed = scores.argmax(axis=1)
    shifted = scores - scores.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    def averaged(function: Callable[..., Any], average: str) -> Callable[[], Any]:
        return lambda: function(labels, guessed, average=average, zero_division=0)

    def ranked(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: _of_ranks(function, np.exp(logs), labels)

    table: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: (guessed == labels).mean(),
        "balanced_accuracy": lambda: np.mean([(guessed[labels == one] == one).mean() for one in np.unique(labels)]),
        "f1_macro": averaged(metrics.f1_score, "macro"),
        "f1_micro": averaged(metrics.f1_score, "micro"),
        "f1_weighted": averaged(metrics.f1_score, "weighted"),
        "precision_macro": averaged(metrics.precision_score, "macro"),
        "recall_macro": averaged(metrics.recall_score, "macro"),
        "matthews": lambda: metrics.matthews_corrcoef(labels, guessed),
        "log_loss": lambda: -logs[np.arange(len(labels)), labels].mean(),
        "roc_auc": ranked(metrics.roc_auc_score),
        "average_precision": ranked(metrics.average_precision_score),
        "calibration_error": lambda: _calibration_error(np.exp(logs.max(axis=1)), guessed == labels),
    }
    found = {name: table[name]() for name in names}
    return {name: float(value) for name, value in found.items() if value is not None}


def _of_ranks(function: Callable[..., Any], probabilities: np.ndarray, labels: np.ndarray) -> float | None:
    """A metric of the second of two classes, or the mean over classes; None where no class has rows beside others.

    Args:
        function: takes whether each row is of the class ``[rows]``, and its probability ``[rows]``.
    """
    classes = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    of_class = ((labels == each, probabilities[:, each]) for each in classes)
    values = [float(function(is_one, scores)) for is_one, scores in of_class if 0 < is_one.sum() < len(labels)]
    return float(np.mean(values)) if values else None


def _calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, confidence, _BINS) - np.bincount(bins, right, _BINS)
    return float(np.abs(gaps).sum() / len(right))


def _of_numbers(names: Sequence[str], predicted: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    error = predicted - truth
    spread = ((truth - truth.mean()) ** 2).sum()
    table: dict[str, Callable[[], Any]] = {
        "rmse": lambda: np.sqrt((error**2).mean()),
        "mae": lambda: np.abs(error).mean(),
        "median_absolute_error": lambda: np.median(np.abs(error)),
        "max_error": lambda: np.abs(error).max(),
        "r2": lambda: 1 - (error**2).sum() / spread if spread > 0 else 0.0,
        "bias": lambda: error.mean(),
    }
    return {name: float(table[name]()) for name in names}
