"""The mesh of processes: the coordinates of every process, and the groups of processes along its dimensions.

::

    replicate   copies of the model that average their gradients
    shard       processes that hold rows of all parameters (FSDP)
    expert      processes that hold some of the experts
    sequence    processes that hold a part of every sequence
    tensor      processes that compute a part of every layer (tensor parallelism)

Ranks count the last dimension fastest, so processes that exchange most are neighbours. Samples belong to the data
coordinate, which runs over `replicate`, `shard` and `expert`; the processes of the other dimensions share them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the import takes 0.7 s, which only a mesh with groups should cost
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("replicate", "shard", "expert", "sequence", "tensor")
"Names of the dimensions, the outermost first."
DATA = ("replicate", "shard", "expert")
"The dimensions along which processes train on different samples."


class Mesh:
    """The mesh of all processes, seen from one of them. Groups are formed when they are first asked for.

    Attributes:
        sizes: name of a dimension -> its size, of all dimensions in their order.
        rank: of this process.
        size: number of processes.
        coordinates: name of a dimension -> this process's place in it, of all dimensions in their order.
        data_size: number of shares of the data.
        data_rank: number of this process's share.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int = 0, device_type: str = "cpu") -> None:
        """Lay out the processes; the dimensions that `sizes` leaves out have the size 1, and none in `device_mesh`."""
        self.sizes = {name: sizes.get(name, 1) for name in DIMENSIONS}
        self.rank, self.size = rank, math.prod(self.sizes.values())
        self._named = tuple(name for name in DIMENSIONS if name in sizes)
        self._device_type = device_type
        self.coordinates = self.coordinates_of(rank)
        self.data_size = math.prod(self.sizes[name] for name in DATA)
        self.data_rank = self._number(self.coordinates, DATA)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in every dimension."""
        places = {}
        for name in reversed(DIMENSIONS):
            rank, places[name] = divmod(rank, self.sizes[name])
        return {name: places[name] for name in DIMENSIONS}

    def _number(self, coordinates: Mapping[str, int], names: Iterable[str]) -> int:
        number = 0
        for name in names:
            number = number * self.sizes[name] + coordinates[name]
        return number

    @property
    def shares_samples(self) -> bool:
        """Whether several processes train on the same samples."""
        return self.data_size < self.size

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
    def data_group(self) -> dist.ProcessGroup:
        """The processes that differ in their samples alone. Collective when it is first read."""
        return self._group("data", DATA)

    @functools.cached_property
    def tensor_group(self) -> dist.ProcessGroup:
        """The processes that train on this one's samples. Collective when it is first read."""
        return self._group("model", [name for name in DIMENSIONS if name not in DATA])

    def _group(self, flat: str, names: Iterable[str]) -> dist.ProcessGroup:
        part: Any = self.along(*names)
        if part.ndim > 1:  # one collective, so that sums have one order
            part = part._flatten(flat)
        group: dist.ProcessGroup = part.get_group()
        return group

    def describe(self, rank: int | None = None) -> str:
        """Return the coordinates of a rank, by default this process's, as text: "tensor=1, shard=0"."""
        places = self.coordinates if rank is None else self.coordinates_of(rank)
        return ", ".join(f"{name}={places[name]}" for name in reversed(DIMENSIONS) if self.sizes[name] > 1)
