"""Metrics that merge: sums over some rows, which are added over all of them, and what the whole sums say.

metric_sums(p) -> {name: a number or an array}      of any rows
metrics_from_sums(sums) -> {name: float}            of all rows
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from trainer_lib.errors import ConfigError

Sums = dict[str, Any]
"""Name -> an integer, a float, or nested lists of them: plain JSON, so that whole numbers stay exact."""
_REMEDY = 'Return for example {"correct": 12, "rows": 25}: what can be added up over ranges of rows.'


def read_sums(given: Any) -> Sums:
    """What `metric_sums` returned, as plain JSON.

    Raises:
        ConfigError: it is not a mapping of names to numbers or arrays of numbers.
    """
    if not isinstance(given, Mapping):
        raise _refuse(f"returned a value of type {type(given).__name__} in place of a mapping of names to sums")
    sums = {}
    for name, value in given.items():
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise _refuse(f"returned {str(value)[:40]!r} for {name!r}, which is not a number or an array of numbers")
        sums[str(name)] = (array.astype(np.int64) if array.dtype.kind == "b" else array).tolist()
    return sums


def add_sums(total: Sums | None, more: Sums) -> Sums:
    """The sums of the rows of both; None stands for no rows so far.

    Raises:
        ConfigError: their names or shapes differ.
    """
    return combine(total, more, dict.fromkeys(more, operator.add))


def combine(total: Sums | None, more: Sums, functions: Mapping[str, Callable[[Any, Any], Any]]) -> Sums:
    """What `functions` make of each two numbers of the same name and place; None stands for no rows so far."""
    if total is None:
        return dict(more)
    if total.keys() != more.keys():
        raise _refuse(f"returned other names for other rows: {', '.join(sorted(total.keys() ^ more.keys()))}")
    return {name: _combine(name, value, more[name], functions[name]) for name, value in total.items()}


def _combine(name: str, one: Any, other: Any, function: Callable[[Any, Any], Any]) -> Any:
    shapes = np.shape(one), np.shape(other)
    if shapes[0] != shapes[1]:
        raise _refuse(f"returned arrays of shapes {list(shapes[0])} and {list(shapes[1])} for {name!r}")
    # Not by NumPy: its integers end at 64 bits.
    if isinstance(one, list):
        return [_combine(name, *pair, function) for pair in zip(one, other, strict=True)]
    return function(one, other)


class RangeMetrics(Protocol):
    """Metrics that are measured range by range: what stands for `compute_metrics` while a range is evaluated."""

    def take(self) -> Sums | None:
        """What the range that was just evaluated adds; None where it had no labels."""

    def add(self, total: Sums | None, more: Sums) -> Sums:
        """The sums of the rows of both; None stands for no rows so far."""

    def finish(self, sums: Sums) -> Any:
        """The metrics of all rows."""


class RangeSums:
    """The metrics of `metric_sums` and `metrics_from_sums`, range by range."""

    def __init__(self, merged: MergedMetrics) -> None:
        self._merged = merged
        self._kept: Sums | None = None
        self.add, self.finish = add_sums, merged.finish

    def __call__(self, p: Any) -> dict[str, float]:
        """Keep the sums of these rows; there are no metrics yet."""
        self._kept = read_sums(self._merged.sums_of(p))
        return {}

    def take(self) -> Sums | None:
        """What the range that was just evaluated adds."""
        kept, self._kept = self._kept, None
        return kept


class MergedMetrics:
    """`compute_metrics` of a recipe whose metrics merge, for evaluations that have all rows at once."""

    def __init__(self, metric_sums: Callable[[Any], Any], metrics_from_sums: Callable[[Any], Any]) -> None:
        self.sums_of, self._finish = metric_sums, metrics_from_sums
        self._total: Sums | None = None

    def __call__(self, p: Any, compute_result: bool = True) -> Any:
        """The metrics of these rows; with `batch_eval_metrics` those of all batches, at the last one."""
        self._total = add_sums(self._total, read_sums(self.sums_of(p)))
        if not compute_result:
            return {}
        total, self._total = self._total, None
        return self.finish(total)

    def finish(self, sums: Sums) -> Any:
        """The metrics of all rows; lists become arrays again."""
        return self._finish(
            {name: np.asarray(value) if isinstance(value, list) else value for name, value in sums.items()}
        )


def _refuse(what: str) -> ConfigError:
    return ConfigError(f"The function metric_sums() {what}.", field="metric_sums", remedy=_REMEDY)
