"""Predictions of a range of rows, batch by batch, for a caller that writes them to shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer_lib.data.loader import EvalLoader, has_length
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.hooks import EvaluationHooks


class _RangeHooks(EvaluationHooks, Protocol):
    """`EvaluationHooks` with a loader over a range of rows."""

    def range_dataloader(self, dataset: Any, start: int, stop: int) -> EvalLoader:
        """A loader of rows [start, stop) for this process alone."""


class _Collaborators(Protocol):
    @property
    def evaluator(self) -> _RangeHooks:
        """What evaluates for the Trainer."""


class _Evaluates(Protocol):
    """A Trainer."""

    @property
    def _trainflow(self) -> _Collaborators: ...


def stream_predictions(
    trainer: _Evaluates, dataset: Any, *, start: int, stop: int
) -> Iterator[tuple[npt.NDArray[np.int64], Any]]:
    """Predict rows [start, stop) of `dataset` on this process alone, whatever the world size.

    Nothing is communicated, so ranks may stream ranges of unequal length. Memory holds one batch.

    Yields:
        Row positions ``[batch]`` (int64) and predictions, a tree of arrays ``[batch, …]``, in row order.

    Raises:
        ConfigError: the dataset has no length, or the model's forward needs the other ranks.
    """
    if not has_length(dataset):
        raise ConfigError(
            "A dataset without a length cannot be predicted by ranges.",
            field="dataset",
            value=type(dataset).__name__,
            remedy="Give map-style data.",
        )
    hooks = trainer._trainflow.evaluator
    # Alone: the ranks have different numbers of rows, so they must not wait for each other.
    model = hooks.evaluation_model(alone=True)
    loader = hooks.range_dataloader(dataset, start, min(stop, len(dataset)))
    for (first, end), batch in zip(loader.slices, loader, strict=True):
        _, logits, labels = hooks.prediction_step(model, batch, False, ignore_keys=None)
        if hooks.preprocess_logits_for_metrics is not None:
            logits = hooks.preprocess_logits_for_metrics(logits, labels)
        yield np.arange(first, end, dtype=np.int64), nested.to_numpy(logits)
