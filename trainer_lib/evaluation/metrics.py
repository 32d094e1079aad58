"""`compute_metrics` in its forms, and metrics by name; results are checked numbers.

function         compute_metrics(p), once with all rows, or batch by batch with `batch_eval_metrics`
object           update(preds, target), compute(), reset(), as those of torchmetrics

Metrics by name are of classes or of numbers, by scikit-learn where it has them; of all rows, and of slices of them.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer_lib.base.metric_names import CLASS_METRICS, FIELD, NUMBER_METRICS, MetricCall
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.base.suggestions import nearest
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import ConfigError, TrainflowError, first_line, from_exception
from trainer_lib.evaluation import nested


class BatchMetrics:
    """A metric that takes batches of CPU tensors, on rank 0, and keeps no predictions.

    `metric` is an object, or a function that takes `compute_result`, whose last call returns the metrics of all. An
    error of it is kept until `finish`, where all ranks raise it, unless this process is `alone`.
    """

    def __init__(self, metric: Any, *, alone: bool) -> None:
        self._metric = metric
        self._alone = alone
        self._failure: Exception | None = None
        self._result: Any = {}

    def add(self, batch: Mapping[str, Any], *, last: bool) -> None:
        """Pass one batch on: trees of CPU tensors ``[batch, …]`` under "logits", "labels", "inputs" and "losses"."""
        if self._failure is not None:
            return
        metric, logits, labels = self._metric, batch["logits"], batch["labels"]
        try:
            if is_metric_object(metric):
                # A metric that was moved to the GPU takes no CPU tensors.
                device = getattr(metric, "device", "cpu")
                metric.update(*(nested.map_tree(lambda leaf: leaf.to(device), tree) for tree in (logits, labels)))
                value = compute_and_reset(metric) if last else {}
                self._result = value if isinstance(value, Mapping) else {type(metric).__name__: value}
            else:
                given = EvalPrediction(logits, labels, inputs=batch["inputs"], losses=batch["losses"])
                result = metric(given, compute_result=last)
                self._result = result if last else {}
        except Exception as error:
            # Raised here, it would leave the other ranks waiting in the next gather.
            if self._alone:
                raise
            self._failure = error

    def finish(self) -> Any:
        """Return the metrics of all batches, or raise what the user's code raised."""
        if self._failure is not None:
            raise self._failure
        return self._result


def is_metric_object(metric: Any) -> bool:
    """Whether a metric has `update`, `compute` and `reset`, so that it is not called as a function."""
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def compute_and_reset(metric: Any) -> Any:
    """The value of a metric object, which is empty then; torchmetrics gathers no states: rank 0 has all batches."""
    modules = list(metric.modules()) if isinstance(metric, torch.nn.Module) else []
    parts: list[Any] = [part for part in modules if hasattr(part, "distributed_available_fn")]
    before = [part.distributed_available_fn for part in parts]
    for part in parts:
        part.distributed_available_fn = lambda: False
    try:
        value = metric.compute()
    finally:
        for part, function in zip(parts, before, strict=True):
            part.distributed_available_fn = function
    metric.reset()
    return value


def compute_on_rank_zero(comm: Communicator, compute: Callable[[], dict[str, Any]]) -> dict[str, float]:
    """Call `compute` on rank 0; return its numbers, or raise its error, on every rank. Collective."""
    metrics: dict[str, float] = {}
    failure: TrainflowError | None = None
    if comm.rank == 0:
        try:
            metrics = parse_metrics(compute())
        except Exception as error:
            # Alone, the user's own exception passes through, with its type.
            if comm.world_size == 1:
                raise
            failure = from_exception(error, rank=0)
    comm.agree(failure)
    result: dict[str, float] = comm.broadcast_json(metrics)
    return result


def parse_metrics(metrics: Any) -> dict[str, float]:
    """Metrics as plain numbers, also of arrays and tensors of one element ``[]`` or ``[1]``. Raises ConfigError."""
    if not isinstance(metrics, Mapping):
        what = "The function did not return a mapping of names to numbers."
        remedy = 'Return for example {"accuracy": 0.9}.'
        raise ConfigError(what, field="compute_metrics", value=type(metrics).__name__, remedy=remedy)
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        numbers[str(name)] = number = to_json_value(value)
        if not isinstance(number, bool | int | float):
            what = f"The function did not return a number for {str(name)!r}."
            remedy = "Return one number per name; files and tables belong in a callback."
            shown = value if isinstance(value, str) else type(value).__name__
            raise ConfigError(what, field="compute_metrics", value=shown, remedy=remedy)
    return numbers


def to_json_value(value: Any) -> Any:
    """A tensor or an array of one element ``[]`` or ``[1]`` as a number, any other as a list; the rest as it is."""
    if not isinstance(value, torch.Tensor | np.generic | np.ndarray):
        return value
    return value.item() if math.prod(value.shape) == 1 else value.tolist()


# Metrics of installed packages, imported by a dotted name:
#
#     function         (y_true, y_pred), (preds, target), (predictions, references), by the names of its parameters
#     class, object    update(preds, target), compute(), reset(), as those of torchmetrics
#     object           compute(predictions=…, references=…), as those of the package evaluate


_TRUTH = {"y_true", "labels_true", "y1", "target", "targets", "references"}
_GIVEN = {  # name of the parameter that takes predictions -> what it is given of scores, unless the spec says it
    **dict.fromkeys(("y_pred", "labels_pred", "y2", "preds", "predictions"), "classes"),
    **dict.fromkeys(("y_score", "y_scores", "y_proba", "y_prob"), "probabilities"),
    "pred_decision": "scores",
}
_TENSORS = {"torchmetrics", "torcheval"}
_PROBABILITIES = {"sklearn.metrics:log_loss"}  # its parameter was called y_pred
_MOST_CLASSES = 1000
_NAMES = "y_true and y_pred, target and preds, or references and predictions"


@dataclass(frozen=True)
class Outputs:
    """The inputs of metrics."""

    labels: np.ndarray  # whole ones [rows], or numbers [rows]
    scores: np.ndarray | None = None  # of the classes [rows, classes]; None: the outputs are numbers
    numbers: np.ndarray | None = None  # the outputs [rows]; None: they are scores

    def give(self, what: str, *, single: bool) -> np.ndarray:
        """The predictions as a metric gets them: ``[rows]``, or ``[rows, classes]`` of probabilities and scores.

        `what`: one of `trainer_lib.base.metric_names.INPUTS`; numbers stay. `single`: the second of two classes alone.
        """
        if self.scores is None:
            return np.asarray(self.numbers)
        if what == "classes":
            return np.asarray(self.scores.argmax(axis=1))
        shifted = self.scores - self.scores.max(axis=1, keepdims=True)
        found = self.scores
        if what == "probabilities":
            found = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
        if not single or found.shape[1] != 2:
            return found
        return np.asarray(found[:, 1] if what == "probabilities" else found[:, 1] - found[:, 0])

    def completed(self) -> Outputs:
        """Outputs of this kind that any metric should be able to measure: all classes have rows, numbers are right."""
        if self.scores is None:
            return Outputs(self.labels, numbers=self.labels)
        classes = self.scores.shape[1]
        if classes > _MOST_CLASSES:
            return self
        labels = np.tile(np.arange(classes), 4)
        return Outputs(labels, scores=np.random.default_rng(0).normal(size=(len(labels), classes)))


class CalledMetric:
    """One metric of a package. Raises ConfigError."""

    def __init__(self, call: MetricCall) -> None:
        self._call = call
        target = _import(call)
        self._given = call.given or ("probabilities" if call.name in _PROBABILITIES else None)
        self._uses_tensors = False
        self._measure: Callable[[Any, Any], Any]
        if is_metric_object(target):
            self._measure = self._of_states(self._make(target))
        elif callable(getattr(target, "compute", None)):
            metric = target() if isinstance(target, type) else target
            self._check_arguments(metric.compute, {"predictions", "references"})
            arguments = call.arguments
            self._measure = lambda given, labels: metric.compute(predictions=given, references=labels, **arguments)
        elif callable(target) and not isinstance(target, type):
            self._measure = self._of_function(target)
        else:
            kind = "class" if isinstance(target, type) else type(target).__name__
            remedy = f"Name a function of {_NAMES}, or a metric with update, compute and reset."
            raise self._refusal(f"The name is that of a {kind}, which is not a metric.", remedy)

    def __call__(self, outputs: Outputs) -> dict[str, float]:
        """Measure all rows. Raises ConfigError if the metric raises an error, or does not return numbers."""
        if outputs.scores is None and self._call.given is not None:
            what = "The outputs are numbers, of which there is one kind."
            raise ConfigError(what, field=FIELD, value=self._call.given, remedy="Remove input.")
        try:
            value = self._value(outputs)
        except Exception as error:
            kinds = "" if outputs.scores is None else ", or say what it is given (input: probabilities)"
            what = f"The metric raised {type(error).__name__}: {first_line(error)}"
            raise self._refusal(f"{what.removesuffix('.')}.", f"Correct its arguments{kinds}.") from error
        return self._numbers(value)

    def measure_part(self, outputs: Outputs) -> dict[str, float]:
        """Measure some of the rows; nothing where the metric cannot, because it needs what these rows have not."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it was measured on all rows before
                found = self._numbers(self._value(outputs))
        except Exception:
            return {}
        return {name: value for name, value in found.items() if np.isfinite(value)}

    def require(self, outputs: Outputs) -> None:
        """Raise ConfigError for a metric that can measure neither these outputs nor any others of their kind."""
        try:
            self(outputs)
        except ConfigError as refused:
            try:
                self(outputs.completed())
            except ConfigError:
                raise refused from None

    def _value(self, outputs: Outputs) -> Any:
        name = self._call.name.rpartition(":")[2]
        is_binary = name.lower().startswith("binary") or self._call.arguments.get("task") == "binary"
        single = is_binary or not self._uses_tensors
        predictions, labels = outputs.give(self._given or "classes", single=single), outputs.labels
        if self._uses_tensors:
            return self._measure(torch.from_numpy(predictions), torch.from_numpy(labels))
        return self._measure(predictions, labels)

    # -- what it is ---------------------------------------------------------------------------------------------------

    def _make(self, target: Any) -> Any:
        if not isinstance(target, type):
            if self._call.arguments:
                first = next(iter(self._call.arguments))
                raise self._refusal("The metric is made already, and takes no arguments.", "Remove it.", first)
            return target
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some say that they keep all rows, which are in memory here anyway
                return target(**self._call.arguments)
        except Exception as error:
            known = ", ".join(_parameters(target))
            raise self._refusal(f"{first_line(error)}", f"Correct its arguments ({known}).") from error

    def _of_states(self, metric: Any) -> Callable[[Any, Any], Any]:
        self._uses_tensors = True

        def measure(predictions: Any, labels: Any) -> Any:
            metric.reset()
            metric.update(predictions, labels)
            return compute_and_reset(metric)

        return measure

    def _of_function(self, function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        names = _parameters(function)
        truth = next((name for name in names if name in _TRUTH), None)
        given = next((name for name in names if name in _GIVEN), None)
        if truth is None or given is None:
            what = f"The function takes {', '.join(names) or 'nothing that is known'}, and no predictions and labels."
            raise self._refusal(what, f"Name one whose parameters are {_NAMES}.")
        self._check_arguments(function, {truth, given})
        self._given = self._given or _GIVEN[given]
        self._uses_tensors = given == "preds" or str(self._call.module).partition(".")[0] in _TENSORS
        return lambda predictions, labels: function(**{truth: labels, given: predictions}, **self._call.arguments)

    def _check_arguments(self, function: Callable[..., Any], given: set[str]) -> None:
        arguments = self._call.arguments
        known = [name for name in _parameters(function) if name not in given]
        signature = inspect.signature(function)
        try:
            signature.bind(**dict.fromkeys(given), **arguments)
        except TypeError as error:
            unknown = next((name for name in arguments if name not in known), None)
            near = None if unknown is None else nearest(unknown, known)
            remedy = f"Give its arguments: {', '.join(known)}." if near is None else f'Did you mean "{near}"?'
            what = f"The metric cannot be called like this: {first_line(error)}."
            raise self._refusal(what, remedy, unknown) from error

    # -- what it gives ------------------------------------------------------------------------------------------------

    def _numbers(self, value: Any) -> dict[str, float]:
        result = self._call.result
        if not isinstance(value, Mapping):
            return {result: self._number(value)}
        if len(value) == 1:
            return {result: self._number(next(iter(value.values())))}
        return {f"{result}_{name}": self._number(number) for name, number in value.items()}

    def _number(self, value: Any) -> float:
        found = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        if found.size != 1 or found.dtype.kind not in "biuf":
            what = f"The metric returned {type(value).__name__} of shape {list(found.shape)}, and not one number."
            raise self._refusal(what, "Give arguments with which it returns one, such as average: macro.")
        return float(found.item())

    def _refusal(self, what: str, remedy: str, value: str | None = None) -> ConfigError:
        return ConfigError(what, field=FIELD, value=self._call.name if value is None else value, remedy=remedy)


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters; none where they cannot be known."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _import(call: MetricCall) -> Any:
    module, _, name = call.name.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        what = f"The module cannot be imported ({type(error).__name__}: {first_line(error)})."
        remedy = "Install the package where the stages run, or correct the name."
        raise ConfigError(what, field=FIELD, value=module, remedy=remedy) from error
    target = getattr(found, name, None)
    if target is None:
        near = nearest(name, [known for known in dir(found) if not known.startswith("_")])
        remedy = f"Name a function or a class of {module}." if near is None else f'Did you mean "{near}"?'
        raise ConfigError(f"The module {module} has no such name.", field=FIELD, value=name, remedy=remedy)
    return target


SLICES = "evaluate.slices"
MAX_SLICES = 50
MAX_INTERVALS = 20  # slices of a split that get intervals: one costs as many resamples as all rows do
_FEW = 10  # rows that say next to nothing when they are drawn again
_BINS = 15  # Guo et al., On calibration of modern neural networks, 2017


class NamedMetrics:
    """A `compute_metrics` that adds metrics by name to those of another one, whose own stay. Raises ConfigError."""

    def __init__(self, compute_metrics: Callable[..., Any] | None, calls: Iterable[MetricCall]) -> None:
        self._compute = compute_metrics
        given = list(calls)
        self._named = [call for call in given if call.module is None]
        self._names = [call.name for call in self._named]
        self._called = [CalledMetric(call) for call in given if call.module is not None]

    def __call__(self, p: EvalPrediction) -> dict[str, Any]:
        """Measure predictions and labels ``[rows, …]``. Raises ConfigError for metrics that do not suit them."""
        return self._measure(p, CalledMetric.__call__)

    def of_part(self, p: EvalPrediction) -> dict[str, Any]:
        """Measure some of the rows, without those metrics of packages that cannot be measured on them."""
        return self._measure(p, CalledMetric.measure_part)

    def require(self, p: EvalPrediction) -> None:
        """Raise ConfigError for metrics that could not be measured on outputs like these, whatever their values."""
        outputs = _read_outputs(self._names, p.predictions, p.label_ids)
        for metric in self._called:
            metric.require(outputs)

    def _measure(
        self, p: EvalPrediction, call: Callable[[CalledMetric, Outputs], Mapping[str, float]]
    ) -> dict[str, Any]:
        outputs = _read_outputs(self._names, p.predictions, p.label_ids)
        values: dict[str, float] = {}
        if self._names and outputs.scores is not None:
            values = _of_classes(self._names, outputs.scores, outputs.labels)
        elif self._names:
            values = _of_numbers(self._names, np.asarray(outputs.numbers), outputs.labels)
        measured: dict[str, Any] = {call.result: values[call.name] for call in self._named if call.name in values}
        for metric in self._called:
            measured |= call(metric, outputs)
        return {**measured, **({} if self._compute is None else self._compute(p))}


def _read_outputs(names: Sequence[str], predictions: Any, labels: Any) -> Outputs:
    outputs, truth = (
        np.asarray(values[0] if isinstance(values, tuple) else values) for values in (predictions, labels)
    )
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


def measure_slices(
    compute: Callable[[EvalPrediction], Mapping[str, Any]],
    given: EvalPrediction,
    columns: Mapping[str, Iterable[Any]],
    bounds: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """The metrics of the rows that share a value in a column, as ``<metric>/<column>/<value>``. Raises ConfigError.

    `given` are predictions and labels of all rows, trees of arrays ``[rows, …]``; `columns` a column's values in the
    rows. `bounds` gives the ends of the intervals of some rows' metrics, `<metric>_low` and `<metric>_high`; it is
    asked for up to 20 slices in all, of 10 rows or more.
    """
    measure_part = getattr(compute, "of_part", compute)
    found: dict[str, float] = {}
    slices = {column: find_slices(column, values) for column, values in columns.items()}
    if sum(map(len, slices.values())) > MAX_INTERVALS:
        bounds = None
    for column, places in slices.items():
        for value, rows in sorted(places.items()):
            part = nested.take_rows(given, np.array(rows))
            measured = {**measure_part(part), "rows": len(rows)}
            if bounds is not None and len(rows) >= _FEW:
                measured |= bounds(part)
            numbers = {name: number for name, number in measured.items() if isinstance(number, int | float | np.number)}
            found |= {f"{name}/{column}/{value}": float(number) for name, number in numbers.items()}
    return found


def find_slices(column: str, values: Iterable[Any], *, split: str | None = None) -> dict[str, list[int]]:
    """The rows of a column's values, by the value as the names of metrics have it.

    Raises ConfigError, which names the `split`, at the 51st different value; no further is read.
    """
    places: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        places.setdefault(re.sub(r"[^\w .:-]", "_", str(value)), []).append(row)
        if len(places) > MAX_SLICES:
            whose = "" if split is None else f" of the split '{split}'"
            what = f"The column{whose} has more than {MAX_SLICES} different values, the most that slices can have."
            raise ConfigError(what, field=SLICES, value=column, remedy="Name a column of few values.")
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
        "balanced_accuracy": lambda: np.mean([(guessed[labels == cls] == cls).mean() for cls in np.unique(labels)]),
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
    """A metric of the second of two classes, or the mean over classes; None where only one class has rows.

    `function` takes whether rows are of the class ``[rows]``, and its probabilities ``[rows]``.
    """
    classes = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    of_class = ((labels == number, probabilities[:, number]) for number in classes)
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
