"""Calls `compute_metrics`, once with all predictions or batch by batch, and checks that it returns numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import ConfigError, TrainflowError, from_exception
from trainer_lib.evaluation import nested

if TYPE_CHECKING:
    from trainer_lib.trainer.evaluator import Evaluator


class BatchMetrics:
    """Metrics that take batches of CPU tensors, on rank 0, and keep no predictions.

    With several ranks, an error of the user's code is kept until `finish`, where all ranks raise it.
    """

    def __init__(self, hooks: Evaluator) -> None:
        self._metric: Any = hooks.compute_metrics
        self._alone = hooks.comm.world_size == 1
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
        """`batch_eval_metrics`: the last call of the function returns the metrics of all batches."""
        given = EvalPrediction(batch["logits"], batch["labels"], inputs=batch["inputs"], losses=batch["losses"])
        result = self._metric(given, compute_result=last)
        if last:
            self._result = result

    def finish(self) -> Any:
        """Return the metrics of all batches, or raise what the user's code raised."""
        if self._failure is not None:
            raise self._failure
        return self._result


class MetricObject(BatchMetrics):
    """A metric in the style of torchmetrics, or a collection of them, with `update`, `compute` and `reset`."""

    @override
    def _update(self, batch: Mapping[str, Any], *, last: bool) -> None:
        # A metric that was moved to the GPU takes no CPU tensors.
        device = getattr(self._metric, "device", "cpu")
        logits, labels = (nested.map_tree(lambda leaf: leaf.to(device), batch[name]) for name in ("logits", "labels"))
        self._metric.update(logits, labels)
        if not last:
            return
        with without_synchronization(self._metric):
            value = self._metric.compute()
        # The next evaluation begins with an empty metric.
        self._metric.reset()
        self._result = value if isinstance(value, Mapping) else {type(self._metric).__name__: value}


@contextlib.contextmanager
def without_synchronization(metric: Any) -> Iterator[None]:
    """Keep torchmetrics from gathering states: rank 0 has every rank's batches, and the others call nothing."""
    modules = list(metric.modules()) if isinstance(metric, torch.nn.Module) else []
    parts: list[Any] = [part for part in modules if hasattr(part, "distributed_available_fn")]
    before = [part.distributed_available_fn for part in parts]
    for part in parts:
        part.distributed_available_fn = _return_false
    try:
        yield
    finally:
        for part, function in zip(parts, before, strict=True):
            part.distributed_available_fn = function


def _return_false() -> bool:
    return False


def is_metric_object(metric: Any) -> bool:
    """Whether a metric has `update`, `compute` and `reset`, so that it is not called as a function."""
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def create_batch_metrics(hooks: Evaluator) -> BatchMetrics | None:
    """Metrics that take batch by batch; None when `compute_metrics` takes all predictions at once, or is None."""
    if is_metric_object(hooks.compute_metrics):
        return MetricObject(hooks)
    return BatchMetrics(hooks) if hooks.args.batch_eval_metrics and hooks.compute_metrics is not None else None


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
