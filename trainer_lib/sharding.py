"""Tensors of which every process holds some rows: what lies here, the whole on one process, and rows put into place.

torch's `DTensor` is the only kind that is known: its rows (of dimension 0) are divided over one dimension of a mesh of
processes, and repeated over the others. A plain tensor is whole on every process. Nothing is pickled on the way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_lib.errors import ConfigError

if TYPE_CHECKING:  # importing it takes 0.7 s, for which only who divides a model should wait
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Rows:
    """What this process holds of a tensor.

    Attributes:
        values: rows [start, start + len(values)) of it; the tensor itself when it has no dimension.
        shape: of the whole.
        start: number of the first row.
        is_first_copy: whether no process before this one holds the same rows.
    """

    values: Tensor
    shape: tuple[int, ...]
    start: int
    is_first_copy: bool


@runtime_checkable
class RowReader(Protocol):
    """A mapping of tensors, some rows of which can be had without the others."""

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, on the CPU."""

    def read_spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Its element type and shape, without reading it."""


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether its rows are divided over processes (or could be: a mesh of one counts)."""
    module = sys.modules.get("torch.distributed.tensor")  # as long as nobody has imported it there is none
    return module is not None and isinstance(tensor, module.DTensor)


def local_rows(tensor: Tensor, *, rank: int) -> Rows:
    """This process's rows, without a message; `rank` decides who is the first to hold a whole tensor."""
    if not is_sharded(tensor):
        return Rows(tensor.detach(), tuple(tensor.shape), 0, rank == 0)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    first = coordinate is not None
    for placement, position in zip(tensor.placements, coordinate or (), strict=True):
        if isinstance(placement, Replicate):
            first = first and position == 0
        elif not (isinstance(placement, Shard) and placement.dim == 0):
            raise ConfigError(
                "A tensor is divided in a way that has no rows.",
                field="model",
                value=str(placement),
                remedy="Divide parameters over their first dimension only.",
            )
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return Rows(tensor.to_local().detach(), tuple(tensor.shape), offset[0] if offset else 0, first)


def gather_whole(tensor: Tensor, *, keep: bool) -> Tensor:
    """All rows on the CPU where `keep` is true; elsewhere a tensor without values (meta). Collective for a sharded one.

    One tensor at a time is whole on each process's device.
    """
    if not is_sharded(tensor):
        value = tensor.detach()
        return value if keep else value.to("meta")
    gathered: Tensor = tensor.full_tensor().detach()
    return gathered.to("cpu") if keep else gathered.to("meta")


def fill_rows(target: Tensor, source: Mapping[str, Tensor], name: str) -> None:
    """Copy this process's rows of a whole tensor into `target`."""
    local, start = target.detach(), 0
    if is_sharded(target):
        held = local_rows(target, rank=0)
        local, start = held.values, held.start
    if isinstance(source, RowReader) and local.ndim:
        local.copy_(source.read_rows(name, start, start + len(local)))
    else:
        value = source[name]
        local.copy_(value[start : start + len(local)] if value.ndim else value)


def read_spec(source: Mapping[str, Tensor], name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Element type and shape of one of its tensors, without a message."""
    if isinstance(source, RowReader):
        return source.read_spec(name)
    return source[name].dtype, tuple(source[name].shape)


def load_like(target: Tensor, source: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of `source` as new memory, divided as `target`, which has its shape, is."""
    dtype, _ = read_spec(source, name)
    made = torch.empty_like(target, dtype=dtype, requires_grad=False)
    fill_rows(made, source, name)
    return made


class GatheredTensors(Mapping[str, Tensor]):
    """Divided tensors made whole when asked for, which is collective; values only where `keep` is true.

    Tied names give one tensor, gathered once as long as it is in use.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, keep: bool) -> None:
        self._tensors, self._keep = tensors, keep
        self._ties = Counter(id(tensor) for tensor in tensors.values())
        self._tied: dict[int, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if id(tensor) in self._tied:
            return self._tied[id(tensor)]
        gathered = gather_whole(tensor, keep=self._keep)
        if self._ties[id(tensor)] > 1:
            self._tied[id(tensor)] = gathered
        return gathered

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class BroadcastTensors(Mapping[str, Tensor]):
    """What rank 0 has, for all: asking for a tensor is collective, and in the same order everywhere.

    One tensor at a time crosses the network; the others never hold the whole.
    """

    def __init__(self, own: Mapping[str, Tensor], specs: Mapping[str, tuple[str, list[int]]], rank: int) -> None:
        """`specs`: name → dtype and shape, the same on every rank; `own` is looked at on rank 0 only."""
        self._own, self._specs, self._rank = own, specs, rank

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.read_spec(name)
        value = self._own[name].detach().cpu() if self._rank == 0 else torch.empty(shape, dtype=dtype)
        value = value.contiguous()
        if value.numel():
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
        return value

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of it, which may be others on every rank. Collective."""
        return self[name][start:stop]

    def read_spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Element type and shape, without a message."""
        dtype, shape = self._specs[name]
        return getattr(torch, dtype), tuple(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Name → dtype and shape, JSON."""
    return {name: (str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in tensors.items()}
