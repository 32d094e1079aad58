"""Counts the samples and the target items of a batch; a loss is a mean over target items.

For integer labels, items are target tokens (labels that are not -100). For all other labels they are samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch

from trainer_lib.data.loading.collators import IGNORED

# For isinstance: dict is tested first and fast; Mapping alone searches its registry, in 0.3 µs.
MAPPINGS = (dict, Mapping)
SEQUENCES = (list, tuple)  # `list | tuple` is made at every call, which takes longer than the test
_ARRAYS = (torch.Tensor, np.ndarray)
_SHOWN = 200  # characters of a row in an error
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


def count_samples(batch: Any, given: int | None = None) -> int | None:
    """Samples in a batch: rows of its tensors ``[batch, …]``, else `given` to the collator, else its length, else None.

    Tensors inside a list of samples have other rows than the batch.
    """
    if (size := _rows(batch)) is not None:
        return size
    if given is not None:
        return given
    parts = list(batch.values()) if isinstance(batch, MAPPINGS) else batch if isinstance(batch, list | tuple) else None
    if parts is None:
        return len(batch) if isinstance(batch, Sized) and not isinstance(batch, str | bytes) else None
    if isinstance(batch, MAPPINGS):
        # A list of texts has one for every sample; a list of tensors one for every sample, or for every input.
        texts = [part for part in parts if isinstance(part, list | tuple) and part and batch_size_of(part) is None]
        if texts:
            return len(texts[0])
    is_list_of_samples = not isinstance(batch, MAPPINGS) and all(isinstance(part, MAPPINGS) for part in parts)
    if not is_list_of_samples and (size := batch_size_of(batch)) is not None:
        return size
    if isinstance(batch, list | tuple):
        columns = isinstance(batch, tuple) and batch and all(isinstance(part, list | tuple) for part in batch)
        return len(batch[0]) if columns else len(batch)
    return next((len(part) for part in parts if isinstance(part, list | tuple)), None)


def _rows(batch: Any) -> int | None:
    if isinstance(batch, _ARRAYS):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, MAPPINGS):
        for part in batch.values():
            if not isinstance(part, SEQUENCES) and (size := _rows(part)):
                return size
        return None
    if isinstance(batch, SEQUENCES) and batch and all(isinstance(part, _ARRAYS) for part in batch):
        return _rows(batch[0])
    return None


def count_items(batch: Any, label_names: Sequence[str], *, shifts: bool, samples: int | None = None) -> int | None:
    """The number of target items of one micro-batch; None when its samples (given to the collator) cannot be counted.

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
        return count_samples(batch, samples)
    if shifts and labels.ndim > 1:
        labels = labels[..., 1:]
    if labels.ndim == 1 and len(labels) <= _FEW:
        return len(labels) - labels.tolist().count(IGNORED)
    host = labels if labels.is_cpu else labels.cpu()
    return int(np.count_nonzero(host.numpy() != IGNORED))


def describe_row(batch: Any, label_names: Sequence[str], decode: Callable[[list[int]], str] | None) -> str:
    """The first row of a batch in words: its text where `decode` gives it, and its labels."""
    parts = batch if isinstance(batch, MAPPINGS) else {}
    tokens, labels = parts.get("input_ids"), next((parts[name] for name in label_names if name in parts), None)
    words = []
    if decode is not None and isinstance(tokens, torch.Tensor) and tokens.ndim == 2:
        words.append(f"text {decode(tokens[0].tolist())[:_SHOWN]!r}")
    if isinstance(labels, torch.Tensor) and labels.ndim:
        row = labels[0].reshape(-1).tolist()
        words.append(f"{len(row)} labels {str(row[:10])[:-1]}{', …' if len(row) > 10 else ''}]")
    return f"The first such row: {', '.join(words)}." if words else ""
