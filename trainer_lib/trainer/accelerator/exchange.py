"""Trees of tensors between ranks, for code that calls the accelerator. Nothing is pickled.

Shapes travel first, as one small message between the hosts that no device waits for. So tensors may differ in their
first dimension, and a difference that cannot be gathered is the same error on every rank instead of a hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply

from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import ConfigError

_MOST_DIMENSIONS = 8
_DTYPES = tuple(sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str))
_ROW = 3 + _MOST_DIMENSIONS  # of the table of shapes: whether there are rows, dtype, number of dimensions, dimensions


def leaves_of(tree: Any, *, field: str) -> list[torch.Tensor]:
    """The tensors ``[...]`` of a tree of lists, tuples and mappings, in order. Raises ConfigError."""
    found: list[torch.Tensor] = []
    replace_leaves(tree, lambda leaf: found.append(leaf) or leaf, field=field)  # type: ignore[func-returns-value]
    return found


def has_tensors_only(tree: Any) -> bool:
    """Whether every leaf of a tree of lists, tuples and mappings is a tensor."""
    try:
        recursively_apply(lambda leaf: leaf, tree, error_on_other_type=True)
    except TypeError:
        return False
    return True


def replace_leaves(tree: Any, function: Callable[[torch.Tensor], Any], *, field: str) -> Any:
    """The tree with `function` of every tensor ``[...]`` in its place. Raises ConfigError for other leaves."""
    try:
        return recursively_apply(function, tree, error_on_other_type=True)
    except TypeError as error:
        what = "Only tensors, and lists, tuples and mappings of tensors, can be exchanged."
        remedy = "Use gather_for_metrics for other objects."
        raise ConfigError(what, field=field, value=type(tree).__name__, remedy=remedy) from error


class Exchange:
    """Collectives over all ranks. Every rank calls them in the same order, with trees of one form."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def gather(self, tree: Any, *, contributes: bool = True, field: str = "gather") -> Any:
        """Every rank's tensors ``[batch, ...]``, joined along their first dimension in the order of the ranks.

        A scalar ``[]`` counts as one row. Without `contributes`, this rank's rows are left out. `field`: the caller's
        method. Raises ConfigError when other dimensions or dtypes differ between ranks.
        """
        leaves = leaves_of(tree, field=field)
        table = self._shapes(leaves, contributes=contributes)
        gathered = iter([self._gather_one(leaf, table[:, place], field) for place, leaf in enumerate(leaves)])
        return replace_leaves(tree, lambda _: next(gathered), field=field)

    def _shapes(self, leaves: list[torch.Tensor], *, contributes: bool) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The table of every rank's shapes, ``[ranks, leaves, _ROW]``."""
        table = np.zeros((self._comm.world_size, len(leaves), _ROW), dtype=np.int64)
        for row, leaf in zip(table[self._comm.rank], leaves, strict=True):
            if leaf.ndim > _MOST_DIMENSIONS:
                what = f"A tensor of more than {_MOST_DIMENSIONS} dimensions cannot be exchanged."
                raise ConfigError(what, field="tensor", value=tuple(leaf.shape), remedy="Reshape it before.")
            row[:3] = contributes, _DTYPES.index(leaf.dtype), leaf.ndim
            row[3 : 3 + leaf.ndim] = leaf.shape
        # A sum of one rank's own rows and of zeros.
        return np.array(self._comm.sum_ints(table.ravel().tolist()), dtype=np.int64).reshape(table.shape)

    def _gather_one(self, leaf: torch.Tensor, rows: Any, field: str) -> torch.Tensor:
        """The tensors of the ranks that contribute, joined ``[rows of all ranks, ...]``."""
        present = [row for row in rows if row[0]] or [rows[self._comm.rank]]
        shapes = [tuple(int(size) for size in row[3 : 3 + row[2]]) for row in present]
        if len({(int(row[1]), shape[1:], len(shape)) for row, shape in zip(present, shapes, strict=True)}) > 1:
            what = f"The tensors differ between the processes: {', '.join(map(str, shapes))}."
            remedy = "Call pad_across_processes on the dimensions that differ before."
            raise ConfigError(what, field=field, value=tuple(leaf.shape), remedy=remedy)
        dtype, trailing = _DTYPES[int(present[0][1])], shapes[0][1:]
        per_row = math.prod(trailing) * dtype.itemsize
        counts = [int(row[3] if row[2] else 1) if row[0] else 0 for row in rows]
        # As bytes: gloo does not know every dtype.
        sent = torch.zeros(max(counts) * per_row, dtype=torch.uint8, device=leaf.device)
        if counts[self._comm.rank]:
            own = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            sent[: own.numel()] = own
        received = self._comm.gather_tensor(sent) if sent.numel() else [sent] * len(counts)
        parts = [part[: count * per_row] for part, count in zip(received, counts, strict=True)]
        return torch.cat(parts).view(dtype).reshape(sum(counts), *trailing)
