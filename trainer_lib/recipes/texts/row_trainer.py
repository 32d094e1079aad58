"""Recipes whose batches have more than the model takes, and whose predictions belong to rows.

A long row may become several sequences of a batch, and a model may give a score to every token; what is measured and
written is one prediction for a row. Texts that belong to a row travel with its batch as tensors of code points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.recipes.texts.packed_batches import NO_TARGET
from trainer_lib.trainer import Trainer

Key = TypeVar("Key")
Value = TypeVar("Value", int, str)


class RowTrainer(Trainer):
    """A Trainer that keeps some tensors of a batch from the model, and makes predictions of rows with them.

    Such a tensor ``[rows, …]`` is first in the batch: by it the rows are counted.
    """

    kept: tuple[str, ...] = ()
    """Names of the tensors that the model does not get."""

    def predict_rows(self, outputs: Any, labels: Any, kept: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Predictions and labels of rows, trees of tensors ``[rows, …]``, of the outputs for the sequences of a batch.

        New rows have no labels. `kept` has the tensors that the model did not get, where the batch has them.
        """
        raise NotImplementedError

    @override
    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        plain = {name: value for name, value in inputs.items() if name not in self.kept}
        return super().compute_loss(model, plain, return_outputs, num_items_in_batch)

    @override
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        plain = {name: value for name, value in inputs.items() if name not in self.kept}
        loss, outputs, labels = super().prediction_step(model, plain, prediction_loss_only, ignore_keys)
        if prediction_loss_only or outputs is None:
            return loss, outputs, labels
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        kept = {name: inputs[name].to(first.device) for name in self.kept if name in inputs}
        with torch.no_grad():
            return (loss, *self.predict_rows(outputs, labels, kept))


class RowLossTrainer(Trainer):
    """A Trainer whose loss is the mean of losses of rows."""

    def judge(self, model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        """The losses of rows with labels ``[rows]``, and what the model says of them ``[rows, …]``."""
        raise NotImplementedError

    @override
    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        losses, outputs = self.judge(model, inputs)
        # Given the rows of the whole step, it is this batch's part of their mean.
        loss = losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch
        return (loss, {"loss": loss, "outputs": outputs}) if return_outputs else loss


def encode_texts(texts: Sequence[str]) -> Tensor:
    """The code points of texts, int32 ``[rows, characters]``, filled up with -100; at least one character wide."""
    points = [np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32) for text in texts]
    return pad_rows(points, NO_TARGET, torch.int32)


def decode_texts(points: np.ndarray | Tensor) -> list[str]:
    """The texts of code points ``[rows, characters]``; negative ones are left out."""
    rows = points.cpu().numpy() if isinstance(points, Tensor) else points
    return [row[row >= 0].astype("<i4").tobytes().decode("utf-32-le", "surrogatepass") for row in rows]


def pad_rows(rows: Sequence[Any], fill: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Lists or arrays of numbers as a tensor ``[rows, longest]``, at least one wide."""
    tensor = torch.full((len(rows), max(1, *map(len, rows))), fill, dtype=dtype)
    for row, values in enumerate(rows):
        tensor[row, : len(values)] = torch.as_tensor(np.array(values))
    return tensor


def find_usual(pairs: Iterable[tuple[Key, Value]]) -> tuple[dict[Key, Value], Value]:
    """Key -> its most frequent value, and the most frequent one of all; of equally frequent ones the first in order."""
    by_key: dict[Key, Counter[Value]] = {}
    every: Counter[Value] = Counter()
    for key, value in pairs:
        by_key.setdefault(key, Counter())[value] += 1
        every[value] += 1

    def most_frequent(counts: Counter[Value]) -> Value:
        return min(counts, key=lambda value: (-counts[value], value))

    return {key: most_frequent(counts) for key, counts in by_key.items()}, most_frequent(every)
