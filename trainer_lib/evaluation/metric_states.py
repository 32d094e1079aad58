"""Metrics of torchmetrics that merge by their states: sums, least and greatest values over the rows so far.

A state crosses processes as JSON: whole numbers stay exact, and floats are added as 64-bit ones, in the order of the
ranges. What a metric keeps beside its states would be lost, so only those that reduce every state are taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer_lib.evaluation.metric_sums import Sums, combine

if TYPE_CHECKING:
    from torchmetrics import Metric


def why_not_merged(metric: Any) -> str | None:
    """Why a metric object does not merge by its states, as a clause about it; None: it does."""
    if not _derives(metric):
        return f"{type(metric).__name__} is not a metric of torchmetrics, so its states are not known"
    for name, part in _parts(metric).items():
        if len([each for each in part.modules() if _derives(each)]) > 1:
            return f"{name} wraps another metric"
        if not part._reductions:
            return f"{name} has no states of its own"
        for state, reduction in part._reductions.items():
            if reduction not in _reductions():
                kind = "all rows" if isinstance(part._defaults[state], list) else "what cannot be added up"
                return f"{name} keeps {kind} ({state})"
    return None


class MetricStates:
    """A metric object that merges, measured range by range; it stands in for the metric in an evaluation."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._parts = _parts(metric)
        self._kept: Sums | None = None

    @property
    def device(self) -> Any:
        """The device of its states, where batches go."""
        return getattr(self._metric, "device", "cpu")

    def update(self, *batch: Any) -> None:
        """Pass a batch on."""
        self._metric.update(*batch)

    def compute(self) -> dict[str, float]:
        """Keep the states of the rows so far; there are no metrics yet."""
        self._kept = {}
        for name, part in _parts(self._metric).items():
            states: dict[str, Any] = part.metric_state
            for state, value in states.items():
                self._kept[f"{name}.{state}"] = value.detach().cpu().tolist()
        return {}

    def reset(self) -> None:
        """Begin with no rows."""
        self._metric.reset()

    def take(self) -> Sums | None:
        """The states of the rows of one range; None where it had no labels."""
        kept, self._kept = self._kept, None
        return kept

    def add(self, total: Sums | None, more: Sums) -> Sums:
        """The states of the rows of both; None stands for no rows so far."""
        return combine(total, more, self._functions())

    def finish(self, sums: Sums) -> Mapping[str, Any]:
        """The metrics of all rows."""
        self._metric.reset()
        for name, part in self._parts.items():
            defaults: dict[str, Any] = part._defaults
            for state, default in defaults.items():
                value = torch.tensor(sums[f"{name}.{state}"], dtype=default.dtype, device=part.device)
                setattr(part, state, value)
            part._update_count = 1  # else it warns that it has seen nothing
        found = self._metric.compute()
        self._metric.reset()
        return found if isinstance(found, Mapping) else {type(self._metric).__name__: found}

    def _functions(self) -> dict[str, Callable[[Any, Any], Any]]:
        known = _reductions()
        parts = self._parts.items()
        return {f"{name}.{state}": known[each] for name, part in parts for state, each in part._reductions.items()}


def _parts(metric: Any) -> dict[str, Metric]:
    """The metrics of a collection by name, or the one there is; those that share states have them all."""
    if hasattr(metric, "items"):
        return dict(metric.items(keep_base=True))
    return {type(metric).__name__: metric}


def _derives(metric: Any) -> bool:
    if "torchmetrics" not in sys.modules:
        return False
    from torchmetrics import Metric, MetricCollection

    return isinstance(metric, Metric | MetricCollection)


def _reductions() -> dict[Any, Callable[[Any, Any], Any]]:
    """The functions by which torchmetrics reduces states over ranks -> the same for two numbers."""
    from torchmetrics.utilities import dim_zero_max, dim_zero_min, dim_zero_sum

    return {dim_zero_sum: lambda one, other: one + other, dim_zero_max: max, dim_zero_min: min}
