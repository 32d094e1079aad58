"""How a list of runs is narrowed and sorted: `--since 7d`, `--metric "test_accuracy>=0.9"`, `--sort -test_accuracy`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flows.past_runs import PastRun
from trainer_lib.durations import UNITS
from trainer_lib.errors import ConfigError
from trainer_lib.suggestions import suggestion

if TYPE_CHECKING:
    from flows.run_status import RunStatus

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_CONDITION = re.compile(r"\s*([^<>=!\s]+)\s*(>=|<=|==|!=|>|<|=)\s*(\S+)\s*")
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_FIELDS = ("started", "name", "state", "seconds")


@dataclass(frozen=True)
class Filter:
    """A condition on one metric; a run without the metric does not fit."""

    name: str
    comparison: str
    value: float

    def accepts(self, metrics: Mapping[str, float]) -> bool:
        """Whether a run with these metrics fits."""
        return self.name in metrics and _COMPARISONS[self.comparison](metrics[self.name], self.value)


def parse_filter(text: str) -> Filter:
    """The condition that a text like ``test_accuracy>=0.9`` states.

    Raises:
        ConfigError: it states none.
    """
    match = _CONDITION.fullmatch(text)
    try:
        if match is not None:
            return Filter(match[1], match[2], float(match[3]))
    except ValueError:
        pass
    raise ConfigError(
        "A condition is a metric, a comparison and a number.",
        field="--metric",
        value=text,
        remedy='Write for example --metric "test_accuracy>=0.9"; <, <=, >, >=, == and != are known.',
    )


def parse_age(text: str, *, field: str) -> timedelta:
    """The time that a text like ``12h`` or ``7d`` states.

    Raises:
        ConfigError: it states none.
    """
    match = _AGE.fullmatch(text.strip())
    try:
        if match is not None:
            return timedelta(seconds=float(match[1]) * UNITS[match[2]])
    except OverflowError:
        pass
    raise ConfigError(
        "A time is a number and a unit: s, m, h, d or w.",
        field=field,
        value=text,
        remedy="Write for example 12h or 7d.",
    )


def sort_key(text: str, runs: Sequence[PastRun]) -> tuple[Callable[[RunStatus], Any], bool]:
    """What ``--sort`` sorts by, and whether the other way round. Runs without that metric come last.

    Raises:
        ConfigError: it is neither a known word nor a metric of any run.
    """
    reverse, name = text.startswith("-"), text.removeprefix("-")
    metrics = sorted({metric for run in runs for metric in run.metrics})
    if name not in _FIELDS and name not in metrics:
        # A metric is known by the runs that have it.
        why = "Runs cannot be sorted by this." if metrics else "There is no run with a metric to sort by."
        raise ConfigError(why, field="--sort", value=text, remedy=suggestion(name, [*_FIELDS, *metrics]))

    def key(status: RunStatus) -> Any:
        run = status.run
        match name:
            case "started":
                return (run.started, run.id)
            case "name":
                return (run.run_name or run.name, run.started)
            case "state":
                return (status.state, run.started)
        value = (run.seconds or 0.0) if name == "seconds" else run.metrics.get(name, math.nan)
        missing = math.isnan(value)
        # The missing ones last, whichever way round.
        return (missing != reverse, 0.0 if missing else value)

    return key, reverse
