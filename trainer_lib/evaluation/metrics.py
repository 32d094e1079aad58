"""Calling `compute_metrics`, once on everything or batch by batch, and holding it to returning numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trainer_lib.distributed import Communicator
from trainer_lib.errors import ConfigError, TrainflowError, from_exception
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.hooks import EvaluationHooks
from trainer_lib.state import EvalPrediction


class BatchMetrics:
    """Metrics that take every batch as CPU tensors, on rank 0, and keep no predictions.

    What the user's code raises among several ranks waits until `finish`, where all ranks learn of it.
    """

    def __init__(self, hooks: EvaluationHooks) -> None:
        self._metric: Any = hooks.compute_metrics
        self._alone = hooks.comm.world_size == 1
        self._failure: Exception | None = None
        self._result: Any = {}

    def add(self, batch: Mapping[str, Any], *, last: bool) -> None:
        """Hand over one batch; with `last` it is the last one."""
        if self._failure is not None:
            return
        try:
            self._take(batch, last=last)
        except Exception as error:
            if self._alone:
                raise
            self._failure = error

    def _take(self, batch: Mapping[str, Any], *, last: bool) -> None:
        """`batch_eval_metrics`: the function returns the metrics of all with its last call."""
        given = EvalPrediction(batch["logits"], batch["labels"], inputs=batch["inputs"], losses=batch["losses"])
        result = self._metric(given, compute_result=last)
        if last:
            self._result = result

    def finish(self) -> Any:
        """The metrics of all batches; raises what the user's code raised."""
        if self._failure is not None:
            raise self._failure
        return self._result


class MetricObject(BatchMetrics):
    """A metric in the style of torchmetrics, or a collection of them: `update` by batch, `compute`, `reset`."""

    def _take(self, batch: Mapping[str, Any], *, last: bool) -> None:
        device = getattr(self._metric, "device", "cpu")
        logits, labels = (nested.map_tree(lambda leaf: leaf.to(device), batch[name]) for name in ("logits", "labels"))
        self._metric.update(logits, labels)
        if not last:
            return
        with _alone(self._metric):
            value = self._metric.compute()
        self._metric.reset()
        self._result = value if isinstance(value, Mapping) else {type(self._metric).__name__: value}


@contextlib.contextmanager
def _alone(metric: Any) -> Iterator[None]:
    """Only this rank has updated it, with every rank's batches: there is nothing to gather from others."""
    modules = list(metric.modules()) if isinstance(metric, torch.nn.Module) else []
    parts: list[Any] = [part for part in modules if hasattr(part, "distributed_available_fn")]
    before = [part.distributed_available_fn for part in parts]
    for part in parts:
        part.distributed_available_fn = _never
    try:
        yield
    finally:
        for part, function in zip(parts, before, strict=True):
            part.distributed_available_fn = function


def _never() -> bool:
    return False


def is_metric_object(metric: Any) -> bool:
    """Whether it is used through `update`, `compute` and `reset` rather than called."""
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def streaming_metrics(hooks: EvaluationHooks) -> BatchMetrics | None:
    """What takes the batches one by one; None when `compute_metrics` wants everything at once, or there is none."""
    if is_metric_object(hooks.compute_metrics):
        return MetricObject(hooks)
    return BatchMetrics(hooks) if hooks.args.batch_eval_metrics and hooks.compute_metrics is not None else None


def on_rank_zero(comm: Communicator, compute: Callable[[], dict[str, Any]]) -> dict[str, float]:
    """`compute()` on rank 0, its numbers on every rank; a failure there is raised everywhere."""
    metrics: dict[str, float] = {}
    failure: TrainflowError | None = None
    if comm.rank == 0:
        try:
            metrics = checked_metrics(compute())
        except Exception as error:
            if comm.world_size == 1:
                raise
            failure = from_exception(error, rank=0)
    comm.agree(failure)
    result: dict[str, float] = comm.broadcast_json(metrics)
    return result


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Metrics as plain Python numbers. Raises ConfigError naming one that is none."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            "did not return a mapping of names to numbers.",
            field="compute_metrics",
            value=type(metrics).__name__,
            remedy='Return {"accuracy": 0.9}, say.',
        )
    return {str(name): _number(str(name), value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    raise ConfigError(
        f"returned no number for {name!r}.",
        field="compute_metrics",
        value=value if isinstance(value, str) else type(value).__name__,
        remedy="Return one number per name; files and tables belong to a callback.",
    )
