"""Metrics of installed packages, imported by a dotted name: functions, metrics with a state, objects that compute.

function       (y_true, y_pred), (preds, target), (predictions, references), by the names of its parameters
class, object  update(preds, target), compute(), reset(), as those of torchmetrics
object         compute(predictions=…, references=…), as those of the package evaluate
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch

from trainer_lib.errors import ConfigError, first_line
from trainer_lib.evaluation.metrics import is_metric_object, without_synchronization
from trainer_lib.metric_names import FIELD, MetricCall
from trainer_lib.suggestions import nearest

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
    """What metrics are measured on.

    Attributes:
        labels: whole ones ``[rows]``, or numbers ``[rows]``.
        scores: of the classes ``[rows, classes]``; None: the outputs are numbers.
        numbers: the outputs ``[rows]``; None: they are scores.
    """

    labels: np.ndarray
    scores: np.ndarray | None = None
    numbers: np.ndarray | None = None

    def give(self, what: str, *, single: bool) -> np.ndarray:
        """The predictions as a metric gets them: ``[rows]``, or ``[rows, classes]`` of probabilities and scores.

        Args:
            what: one of `trainer_lib.metric_names.INPUTS`; numbers are given as they are.
            single: of two classes only the second is given.
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
        """Outputs of this kind that every metric should be able to measure: each class has rows, numbers are right."""
        if self.scores is None:
            return Outputs(self.labels, numbers=self.labels)
        classes = self.scores.shape[1]
        if classes > _MOST_CLASSES:
            return self
        labels = np.tile(np.arange(classes), 4)
        return Outputs(labels, scores=np.random.default_rng(0).normal(size=(len(labels), classes)))


class CalledMetric:
    """One metric of a package.

    Raises:
        ConfigError: it cannot be imported, is not a metric, or does not take its arguments.
    """

    def __init__(self, call: MetricCall) -> None:
        self._call = call
        target = _import(call)
        self._given = call.given or ("probabilities" if call.name in _PROBABILITIES else None)
        self._uses_tensors = False
        self._measure: Callable[[Any, Any], Any]
        if is_metric_object(target):
            self._measure = self._of_states(self._make(target))
        elif callable(getattr(target, "compute", None)):
            self._measure = self._of_computing(target() if isinstance(target, type) else target)
        elif callable(target) and not isinstance(target, type):
            self._measure = self._of_function(target)
        else:
            kind = "class" if isinstance(target, type) else type(target).__name__
            remedy = f"Name a function of {_NAMES}, or a metric with update, compute and reset."
            raise self._refusal(f"The name is that of a {kind}, which is not a metric.", remedy)

    def __call__(self, outputs: Outputs) -> dict[str, float]:
        """Measure all rows.

        Raises:
            ConfigError: the metric raised an error, or did not return numbers.
        """
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
            with without_synchronization(metric):
                value = metric.compute()
            metric.reset()
            return value

        return measure

    def _of_computing(self, metric: Any) -> Callable[[Any, Any], Any]:
        self._check_arguments(metric.compute, {"predictions", "references"})
        return lambda given, labels: metric.compute(predictions=given, references=labels, **self._call.arguments)

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
        return {f"{result}_{name}": self._number(each) for name, each in value.items()}

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
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise _no_such_module(error.name) from error
        raise _not_imported(module, error) from error
    except Exception as error:
        raise _not_imported(module, error) from error
    target = getattr(found, name, None)
    if target is None:
        near = nearest(name, [each for each in dir(found) if not each.startswith("_")])
        remedy = f"Name a function or a class of {module}." if near is None else f'Did you mean "{near}"?'
        raise ConfigError(f"The module {module} has no such name.", field=FIELD, value=name, remedy=remedy)
    return target


def _not_imported(module: str, error: Exception) -> ConfigError:
    what = f"The module cannot be imported ({type(error).__name__}: {first_line(error)})."
    return ConfigError(what, field=FIELD, value=module, remedy="Install what it needs, or name another metric.")


def _no_such_module(name: str) -> ConfigError:
    parent, _, last = name.rpartition(".")
    if parent:
        beside = [each.name for each in pkgutil.iter_modules(getattr(importlib.import_module(parent), "__path__", ()))]
    else:
        beside = list(metadata.packages_distributions())
    near = nearest(last, beside)
    full = f"{parent}.{near}" if parent else near
    remedy = (
        "Install the package where the stages run, or correct the name." if near is None else f'Did you mean "{full}"?'
    )
    return ConfigError("There is no such module.", field=FIELD, value=name, remedy=remedy)
