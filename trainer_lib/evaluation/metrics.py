"""`compute_metrics` in its forms, and what they have in common: update, merge, compute; results are checked numbers.

    function         compute_metrics(p), once with all rows, or batch by batch with `batch_eval_metrics`
    object           update(preds, target), compute(), reset(), as those of torchmetrics
    pair of a recipe metric_sums(p) -> {name: number or array} of any rows, metrics_from_sums(sums) -> {name: float}

Pairs merge (`metric_sums`), and so do objects of torchmetrics whose states are sums, least or greatest values.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import ConfigError, TrainflowError, from_exception
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.metric_sums import Sums, merge_sums

if TYPE_CHECKING:
    from torchmetrics import Metric


class BatchMetrics:
    """A metric that takes batches of CPU tensors, on rank 0, and keeps no predictions.

    With several ranks, an error of the user's code is kept until `finish`, where all ranks raise it.

    Args:
        metric: an object, or a function that takes `compute_result`, whose last call returns the metrics of all.
        alone: there is one process.
    """

    def __init__(self, metric: Any, *, alone: bool) -> None:
        self._metric = metric
        self._alone = alone
        self._failure: Exception | None = None
        self._result: Any = {}

    def add(self, batch: Mapping[str, Any], *, last: bool) -> None:
        """Pass one batch on; `last` marks the last one.

        Args:
            batch: trees of CPU tensors ``[batch, …]`` under "logits", "labels", "inputs" and "losses".
        """
        if self._failure is not None:
            return
        try:
            self._update(batch, last=last)
        except Exception as error:
            # Raised here, it would leave the other ranks waiting in the next gather.
            if self._alone:
                raise
            self._failure = error

    def _update(self, batch: Mapping[str, Any], *, last: bool) -> None:
        metric = self._metric
        if not is_metric_object(metric):
            given = EvalPrediction(batch["logits"], batch["labels"], inputs=batch["inputs"], losses=batch["losses"])
            result = metric(given, compute_result=last)
            self._result = result if last else self._result
            return
        # A metric that was moved to the GPU takes no CPU tensors.
        device = getattr(metric, "device", "cpu")
        metric.update(*(nested.map_tree(lambda leaf: leaf.to(device), batch[name]) for name in ("logits", "labels")))
        if last:
            value = compute_and_reset(metric)
            self._result = value if isinstance(value, Mapping) else {type(metric).__name__: value}

    def finish(self) -> Any:
        """Return the metrics of all batches, or raise what the user's code raised."""
        if self._failure is not None:
            raise self._failure
        return self._result


def is_metric_object(metric: Any) -> bool:
    """Whether a metric has `update`, `compute` and `reset`, so that it is not called as a function."""
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def compute_and_reset(metric: Any) -> Any:
    """The value of a metric object, which is empty then.

    Torchmetrics gathers no states: rank 0 has every rank's batches, and the others call nothing.
    """
    modules = list(metric.modules()) if isinstance(metric, torch.nn.Module) else []
    parts: list[Any] = [part for part in modules if hasattr(part, "distributed_available_fn")]
    before = [part.distributed_available_fn for part in parts]
    for part in parts:
        part.distributed_available_fn = _return_false
    try:
        value = metric.compute()
    finally:
        for part, function in zip(parts, before, strict=True):
            part.distributed_available_fn = function
    metric.reset()
    return value


def _return_false() -> bool:
    return False


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
    """Metrics as plain Python numbers; an array or tensor must hold one element ``[]`` or ``[1]``.

    Raises:
        ConfigError: a value is not one number.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            "The function did not return a mapping of names to numbers.",
            field="compute_metrics",
            value=type(metrics).__name__,
            remedy='Return for example {"accuracy": 0.9}.',
        )
    return {str(name): _parse_number(str(name), value) for name, value in metrics.items()}


def _parse_number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    raise ConfigError(
        f"The function did not return a number for {name!r}.",
        field="compute_metrics",
        value=value if isinstance(value, str) else type(value).__name__,
        remedy="Return one number per name; files and tables belong in a callback.",
    )


# -- metrics that merge -----------------------------------------------------------------------------------------------


class MetricStates:
    """A metric object of torchmetrics that merges (`why_not_merged`)."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._parts = _parts(metric)
        self._kept: Sums | None = None
        self.of_range = _KeepsStates(metric, self)

    def take(self) -> Sums | None:
        """The states after the range that was just evaluated."""
        kept, self._kept = self._kept, None
        return kept

    def keep(self) -> None:
        """Note the states of the rows so far."""
        self._kept = {
            f"{name}.{state}": getattr(part, state).detach().cpu().tolist()
            for name, part in _parts(self._metric).items()
            for state in part._defaults
        }

    def merge(self, total: Sums | None, more: Sums) -> Sums:
        """The states of the rows of both."""
        known, parts = _reductions(), self._parts.items()
        functions = {f"{name}.{state}": known[kind] for name, part in parts for state, kind in part._reductions.items()}
        return merge_sums(total, more, functions)

    def compute(self, state: Sums) -> Mapping[str, Any]:
        """The metrics of all rows."""
        self._metric.reset()
        for name, part in self._parts.items():
            defaults: dict[str, Any] = part._defaults
            for key, default in defaults.items():
                setattr(part, key, torch.tensor(state[f"{name}.{key}"], dtype=default.dtype, device=part.device))
            part._update_count = 1  # else it warns that it has seen nothing
        value = self._metric.compute()
        self._metric.reset()
        return value if isinstance(value, Mapping) else {type(self._metric).__name__: value}


class _KeepsStates:
    """A metric object that keeps its states in place of computing metrics of them."""

    def __init__(self, metric: Any, states: MetricStates) -> None:
        self.update, self.reset = metric.update, metric.reset
        self.device = getattr(metric, "device", "cpu")
        self._states = states

    def compute(self) -> dict[str, float]:
        """Keep the states of the rows so far; there are no metrics yet."""
        self._states.keep()
        return {}


def why_not_merged(metric: Any) -> str | None:
    """Why a metric object does not merge by its states, as a clause about it; None: it does."""
    if not _derives(metric):
        return f"{type(metric).__name__} is not a metric of torchmetrics, so its states are not known"
    for name, part in _parts(metric).items():
        if len([module for module in part.modules() if _derives(module)]) > 1:
            return f"{name} wraps another metric"
        if not part._reductions:
            return f"{name} has no states of its own"
        for state, reduction in part._reductions.items():
            if reduction not in _reductions():
                kind = "all rows" if isinstance(part._defaults[state], list) else "what cannot be added up"
                return f"{name} keeps {kind} ({state})"
    return None


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

    return {dim_zero_sum: operator.add, dim_zero_max: max, dim_zero_min: min}
