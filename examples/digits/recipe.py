"""Handwritten digits: 1,797 real scans of 8 x 8 pixels that come with scikit-learn, and a small convolutional network.

A recipe is a file of plain functions. `prepare` and `build_model` are required; every other one has a default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib import EvalPrediction

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

Row = dict[str, Any]


def prepare(options: Mapping[str, Any], out: PrepareOutput) -> Mapping[str, Iterator[Row]]:
    """Split the scans into train, validation and test, with equal shares of every class.

    Args:
        options: the spec's `prepare.options`: `validation` and `test` (shares of all scans), `seed` (of the split).
        out: `out.info` is stored with the data; `build_model` and the model card read it.

    Returns:
        For every split its rows: `row_id`, `pixels` (uint8 `[8, 8]`, 0 to 16) and `label` (0 to 9).
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    splits = _stratified(digits.target, options["validation"], options["test"], options["seed"])
    out.info["classes"] = [str(name) for name in digits.target_names]
    out.info["source"] = "scikit-learn load_digits (UCI ML hand-written digits, test set)"
    # Pixels are counts of ink from 0 to 16; one byte each keeps the shards small.
    images = digits.images.astype(np.uint8)
    return {name: _rows(images, digits.target, chosen) for name, chosen in splits.items()}


def _stratified(labels: np.ndarray, validation: float, test: float, seed: int) -> dict[str, np.ndarray]:
    """The row numbers of each split, ascending; `labels` is `[rows]`. Every class is shuffled and cut by itself."""
    rng = np.random.default_rng(seed)
    parts: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        num_test = round(len(rows) * test)
        num_validation = round(len(rows) * validation)
        parts["test"].append(rows[:num_test])
        parts["validation"].append(rows[num_test : num_test + num_validation])
        parts["train"].append(rows[num_test + num_validation :])
    return {name: np.sort(np.concatenate(rows)) for name, rows in parts.items()}


def _rows(images: np.ndarray, labels: np.ndarray, chosen: np.ndarray) -> Iterator[Row]:
    for row in chosen:
        yield {"row_id": int(row), "pixels": images[row], "label": int(labels[row])}


class DigitNet(nn.Module):
    """Three convolutions and a linear layer, with GroupNorm, so that a sample does not depend on the rest of its batch.

    Args:
        width: channels of the first layer.
        dropout: dropout probability before the linear layer.
        num_classes: number of classes.
    """

    def __init__(self, width: int, dropout: float, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, width),
            *_block(width, width),
            nn.MaxPool2d(2),
            *_block(width, 2 * width),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * width * 2 * 2, num_classes))

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits `[batch, num_classes]` for pixels `[batch, 1, 8, 8]` from 0 to 1; with labels `[batch]` a loss too."""
        logits: Tensor = self.head(self.features(pixels))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _block(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(4, channels_out),
        nn.GELU(),
    )


def build_model(options: Mapping[str, Any], data: DataInfo) -> nn.Module:
    """Build the untrained network; `options` are the spec's `train.model`."""
    return DigitNet(options["width"], options["dropout"], len(data.info["classes"]))


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """Make a batch of rows: pixels `[batch, 1, 8, 8]` from 0 to 1 and, if the rows have labels, labels `[batch]`."""
    pixels = np.stack([row["pixels"] for row in rows])[:, np.newaxis]
    batch = {"pixels": torch.from_numpy(pixels.astype(np.float32) / 16.0)}
    if "label" in rows[0]:
        batch["labels"] = torch.tensor([row["label"] for row in rows])
    return batch


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Accuracy over all samples, and the lowest accuracy of any class; predictions are `[samples, num_classes]`."""
    labels = np.asarray(evaluation.label_ids)
    right = np.asarray(evaluation.predictions).argmax(axis=-1) == labels
    per_class = [float(right[labels == label].mean()) for label in np.unique(labels)]
    return {"accuracy": float(right.mean()), "worst_class_accuracy": min(per_class)}


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> Mapping[str, Sequence[Any]]:
    """Turn logits `[samples, num_classes]` into the columns of the prediction files: the digit and its probability."""
    scores = np.exp(predictions - predictions.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    best = predictions.argmax(axis=-1)
    classes = data.info["classes"]
    return {
        "prediction": [classes[label] for label in best],
        "confidence": scores.max(axis=-1).astype(np.float32),
    }
