"""The metrics that a spec asks for (`evaluate.metrics`): by name, or of packages. Nothing heavy is imported here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

CLASS_METRICS = {
    "accuracy": "share of rows whose best class is the label",
    "balanced_accuracy": "mean of the classes' recalls",
    "f1_macro": "mean of the classes' F1",
    "f1_micro": "F1 over all rows",
    "f1_weighted": "mean of the classes' F1, by their rows",
    "precision_macro": "mean of the classes' precisions",
    "recall_macro": "mean of the classes' recalls, where classes without rows count as 0",
    "matthews": "Matthews' correlation coefficient",
    "log_loss": "mean negative log-likelihood of the labels, in nats",
    "roc_auc": "area under the ROC curve; of several classes the mean of each against the others",
    "average_precision": "area under precision over recall, likewise",
    "calibration_error": "mean distance of confidence and accuracy, over 15 equal bins of the confidence",
}
"""Metrics of scores ``[rows, classes]`` and whole labels ``[rows]``. `roc_auc` and `average_precision` are of classes
that some rows have and others have not; where all rows are of one class they are left out."""
NUMBER_METRICS = {
    "rmse": "root of the mean squared error",
    "mae": "mean absolute error",
    "median_absolute_error": "median of the absolute errors",
    "max_error": "the largest absolute error",
    "r2": "share of the label's variance that is explained",
    "bias": "mean of prediction minus label",
}
"""Metrics of numbers ``[rows]`` and labels of that size."""
NAMES = (*CLASS_METRICS, *NUMBER_METRICS)
_LESS_IS_BETTER = {"log_loss", "calibration_error", "rmse", "mae", "median_absolute_error", "max_error"}
_ENDINGS_OF_LESS = ("loss", "error", "rmse", "mse", "mae", "mase", "perplexity", "nats_per_token")

FIELD = "evaluate.metrics"
INPUTS = ("classes", "probabilities", "scores")
"""Inputs of a package's metric made from scores: the best class, the softmax, or the scores themselves."""
_DOTTED = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")
_RESULT = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def is_less_better(name: str) -> bool:
    """Whether less is better of a metric, as far as its name says it: of losses and errors."""
    return name in _LESS_IS_BETTER or name.endswith(_ENDINGS_OF_LESS)


@dataclass(frozen=True)
class Benchmark:
    """A task of lm-eval, or a file or folder of tasks, with what replaces its own settings; None: those stay.

    `limit`: rows, at most; `chat`: prompts are conversations by the tokenizer's template.
    """

    task: str
    fewshot: int | None = None
    limit: int | None = None
    chat: bool = False


@dataclass(frozen=True)
class MetricCall:
    """A metric as a spec asks for it."""

    name: str  # one of `NAMES`, or ``package.module:Name``
    result: str  # what its value is called among the metrics
    # One of `INPUTS`; None: the best class, unless the metric's parameters are named otherwise.
    given: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: str | Mapping[str, Any]) -> MetricCall:
        """The metric of an entry of a spec: a name, or a mapping with `name`, `as`, `input` and arguments."""
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise _refusal("A metric is a name, or a mapping with a name.", value, "Write {name: …, as: …}.")
        arguments = {str(key): argument for key, argument in value.items() if key not in ("name", "as", "input")}
        name, given = value["name"], value.get("input")
        dotted = _DOTTED.fullmatch(name)
        if dotted is None and name not in NAMES:
            hint = "Write the function of a package as package.module:name."
            raise _refusal("No metric has this name.", name, hint if ":" in name else suggestion(name, NAMES))
        if dotted is None and (arguments or given is not None):
            first = next(iter(arguments), "input")
            raise _refusal(f"The metric {name} takes no arguments.", first, "Remove it, or call a package's function.")
        if given is not None and given not in INPUTS:
            raise _refusal("A metric is given something else.", given, suggestion(str(given), INPUTS))
        result = value.get("as") or (name if dotted is None else dotted["name"])
        if not isinstance(result, str) or not _RESULT.fullmatch(result):
            raise _refusal("A metric cannot be called this.", result, "Use letters, digits and '_'.")
        return cls(name, result, given, arguments)

    @property
    def module(self) -> str | None:
        """The module that it is imported from; None for one of `NAMES`."""
        found = _DOTTED.fullmatch(self.name)
        return None if found is None else found["module"]


def read_metrics(values: Iterable[str | Mapping[str, Any]]) -> tuple[MetricCall, ...]:
    """The metrics of a spec. Raises ConfigError for what is not one, and for two of one name among the results."""
    calls = tuple(map(MetricCall.of, values))
    seen: set[str] = set()
    for call in calls:
        if call.result in seen:
            raise _refusal("Two metrics have one name.", call.result, "Give one of them another: {name: …, as: …}.")
        seen.add(call.result)
    return calls


def _refusal(what: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(what, field=FIELD, value=value, remedy=remedy)
