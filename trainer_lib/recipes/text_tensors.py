"""Texts as tensors of code points, so that what belongs to a row travels with its batch and its predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer_lib.recipes.packed_batches import NO_TARGET


def encode_texts(texts: Sequence[str]) -> Tensor:
    """The code points of texts, int32 ``[rows, characters]``, filled up with -100; at least one character wide."""
    points = [np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32) for text in texts]
    found = np.full((len(points), max(1, *map(len, points))), NO_TARGET, np.int32)
    for row, each in enumerate(points):
        found[row, : len(each)] = each
    return torch.from_numpy(found)


def decode_texts(points: np.ndarray | Tensor) -> list[str]:
    """The texts of code points ``[rows, characters]``; negative ones are left out."""
    rows = points.cpu().numpy() if isinstance(points, Tensor) else points
    return [row[row >= 0].astype("<i4").tobytes().decode("utf-32-le", "surrogatepass") for row in rows]
