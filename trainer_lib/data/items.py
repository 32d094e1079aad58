"""Counts the samples and the target items of a batch; a loss is a mean over target items.

For integer labels, items are target tokens (labels that are not -100). For all other labels they are samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainer_lib.data.collators import IGNORED

# For isinstance: dict is tested first and fast; Mapping alone searches its registry, in 0.3 µs.
MAPPINGS = (dict, Mapping)
_FEW = 64  # up to so many labels, Python counts faster than NumPy


def batch_size_of(batch: Any) -> int | None:
    """Samples in a batch: the first dimension of its first tensor ``[batch, …]``; None without a tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    parts = batch.values() if isinstance(batch, MAPPINGS) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        if (size := batch_size_of(part)) is not None:
            return size
    return None


def count_items(batch: Any, label_names: Sequence[str], *, shifts: bool) -> int:
    """The number of target items of one micro-batch.

    Labels ``[batch]`` or ``[batch, sequence]`` on the CPU are counted without a torch call; for others the host waits
    for the device. A model that shifts its labels itself (`shifts`) never predicts the first one of a sequence. Labels
    under `shift_labels` are shifted already and counted whole.
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
