"""Metrics on resampled rows: what a paired bootstrap needs to compare two models that were measured on the same rows.

The resamples depend only on the rows (their digest seeds the draw), so every model that is measured on these rows gets
the same ones, and the difference of two models on resample i is that of one pair.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from trainer_lib.evaluation import nested
from trainer_lib.outputs import EvalPrediction

DIGITS = 6
"""Significant digits that are kept: enough for quantiles, and few enough for a small file."""


class _Silent(io.TextIOBase):
    """A stream that keeps nothing."""

    @override
    def write(self, text: str) -> int:
        """Drop the text."""
        return len(text)


class Remembered:
    """A `compute_metrics` that keeps what it was given last.

    Attributes:
        compute: the function.
        given: predictions and labels, trees of arrays ``[rows, …]``; None before the first call.
    """

    def __init__(self, compute_metrics: Callable[..., Any]) -> None:
        self.compute = compute_metrics
        self.given: EvalPrediction | None = None

    def __call__(self, p: EvalPrediction, **more: Any) -> Any:
        """Call the function."""
        self.given = p
        return self.compute(p, **more)

    def resampled(self, seed: str, resamples: int) -> dict[str, list[float]]:
        """Metric -> its value on each resample of the rows; empty where nothing was given.

        A metric that some resamples do not have, as their rows are of one class, has the values of the others. One that
        most of them do not have is left out.

        Args:
            seed: hexadecimal digits that the rows decide.
        """
        if self.given is None:
            return {}
        arrays: list[Any] = []
        tree = (self.given.predictions, self.given.label_ids)
        nested.flatten_tree(tree, arrays)
        structure = nested.describe_structure(tree)
        rows = len(arrays[0])
        draw = np.random.default_rng(int(seed[:16], 16))
        found: dict[str, list[float]] = {}
        silent = _Silent()
        compute = getattr(self.compute, "of_part", self.compute)
        for _ in range(resamples):
            chosen = draw.integers(0, rows, rows)
            predictions, labels = nested.rebuild_tree(structure, [np.asarray(each)[chosen] for each in arrays])
            with contextlib.redirect_stdout(silent):  # what it prints was printed for the rows themselves
                part = EvalPrediction(predictions, labels)
                part.whole_labels = self.given.label_ids
                values: Mapping[str, Any] = compute(part)
            for name, value in values.items():
                if isinstance(value, int | float | np.number):
                    found.setdefault(name, []).append(float(f"{float(value):.{DIGITS}g}"))
        return {name: values for name, values in found.items() if 2 * len(values) >= resamples}


def intervals(resampled: Mapping[str, list[float]], confidence: float | None) -> dict[str, float]:
    """The interval of each metric by the percentiles of its resamples: `<metric>_low` and `<metric>_high`.

    Args:
        resampled: metric -> its value on each resample.
        confidence: the share of the resamples inside of the interval; None: no intervals.
    """
    if confidence is None:
        return {}
    outside = (1 - confidence) / 2
    found: dict[str, float] = {}
    for name, values in resampled.items():
        low, high = np.quantile(values, (outside, 1 - outside))
        found |= {f"{name}_low": float(low), f"{name}_high": float(high)}
    return found
