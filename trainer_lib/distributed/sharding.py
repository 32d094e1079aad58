"""Sharded tensors: the mesh of processes, their blocks, the whole tensor on one process, blocks copied into place.

torch's `DTensor` is the only supported kind: each dimension of its mesh of processes divides one dimension of the
tensor, or repeats it. A plain tensor is whole on every process. Nothing is pickled on the way.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from trainer_lib.arguments.configs.parallelism_config import DIMENSIONS, Grid
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:  # the import takes 0.7 s, which only a sharded model should cost
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Range = tuple[int, int]  # the elements [start, stop) of one dimension


class Box(NamedTuple):
    """A block of a tensor: in every dimension, `shape` elements from `offset` on. Both are () without dimensions."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The elements that both boxes have; None when there are none."""
        ranges = []
        for start, size, other_start, other_size in zip(
            self.offset, self.shape, other.offset, other.shape, strict=True
        ):
            low, high = max(start, other_start), min(start + size, other_start + other_size)
            if low >= high:
                return None
            ranges.append((low, high - low))
        return _box(ranges)

    def view(self, tensor: Tensor, outer: Box) -> Tensor:
        """The view of this box in a tensor ``[*outer.shape]`` that holds the box `outer`."""
        if self == outer:
            return tensor  # also of a kind that cannot be sliced
        starts = (start - first for start, first in zip(self.offset, outer.offset, strict=True))
        return tensor[tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))]


def whole_box(shape: Iterable[int]) -> Box:
    """The box of all elements of a tensor."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def _box(starts_and_sizes: Iterable[tuple[int, int]]) -> Box:
    pairs = tuple(starts_and_sizes)
    return Box(tuple(start for start, _ in pairs), tuple(size for _, size in pairs))


@dataclass(frozen=True)
class LocalPart:
    """The elements of a tensor that this process holds."""

    values: Tensor  # `[...]` in the tensor's dtype and on its device
    shape: tuple[int, ...]  # the shape of the whole tensor
    # For every dimension, the ranges of the whole tensor that lie behind one another in `values`.
    ranges: tuple[tuple[Range, ...], ...]
    is_first_copy: bool  # whether no rank before this one holds the same elements

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Yield its boxes and their views `[*box.shape]` in `values`: several where a dimension has gaps."""
        if not self.values.numel():
            return
        dimensions = []
        for ranges in self.ranges:
            sizes = [stop - start for start, stop in ranges]
            ends = itertools.accumulate(sizes)
            positions = (end - size for end, size in zip(ends, sizes, strict=True))
            dimensions.append(list(zip((start for start, _ in ranges), sizes, positions, strict=True)))
        outer = whole_box(self.values.shape)
        for parts in itertools.product(*dimensions):
            at = _box((position, size) for _, size, position in parts)
            yield _box((start, size) for start, size, _ in parts), at.view(self.values, outer)


@runtime_checkable
class BoxReader(Protocol):
    """A mapping of tensors that can be read by boxes."""

    def read_boxes(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        """Read boxes of a tensor: a tensor `[*box.shape]` on the CPU for each of them."""

    def read_spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor, without reading it."""


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor; one on a mesh of a single process counts as well."""
    # While the module is not imported there can be no DTensor, and importing it to find out costs 0.7 s.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor, *, rank: int) -> LocalPart:
    """The part of a tensor, sharded in any dimensions or whole (`[...]`), that this process holds; no communication.

    Rank 0 counts as the first that holds a whole one. Raises ConfigError for an unknown division, as an incomplete sum.
    """
    whole: list[tuple[Range, ...]] = [((0, size),) for size in tensor.shape]
    if not is_sharded(tensor):
        return LocalPart(tensor.detach(), tuple(tensor.shape), tuple(whole), rank == 0)
    from torch.distributed.tensor import Replicate, Shard

    mesh, values, coordinate = tensor.device_mesh, tensor.to_local().detach(), tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return LocalPart(values, tuple(tensor.shape), tuple(whole), is_first_copy=False)
    # Of equal copies the one at the origin counts: in its own mesh, and of meshes that are slices of a larger one.
    is_first, shares = 0 in mesh.mesh, list[tuple[int, int, int, int]]()
    for placement, parts, index in zip(tensor.placements, mesh.shape, coordinate, strict=True):
        if isinstance(placement, Replicate):
            is_first = is_first and index == 0
        elif isinstance(placement, Shard) or hasattr(placement, "split_factor"):
            # A strided shard, in newer torch no kind of Shard, is FSDP's part of a tensor-parallel one.
            dim: int = placement.dim  # type: ignore[attr-defined]
            shares.append((dim, parts, index, getattr(placement, "split_factor", 1)))
        else:
            raise _unknown_division(tensor)
    # FSDP divides what tensor parallelism has divided before, which the placements say in the other order. Where
    # sizes do not divide, only the order in which it was done has the right ranges.
    for order in (shares, [(dim, parts, index, 1) for dim, parts, index, _ in reversed(shares)]):
        ranges = [*whole]
        for dim, parts, index, pieces in order:
            ranges[dim] = _share(ranges[dim], parts, index, pieces)
        if tuple(sum(stop - start for start, stop in dimension) for dimension in ranges) == tuple(values.shape):
            return LocalPart(values, tuple(tensor.shape), tuple(ranges), is_first)
    raise _unknown_division(tensor)


def _unknown_division(tensor: DTensor) -> ConfigError:
    what = "A tensor is divided over the processes in a way that is not known here."
    remedy = "Shard or replicate it in each dimension of the mesh."
    return ConfigError(what, field="model", value=f"{tuple(tensor.shape)} as {tensor.placements}", remedy=remedy)


def _share(ranges: Sequence[Range], parts: int, index: int, pieces: int) -> tuple[Range, ...]:
    """The ranges that one of `parts` processes gets: of each of `pieces` equal pieces, rounded up, its equal part."""
    total = sum(stop - start for start, stop in ranges)
    piece, kept = -(-total // pieces), list[Range]()
    for begin in range(0, total, piece or 1):
        length = min(piece, total - begin)
        part = -(-length // parts)
        low, high = begin + min(index * part, length), begin + min((index + 1) * part, length)
        at = 0
        for start, stop in ranges:
            first, last = max(start, start + low - at), min(stop, start + high - at)
            at += stop - start
            if first >= last:
                continue
            if kept and kept[-1][1] == first:
                first = kept.pop()[0]
            kept.append((first, last))
    return tuple(kept)


def fill_part(target: Tensor, source: Mapping[str, Tensor], name: str) -> None:
    """Copy this process's part of the tensor `source[name]` into `target`, which has the same (whole) shape."""
    held = list(local_part(target, rank=0).boxes())
    boxes = [box for box, _ in held]
    if isinstance(source, BoxReader):
        parts = source.read_boxes(name, boxes)
    else:
        value = source[name]
        parts = [box.view(value, whole_box(value.shape)) for box in boxes]
    for (_, values), part in zip(held, parts, strict=True):
        values.copy_(part)


def read_spec(source: Mapping[str, Tensor], name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of `source[name]`; a `BoxReader` does not read it for that."""
    if isinstance(source, BoxReader):
        return source.read_spec(name)
    return source[name].dtype, tuple(source[name].shape)


def load_like(target: Tensor, source: Mapping[str, Tensor], name: str) -> Tensor:
    """Load `source[name]` into a new tensor that is sharded and placed like `target`, in the dtype of the source."""
    dtype, _ = read_spec(source, name)
    made = torch.empty_like(target, dtype=dtype, requires_grad=False)
    fill_part(made, source, name)
    return made


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name that are made when they are asked for."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)


class GatheredTensors(LazyTensors):
    """Sharded tensors that `gather` makes whole when they are asked for.

    Asking is collective: every rank asks for the same names in the same order. Tied names share one tensor, which is
    gathered once.
    """

    def __init__(self, tensors: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__(tensors)
        self._tensors, self._gather = tensors, gather
        self._ties = Counter(id(tensor) for tensor in tensors.values())
        # Only tied tensors are kept: the others must be freed as soon as they are written.
        self._tied: dict[int, Tensor] = {}

    @override
    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if self._ties[id(tensor)] == 1:
            return self._gather(tensor)
        if id(tensor) not in self._tied:
            self._tied[id(tensor)] = self._gather(tensor)
        return self._tied[id(tensor)]


def gather_whole(tensor: Tensor, *, keep: bool) -> Tensor:
    """A tensor `[...]` whole, with values only where `keep` is true. Collective for a sharded one."""
    whole = tensor.detach()
    if is_sharded(whole):
        # On every process's device for a moment.
        return whole.full_tensor().to("cpu" if keep else "meta")
    return whole if keep else whole.to("meta")


class BroadcastTensors(LazyTensors):
    """Tensors of rank 0 that are broadcast when they are asked for; `specs` are those of `describe_tensors`.

    Asking is collective: every rank asks for the same names in the same order. One tensor at a time crosses the
    network, so no other rank holds the whole model.
    """

    def __init__(self, own: Mapping[str, Tensor], specs: Mapping[str, tuple[str, list[int]]], rank: int) -> None:
        super().__init__(specs)
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

    def read_boxes(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        """Read boxes, other ones on each rank: tensors `[*box.shape]` on the CPU. Collective, also without a box."""
        value = self[name]
        return [box.view(value, whole_box(value.shape)) for box in boxes]

    def read_spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor; no communication."""
        dtype, shape = self._specs[name]
        return getattr(torch, dtype), tuple(shape)


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Describe tensors `[...]` as JSON: name → dtype ("float32") and shape."""
    specs = {name: read_spec(tensors, name) for name in tensors}
    return {name: (str(dtype).removeprefix("torch."), list(shape)) for name, (dtype, shape) in specs.items()}


class Mesh(Grid):
    """The grid of all processes, with meshes of torch, which form their groups when they are first asked for."""

    def __init__(self, sizes: Mapping[str, int], rank: int = 0, device_type: str = "cpu") -> None:
        """Lay out the processes; the dimensions that `sizes` leaves out have the size 1, and none in `device_mesh`."""
        super().__init__(sizes, rank)
        self._named = tuple(name for name in DIMENSIONS if name in sizes)
        self._device_type = device_type

    @functools.cached_property
    def device_mesh(self) -> DeviceMesh:
        """Torch's mesh of the dimensions that were named. Collective when it is first read."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = tuple(self.sizes[name] for name in self._named)
        return init_device_mesh(self._device_type, shape, mesh_dim_names=self._named)

    def along(self, *names: str) -> DeviceMesh:
        """Return torch's mesh of some dimensions, those that were named, in their order."""
        wanted = tuple(name for name in self._named if name in names)
        return self.device_mesh if wanted == self._named else self.device_mesh[wanted]

    @functools.cached_property
    def of_shards(self) -> DeviceMesh:
        """Torch's mesh of the copies of a parameter and of those that hold its rows. Collective when first read."""
        if self.sizes["expert"] == self.sizes["sequence"] == 1:
            return self.along("replicate", "shard")
        from torch.distributed.device_mesh import init_device_mesh

        copies = self.sizes["replicate"]
        shape, names = (copies, self.size // copies), ("replicate", "shard")
        first = 0 if copies > 1 else 1
        return init_device_mesh(self._device_type, shape[first:], mesh_dim_names=names[first:])
