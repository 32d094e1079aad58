"""The mesh of processes: a grid, and torch's meshes along its dimensions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_lib.arguments.configs.parallelism_config import DIMENSIONS, Grid

if TYPE_CHECKING:  # the import takes 0.7 s, which only a mesh with groups should cost
    from torch.distributed.device_mesh import DeviceMesh


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
