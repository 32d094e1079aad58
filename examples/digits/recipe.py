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
    """Split the scans into train, validation and test, every class in the same proportions.

    Args:
        options: `validation` and `test` (shares of the whole), `seed` (of the split).
        out: `out.info` travels with the data to `build_model` and the model card.
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
    """Row numbers of each split, ascending: every class is shuffled by `seed` and cut in the same proportions."""
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
    """Three convolutions and a linear layer. GroupNorm, not BatchNorm: no sample depends on its neighbours.

    Args:
        width: channels of the first layer.
        dropout: probability before the linear layer.
        num_classes: number of digits.
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
        """Loss (with `labels`, [batch]) and logits [batch, num_classes] for pixels [batch, 1, 8, 8] in 0..1."""
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
    """The network, untrained; `options` are the spec's `train.model`."""
    return DigitNet(options["width"], options["dropout"], len(data.info["classes"]))


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """Rows to a batch: pixels [batch, 1, 8, 8] in 0..1 and, where the rows have them, labels [batch]."""
    pixels = np.stack([row["pixels"] for row in rows])[:, np.newaxis]
    batch = {"pixels": torch.from_numpy(pixels.astype(np.float32) / 16.0)}
    if "label" in rows[0]:
        batch["labels"] = torch.tensor([row["label"] for row in rows])
    return batch


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Accuracy, and that of the class recognised worst."""
    labels = np.asarray(evaluation.label_ids)
    right = np.asarray(evaluation.predictions).argmax(axis=-1) == labels
    per_class = [float(right[labels == label].mean()) for label in np.unique(labels)]
    return {"accuracy": float(right.mean()), "worst_class_accuracy": min(per_class)}


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> Mapping[str, Sequence[Any]]:
    """What the prediction files hold beside `row_id`: the digit, and how sure the model is (0..1)."""
    scores = np.exp(predictions - predictions.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    best = predictions.argmax(axis=-1)
    classes = data.info["classes"]
    return {
        "prediction": [classes[label] for label in best],
        "confidence": scores.max(axis=-1).astype(np.float32),
    }
