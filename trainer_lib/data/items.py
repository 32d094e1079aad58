"""How much a batch holds: samples, and target items (what losses are means over).

Items are target tokens (labels that are not -100) for integer labels, samples for all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainer_lib.data.collators import IGNORED

# For isinstance: a dict is known at once, while Mapping alone looks into its registry, at 0.3 µs a question.
MAPPINGS = (dict, Mapping)
_FEW = 64  # labels that Python counts faster than NumPy


def batch_size_of(batch: Any) -> int | None:
    """Samples in a batch: the first dimension of the first tensor found in it; None when there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    parts = batch.values() if isinstance(batch, MAPPINGS) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        if (size := batch_size_of(part)) is not None:
            return size
    return None


def count_items(batch: Any, label_names: Sequence[str], *, shifts: bool) -> int:
    """Target items of one micro-batch. Labels on the CPU are counted without a torch call, others wait for the device.

    A model that shifts its labels itself never predicts the first one; labels already shifted (`shift_labels`) are
    counted whole.
    """
    labels = None
    if isinstance(batch, MAPPINGS):
        ready = batch.get("shift_labels")
        labels = ready if ready is not None else next((batch[n] for n in label_names if n in batch), None)
        shifts = shifts and ready is None
    if not isinstance(labels, torch.Tensor) or labels.ndim == 0 or labels.is_floating_point():
        return batch_size_of(batch) or 0
    if shifts and labels.ndim > 1:
        labels = labels[..., 1:]
    if labels.ndim == 1 and len(labels) <= _FEW:
        return len(labels) - labels.tolist().count(IGNORED)
    host = labels if labels.is_cpu else labels.cpu()
    return int(np.count_nonzero(host.numpy() != IGNORED))
