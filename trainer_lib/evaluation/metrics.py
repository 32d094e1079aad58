"""`compute_metrics` in its forms, and what they have in common: update, merge, compute; results are checked numbers.

function         compute_metrics(p), once with all rows, or batch by batch with `batch_eval_metrics`
object           update(preds, target), compute(), reset(), as those of torchmetrics
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import ConfigError, TrainflowError, from_exception
from trainer_lib.evaluation import nested


class BatchMetrics:
    """A metric that takes batches of CPU tensors, on rank 0, and keeps no predictions.

    `metric` is an object, or a function that takes `compute_result`, whose last call returns the metrics of all. An
    error of it is kept until `finish`, where all ranks raise it, unless this process is `alone`.
    """

    def __init__(self, metric: Any, *, alone: bool) -> None:
        self._metric = metric
        self._alone = alone
        self._failure: Exception | None = None
        self._result: Any = {}

    def add(self, batch: Mapping[str, Any], *, last: bool) -> None:
        """Pass one batch on: trees of CPU tensors ``[batch, …]`` under "logits", "labels", "inputs" and "losses"."""
        if self._failure is not None:
            return
        metric, logits, labels = self._metric, batch["logits"], batch["labels"]
        try:
            if is_metric_object(metric):
                # A metric that was moved to the GPU takes no CPU tensors.
                device = getattr(metric, "device", "cpu")
                metric.update(*(nested.map_tree(lambda leaf: leaf.to(device), tree) for tree in (logits, labels)))
                value = compute_and_reset(metric) if last else {}
                self._result = value if isinstance(value, Mapping) else {type(metric).__name__: value}
            else:
                given = EvalPrediction(logits, labels, inputs=batch["inputs"], losses=batch["losses"])
                result = metric(given, compute_result=last)
                self._result = result if last else {}
        except Exception as error:
            # Raised here, it would leave the other ranks waiting in the next gather.
            if self._alone:
                raise
            self._failure = error

    def finish(self) -> Any:
        """Return the metrics of all batches, or raise what the user's code raised."""
        if self._failure is not None:
            raise self._failure
        return self._result


def is_metric_object(metric: Any) -> bool:
    """Whether a metric has `update`, `compute` and `reset`, so that it is not called as a function."""
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def compute_and_reset(metric: Any) -> Any:
    """The value of a metric object, which is empty then; torchmetrics gathers no states: rank 0 has all batches."""
    modules = list(metric.modules()) if isinstance(metric, torch.nn.Module) else []
    parts: list[Any] = [part for part in modules if hasattr(part, "distributed_available_fn")]
    before = [part.distributed_available_fn for part in parts]
    for part in parts:
        part.distributed_available_fn = lambda: False
    try:
        value = metric.compute()
    finally:
        for part, function in zip(parts, before, strict=True):
            part.distributed_available_fn = function
    metric.reset()
    return value


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
    """Metrics as plain numbers, also of arrays and tensors of one element ``[]`` or ``[1]``. Raises ConfigError."""
    if not isinstance(metrics, Mapping):
        what = "The function did not return a mapping of names to numbers."
        remedy = 'Return for example {"accuracy": 0.9}.'
        raise ConfigError(what, field="compute_metrics", value=type(metrics).__name__, remedy=remedy)
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        numbers[str(name)] = number = to_json_value(value)
        if not isinstance(number, bool | int | float):
            what = f"The function did not return a number for {str(name)!r}."
            remedy = "Return one number per name; files and tables belong in a callback."
            shown = value if isinstance(value, str) else type(value).__name__
            raise ConfigError(what, field="compute_metrics", value=shown, remedy=remedy)
    return numbers


def to_json_value(value: Any) -> Any:
    """A tensor or an array of one element ``[]`` or ``[1]`` as a number, any other as a list; the rest as it is."""
    if not isinstance(value, torch.Tensor | np.generic | np.ndarray):
        return value
    return value.item() if math.prod(value.shape) == 1 else value.tolist()
