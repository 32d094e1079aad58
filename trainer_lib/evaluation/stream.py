"""Predictions of a range of rows, batch by batch, for a caller that writes them to shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainer_lib.data.loader import has_length
from trainer_lib.errors import ConfigError
from trainer_lib.evaluation import nested

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer


def stream_predictions(
    trainer: Trainer, dataset: Any, *, start: int, stop: int
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
