"""Metrics that merge: ranges of rows are measured by any number of processes. Imports no torch.

A state crosses processes as JSON: whole numbers stay exact, and floats are added as 64-bit ones, in the order of the
ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainer_lib.errors import ConfigError

Sums = dict[str, Any]
"""Name -> an integer, a float, or nested lists of them: plain JSON."""


class MergedMetrics:
    """`compute_metrics` of a recipe with `metric_sums` and `metrics_from_sums`."""

    def __init__(self, metric_sums: Callable[[Any], Any], metrics_from_sums: Callable[[Any], Any]) -> None:
        self._sums_of, self._finish = metric_sums, metrics_from_sums
        self._total: Sums | None = None

    def __call__(self, p: Any, compute_result: bool = True) -> Any:
        """The metrics of these rows; with `batch_eval_metrics` those of all batches, at the last one."""
        self.add(p)
        total = self.take() if compute_result else None
        return {} if total is None else self.compute(total)

    def add(self, p: Any) -> dict[str, float]:
        """Add the sums of these rows, which are part of a range; there are no metrics yet."""
        self._total = self.merge(self._total, _read_sums(self._sums_of(p)))
        return {}

    def take(self) -> Sums | None:
        """The sums of the rows so far; None without any. There are no rows then."""
        total, self._total = self._total, None
        return total

    def merge(self, total: Sums | None, more: Sums) -> Sums:
        """The sums of the rows of both. Raises ConfigError if names or shapes differ."""
        if total is None:
            return dict(more)
        if total.keys() != more.keys():
            raise _refuse(f"returned other names for other rows: {', '.join(sorted(total.keys() ^ more.keys()))}")
        return {name: _add(name, value, more[name]) for name, value in total.items()}

    def compute(self, state: Sums) -> Any:
        """The metrics of all rows; lists become arrays again."""
        return self._finish(
            {name: np.asarray(value) if isinstance(value, list) else value for name, value in state.items()}
        )


def _read_sums(given: Any) -> Sums:
    """The result of `metric_sums` as plain JSON."""
    if not isinstance(given, Mapping):
        raise _refuse(f"returned a value of type {type(given).__name__} in place of a mapping of names to sums")
    sums = {}
    for name, value in given.items():
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise _refuse(f"returned {str(value)[:40]!r} for {name!r}, which is not a number or an array of numbers")
        sums[str(name)] = (array.astype(np.int64) if array.dtype.kind == "b" else array).tolist()
    return sums


def _add(name: str, one: Any, other: Any) -> Any:
    shapes = np.shape(one), np.shape(other)
    if shapes[0] != shapes[1]:
        raise _refuse(f"returned arrays of shapes {list(shapes[0])} and {list(shapes[1])} for {name!r}")
    # Not by NumPy: its integers end at 64 bits.
    if isinstance(one, list):
        return [_add(name, *pair) for pair in zip(one, other, strict=True)]
    return one + other


def _refuse(what: str) -> ConfigError:
    remedy = 'Return for example {"correct": 12, "rows": 25}: what can be added up over ranges of rows.'
    return ConfigError(f"The function metric_sums() {what}.", field="metric_sums", remedy=remedy)
