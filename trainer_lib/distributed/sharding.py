"""Sharded tensors: the rows that this process holds, the whole tensor on one process, and rows copied into place.

torch's `DTensor` is the only supported kind: its rows (dimension 0) are sharded over one dimension of a mesh of
processes and replicated over the others. A plain tensor is whole on every process. Nothing is pickled on the way.
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
from typing_extensions import override

from trainer_lib.errors import ConfigError

if TYPE_CHECKING:  # the import takes 0.7 s, which only a sharded model should cost
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor that this process holds.

    Attributes:
        values: rows [start, start + len(values)), `[rows, ...]` in the tensor's dtype and on its device; the tensor
            itself when it has no dimension.
        shape: the shape of the whole tensor.
        start: the number of the first row.
        is_first_copy: whether no rank before this one holds the same rows.
    """

    values: Tensor
    shape: tuple[int, ...]
    start: int
    is_first_copy: bool


@runtime_checkable
class RowReader(Protocol):
    """A mapping of tensors that can be read by rows."""

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a tensor: `[stop - start, ...]` on the CPU."""

    def read_spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor, without reading it."""


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor; one on a mesh of a single process counts as well."""
    # While the module is not imported there can be no DTensor, and importing it to find out costs 0.7 s.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_rows(tensor: Tensor, *, rank: int) -> Rows:
    """The rows of a tensor that this process holds; no communication.

    Args:
        tensor: sharded, or whole (`[rows, ...]`, or without dimensions).
        rank: of this process; rank 0 counts as the first that holds a whole tensor.

    Raises:
        ConfigError: the tensor is sharded along another dimension than its first.
    """
    if not is_sharded(tensor):
        return Rows(tensor.detach(), tuple(tensor.shape), 0, rank == 0)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    first = coordinate is not None
    for placement, position in zip(tensor.placements, coordinate or (), strict=True):
        if isinstance(placement, Replicate):
            first = first and position == 0  # of equal copies, the one at the origin of the mesh counts
        elif not (isinstance(placement, Shard) and placement.dim == 0):
            raise ConfigError(
                "A tensor is sharded along another dimension than its first.",
                field="model",
                value=str(placement),
                remedy="Shard parameters along dimension 0 only.",
            )
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return Rows(tensor.to_local().detach(), tuple(tensor.shape), offset[0] if offset else 0, first)


def gather_whole(tensor: Tensor, *, keep: bool) -> Tensor:
    """Gather a tensor `[rows, ...]` on the CPU where `keep` is true; elsewhere return it without values (on meta).

    Collective for a sharded tensor, which is whole on every process's device for a moment. A whole tensor that is kept
    is returned where it is.
    """
    if not is_sharded(tensor):
        value = tensor.detach()
        return value if keep else value.to("meta")
    gathered: Tensor = tensor.full_tensor().detach()
    return gathered.to("cpu") if keep else gathered.to("meta")


def fill_rows(target: Tensor, source: Mapping[str, Tensor], name: str) -> None:
    """Copy this process's rows of the tensor `source[name]` into `target`, which has the same (whole) shape."""
    local, start = target.detach(), 0
    if is_sharded(target):
        held = local_rows(target, rank=0)
        local, start = held.values, held.start
    if isinstance(source, RowReader) and local.ndim:
        local.copy_(source.read_rows(name, start, start + len(local)))
    else:
        value = source[name]
        # Without dimensions a tensor has no rows and is whole on every rank.
        local.copy_(value[start : start + len(local)] if value.ndim else value)


def read_spec(source: Mapping[str, Tensor], name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of `source[name]`; a `RowReader` does not read it for that."""
    if isinstance(source, RowReader):
        return source.read_spec(name)
    return source[name].dtype, tuple(source[name].shape)


def load_like(target: Tensor, source: Mapping[str, Tensor], name: str) -> Tensor:
    """Load `source[name]` into a new tensor that is sharded and placed like `target`, in the dtype of the source."""
    dtype, _ = read_spec(source, name)
    made = torch.empty_like(target, dtype=dtype, requires_grad=False)
    fill_rows(made, source, name)
    return made


class GatheredTensors(Mapping[str, Tensor]):
    """Sharded tensors that are gathered when they are asked for; values only where `keep` is true.

    Asking is collective: every rank asks for the same names in the same order. Tied names share one tensor, which is
    gathered once.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, keep: bool) -> None:
        self._tensors, self._keep = tensors, keep
        self._ties = Counter(id(tensor) for tensor in tensors.values())
        # Only tied tensors are kept: the others must be freed as soon as they are written.
        self._tied: dict[int, Tensor] = {}

    @override
    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if id(tensor) in self._tied:
            return self._tied[id(tensor)]
        gathered = gather_whole(tensor, keep=self._keep)
        if self._ties[id(tensor)] > 1:
            self._tied[id(tensor)] = gathered
        return gathered

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @override
    def __len__(self) -> int:
        return len(self._tensors)


class BroadcastTensors(Mapping[str, Tensor]):
    """Tensors of rank 0 that are broadcast when they are asked for.

    Asking is collective: every rank asks for the same names in the same order. One tensor at a time crosses the
    network, so no other rank holds the whole model.

    Args:
        own: name → tensor of any shape; used on rank 0 only.
        specs: name → dtype and shape, as `describe_tensors` returns them; equal on every rank.
        rank: of this process.
    """

    def __init__(self, own: Mapping[str, Tensor], specs: Mapping[str, tuple[str, list[int]]], rank: int) -> None:
        self._own, self._specs, self._rank = own, specs, rank

    @override
    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.read_spec(name)
        value = self._own[name].detach().cpu() if self._rank == 0 else torch.empty(shape, dtype=dtype)
        # Then the flat view below shares this tensor's memory, and the broadcast writes into it.
        value = value.contiguous()
        # Every rank knows the shape, so all leave an empty tensor out.
        if value.numel():
            # As bytes: gloo and NCCL do not serve every dtype (float8, unsigned).
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
        return value

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop), which may differ from rank to rank: `[stop - start, ...]` on the CPU. Collective."""
        return self[name][start:stop]

    def read_spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor; no communication."""
        dtype, shape = self._specs[name]
        return getattr(torch, dtype), tuple(shape)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    @override
    def __len__(self) -> int:
        return len(self._specs)


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Describe tensors `[...]` as JSON: name → dtype ("float32") and shape."""
    return {name: (str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in tensors.items()}
