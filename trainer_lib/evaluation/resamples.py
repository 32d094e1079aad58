"""Metrics on resampled rows: what a paired bootstrap needs to compare two models that were measured on the same rows.

The resamples depend only on the rows (their digest seeds the draw), so every model that is measured on these rows gets
the same ones, and the difference of two models on resample i is that of one pair.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.evaluation import nested

DIGITS = 6  # significant digits that are kept: enough for quantiles, and few enough for a small file
_BLOCKS = 50  # of rows, which the jackknife leaves out one by one
_NORMAL = NormalDist()


class Remembered:
    """A `compute_metrics` that keeps what it was given last; `seed`: hexadecimal digits that the rows decide."""

    def __init__(self, compute_metrics: Callable[..., Any], seed: str = "0") -> None:
        self.compute = compute_metrics
        self.seed = seed
        self.given: EvalPrediction | None = None  # trees of arrays [rows, …]; None before the first call

    def __call__(self, p: EvalPrediction, **more: Any) -> Any:
        """Call the function."""
        self.given = p
        return self.compute(p, **more)

    def resampled(self, resamples: int) -> dict[str, list[float]]:
        """Metric -> its values on the resamples of the rows; empty where nothing was given.

        One that some resamples do not have, as their rows are of one class, has the values of the others, or is left
        out.
        """
        rows, draw = self._count_rows(), np.random.default_rng(int(self.seed[:16], 16))
        found: dict[str, list[float]] = {}
        for _ in range(resamples if rows else 0):
            for name, value in self._measure(draw.integers(0, rows, rows)).items():
                found.setdefault(name, []).append(_shorten(value))
        return {name: values for name, values in found.items() if 2 * len(values) >= resamples}

    def intervals(self, resampled: Mapping[str, list[float]], confidence: float | None) -> dict[str, float]:
        """The intervals of the metrics, `<metric>_low` and `<metric>_high`; the metric of all rows lies in it.

        `confidence`: the probability that an interval holds the true value; None: no intervals.
        """
        if confidence is None or not resampled:
            return {}
        rows = self._count_rows()
        whole = self._measure(np.arange(rows))
        order = np.random.default_rng(int(self.seed[:16], 16)).permutation(rows)
        blocks = np.array_split(order, min(rows, _BLOCKS))
        without = [self._measure(np.setdiff1d(order, block)) for block in blocks if len(block) < rows]
        found: dict[str, float] = {}
        for name, values in resampled.items():
            jackknife = np.array([part[name] for part in without if name in part])
            low, high = _bounds(np.array(values), whole.get(name, values[0]), jackknife, confidence)
            found |= {f"{name}_low": low, f"{name}_high": high}
        return found

    def _count_rows(self) -> int:
        if self.given is None:
            return 0
        return len(nested.list_leaves((self.given.predictions, self.given.label_ids))[0])

    def _measure(self, chosen: np.ndarray) -> dict[str, float]:
        """The metrics of some of the rows."""
        if self.given is None:
            return {}
        part = nested.take_rows(self.given, chosen)
        part.whole_labels = self.given.label_ids
        with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):  # printed for all rows before
            values: Mapping[str, Any] = getattr(self.compute, "of_part", self.compute)(part)
        return {name: float(value) for name, value in values.items() if isinstance(value, int | float | np.number)}


def _shorten(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _bounds(resampled: np.ndarray, value: float, jackknife: np.ndarray, confidence: float) -> tuple[float, float]:
    """The ends of an interval: BCa (Efron, Better bootstrap confidence intervals, 1987) with quantiles of t.

    The spread of the resamples is itself uncertain where errors have long tails, and percentiles are too narrow. So
    normal quantiles become those of Student's t, as Hesterberg has it (What teachers should know about the bootstrap,
    2015), with the degrees of freedom of the variance of such rows (Satterthwaite, 1946).

    `jackknife`: the metric without a block of rows, by block, for the skewness and kurtosis of what rows add to it.
    """
    apart = jackknife.mean() - jackknife if len(jackknife) else np.zeros(1)
    apart /= np.sqrt(np.square(apart).sum()) or 1.0
    freedom = 2 / max(float((apart**4).sum()) - 1 / len(apart), 1e-9)
    z = _NORMAL.inv_cdf((1 + confidence) / 2)
    # Abramowitz and Stegun, Handbook of mathematical functions, 26.7.5.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    count, shown = len(resampled), _shorten(value)
    below = float((resampled < shown).mean() + (resampled <= shown).mean()) / 2
    bias = _NORMAL.inv_cdf(min(max(below, 0.5 / count), 1 - 0.5 / count))
    acceleration = float((apart**3).sum()) / 6
    ends = [bias + (bias + end) / max(1 - acceleration * (bias + end), 1e-9) for end in (-t, t)]
    low, high = np.quantile(resampled, [_NORMAL.cdf(end) for end in ends])
    return min(float(low), value), max(float(high), value)
