"""Predictions of classes as columns for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def name_classes(predictions: np.ndarray, classes: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The name of the best class, its probability, and that of each class, for logits ``[rows, classes]``."""
    scores = np.exp(predictions - predictions.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return {
        "prediction": [classes[index] for index in scores.argmax(axis=-1)],
        "confidence": scores.max(axis=-1).astype(np.float32).tolist(),
        "scores": list(scores.astype(np.float32)),
    }
