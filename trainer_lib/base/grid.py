"""The grid of processes: the coordinates of every process along named dimensions. Arithmetic alone, without torch.

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

import math
from collections.abc import Mapping

DIMENSIONS = ("replicate", "shard", "expert", "sequence", "tensor")
"Names of the dimensions, the outermost first."
DATA = ("replicate", "shard", "expert")
"The dimensions along which processes train on different samples."


class Grid:
    """All processes, seen from one of them.

    Attributes:
        sizes: name of a dimension -> its size, of all dimensions in their order.
        rank: of this process.
        size: number of processes.
        coordinates: name of a dimension -> this process's place in it, of all dimensions in their order.
        data_size: number of shares of the data.
        data_rank: number of this process's share.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int = 0) -> None:
        """Lay out the processes; the dimensions that `sizes` leaves out have the size 1."""
        self.sizes = {name: sizes.get(name, 1) for name in DIMENSIONS}
        self.rank, self.size = rank, math.prod(self.sizes.values())
        self.coordinates = self.coordinates_of(rank)
        self.data_size, self.data_rank = 1, 0
        for name in DATA:
            self.data_size *= self.sizes[name]
            self.data_rank = self.data_rank * self.sizes[name] + self.coordinates[name]

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in every dimension."""
        places = {}
        for name in reversed(DIMENSIONS):
            rank, places[name] = divmod(rank, self.sizes[name])
        return {name: places[name] for name in DIMENSIONS}

    @property
    def shares_samples(self) -> bool:
        """Whether several processes train on the same samples."""
        return self.data_size < self.size

    def describe(self, rank: int | None = None) -> str:
        """Return the coordinates of a rank, by default this process's, as text: "tensor=1, shard=0"."""
        places = self.coordinates if rank is None else self.coordinates_of(rank)
        return ", ".join(f"{name}={places[name]}" for name in reversed(DIMENSIONS) if self.sizes[name] > 1)
