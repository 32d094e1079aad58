"""Calling `compute_metrics`, once on everything or batch by batch, and holding it to returning numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from trainer_lib.distributed import Communicator
from trainer_lib.errors import ConfigError, TrainflowError, from_exception
from trainer_lib.evaluation.hooks import EvaluationHooks
from trainer_lib.state import EvalPrediction


class BatchMetrics:
    """`batch_eval_metrics`: every batch is handed over as CPU tensors, and the last call returns the result."""

    def __init__(self, hooks: EvaluationHooks) -> None:
        self._compute: Any = hooks.compute_metrics
        self.result: dict[str, Any] = {}

    def add(self, batch: Mapping[str, Any], *, last: bool) -> None:
        """Hand over one batch; with `last` the function returns the metrics of all."""
        given = EvalPrediction(batch["logits"], batch["labels"], inputs=batch["inputs"], losses=batch["losses"])
        result = self._compute(given, compute_result=last)
        if last:
            self.result = dict(result)


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
    if isinstance(value, np.generic | np.ndarray | torch.Tensor) and np.size(value) == 1:
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    raise ConfigError(
        f"returned no number for {name!r}.",
        field="compute_metrics",
        value=value if isinstance(value, str) else type(value).__name__,
        remedy="Return one number per name; files and tables belong to a callback.",
    )
