"""Trees of tensors between ranks, for code that calls the accelerator. Nothing is pickled.

Shapes travel first, as one small message between the hosts that no device waits for. So tensors may differ in their
first dimension, and a difference that cannot be gathered is the same error on every rank instead of a hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import recursively_apply

from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import ConfigError


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
        own = [[contributes, str(leaf.dtype), list(leaf.shape)] for leaf in leaves]
        ranks = self._comm.broadcast_json(self._comm.gather_json(own))
        gathered = iter([self._gather_one(*one, field) for one in zip(leaves, zip(*ranks, strict=True), strict=True)])
        return replace_leaves(tree, lambda _: next(gathered), field=field)

    def _gather_one(self, leaf: torch.Tensor, ranks: Sequence[tuple[bool, str, list[int]]], field: str) -> torch.Tensor:
        """The tensors of the ranks that contribute, joined ``[rows of all ranks, ...]``.

        `ranks`: whether each contributes, and its dtype and shape.
        """
        present = [rank for rank in ranks if rank[0]] or [ranks[self._comm.rank]]
        if len({(dtype, tuple(shape[1:]), len(shape)) for _, dtype, shape in present}) > 1:
            what = f"The tensors differ between the processes: {', '.join(str(tuple(shape)) for *_, shape in present)}."
            remedy = "Call pad_across_processes on the dimensions that differ before."
            raise ConfigError(what, field=field, value=tuple(leaf.shape), remedy=remedy)
        dtype: torch.dtype = getattr(torch, present[0][1].removeprefix("torch."))
        trailing = present[0][2][1:]
        per_row = math.prod(trailing) * dtype.itemsize
        counts = [(shape[0] if shape else 1) if contributes else 0 for contributes, _, shape in ranks]
        # As bytes: gloo does not know every dtype.
        sent = torch.zeros(max(counts) * per_row, dtype=torch.uint8, device=leaf.device)
        if counts[self._comm.rank]:
            own = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            sent[: own.numel()] = own
        received = self._comm.gather_tensor(sent) if sent.numel() else [sent] * len(counts)
        parts = [part[: count * per_row] for part, count in zip(received, counts, strict=True)]
        return torch.cat(parts).view(dtype).reshape(sum(counts), *trailing)
