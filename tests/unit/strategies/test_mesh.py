"""Processes have coordinates in a mesh; the samples follow some of its dimensions."""

from __future__ import annotations

import pytest

from trainer_lib.distributed.mesh import DIMENSIONS, Mesh


@pytest.mark.parametrize(
    ("sizes", "data", "last"),
    [
        ({"tensor": 4}, [0, 0, 0, 0], "tensor=3"),
        ({"replicate": 2, "tensor": 2}, [0, 0, 1, 1], "tensor=1, replicate=1"),
        ({"tensor": 2, "shard": 2}, [0, 0, 1, 1], "tensor=1, shard=1"),
        ({"replicate": 4, "shard": 1}, [0, 1, 2, 3], "replicate=3"),
        ({"replicate": 2, "shard": 2, "tensor": 2}, [0, 0, 1, 1, 2, 2, 3, 3], "tensor=1, shard=1, replicate=1"),
        ({"shard": 2, "sequence": 3}, [0, 0, 0, 1, 1, 1], "sequence=2, shard=1"),
        ({}, [0], ""),
    ],
)
def test_ranks_of_one_data_coordinate_are_neighbours(sizes: dict[str, int], data: list[int], last: str) -> None:
    ranks = [Mesh(sizes, rank) for rank in range(len(data))]
    assert [mesh.data_rank for mesh in ranks] == data
    assert {(mesh.size, mesh.data_size) for mesh in ranks} == {(len(data), max(data) + 1)}
    assert ranks[-1].describe() == ranks[0].describe(len(data) - 1) == last
    assert [tuple(mesh.coordinates) for mesh in ranks] == [DIMENSIONS] * len(data)
    assert len({tuple(mesh.coordinates.values()) for mesh in ranks}) == len(data)
