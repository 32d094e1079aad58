"""A state that was saved under one layout of processes is read under any other: every pair, bit for bit."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.distributed import run_distributed
from trainer_lib import TrainingArguments
from trainer_lib.arguments.configs.parallelism_config import Grid
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.checkpoint.optimizer import restore_optimizer, snapshot_optimizer
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.snapshot import Snapshot, shard_snapshot
from trainer_lib.checkpoint.writer import save_checkpoint
from trainer_lib.distributed import communicator as distributed
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.distributed.sharding import fill_part, local_part
from trainer_lib.errors import ConfigError, NotReproducibleError
from trainer_lib.storage import Store

#: Sizes that do not divide by two or four, and dimensions with less elements than there are ranks.
SHAPES = {"odd": (7, 5), "wide": (3, 10), "cube": (4, 3, 5), "bias": (6,), "few": (1, 2), "none": (0, 3), "scalar": ()}
PLAIN = "norm"  # a parameter that no layout divides, as the norms outside of a tensor-parallel plan

Sides = tuple[int, ...]


def _strided(dim: int, pieces: int) -> Placement:
    return _StridedShard(dim, split_factor=pieces)


#: Name -> sizes of the mesh, and a placement for each of its dimensions; None: plain tensors on every rank.
LAYOUTS: dict[str, tuple[Sides, list[Placement]] | None] = {
    "whole": None,
    "repeated": ((4,), [Replicate()]),
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "rows in groups": ((2, 2), [Replicate(), Shard(0)]),
    "rows inside of rows": ((2, 2), [_strided(0, 2), Shard(0)]),  # FSDP2 over column-wise tensor parallelism
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),  # over row-wise
    "rows of rows": ((2, 2), [Shard(0), Shard(0)]),
    "columns and rows": ((2, 2), [Shard(1), Shard(0)]),
    "columns inside of columns": ((2, 2), [_strided(1, 2), Shard(1)]),
    "rows with gaps": ((4,), [_strided(0, 3)]),  # several boxes on a rank
    "three dimensions": ((1, 2, 2), [Replicate(), _strided(0, 2), Shard(0)]),
    "columns of a part of the mesh": ((2, 2), [Shard(1)]),  # the tensors know nothing of the first dimension
}
NAMES = ("replicate", "shard", "tensor")


def _values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in {**SHAPES, PLAIN: (3,)}.items()}


@functools.cache
def _mesh(sizes: Sides) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[-len(sizes) :])


class Layout:
    """Parameters and their optimizer as a layout divides them."""

    def __init__(self, name: str, seed: int) -> None:
        layout = LAYOUTS[name]
        self.placements = [] if layout is None else layout[1]
        self.sizes = (1,) if layout is None else layout[0]
        self.mesh: DeviceMesh | None = None
        if layout is not None:
            self.mesh = _mesh(layout[0])
            if len(self.placements) < len(layout[0]):
                self.mesh = self.mesh["tensor"]
        self.params = {key: nn.Parameter(self.divide(key, value)) for key, value in _values(seed).items()}
        self.optimizer = torch.optim.AdamW(self.params.values(), lr=0.1, foreach=False)

    def divide(self, name: str, value: Tensor) -> Tensor:
        if self.mesh is None or name == PLAIN:
            return value.clone()
        dims = [getattr(placement, "dim", 0) for placement in self.placements]
        fits = max(dims) < value.ndim
        placements = self.placements if fits else [Replicate()] * len(self.placements)
        return distribute_tensor(value, self.mesh, placements, src_data_rank=None)

    def step(self, seed: int) -> None:
        """Give every parameter the state that a step leaves; a true one compiles its operators for seconds."""
        for (key, param), value in zip(self.params.items(), _values(seed).values(), strict=True):
            moments = {"exp_avg": self.divide(key, value), "exp_avg_sq": self.divide(key, value.square())}
            self.optimizer.state[param] = {"step": torch.tensor(3.0), **moments}

    def snapshot(self, rank: int) -> Snapshot:
        counted = torch.tensor(rank)  # a buffer is each rank's
        state = snapshot_optimizer(self.optimizer, self.params)
        place = Grid(dict(zip(NAMES[-len(self.sizes) :], self.sizes, strict=True)), rank).describe()
        return shard_snapshot(Snapshot(1, {**self.params, "seen": counted}, state, place=place), rank)

    def restore(self, root: Store, comm: Any) -> None:
        loaded = load_checkpoint(root, "checkpoint-1", comm)
        model, state = loaded.read_model(), loaded.read_optimizer()
        assert state is not None
        with torch.no_grad():
            for name, param in self.params.items():
                fill_part(param, model, name)
        restore_optimizer(self.optimizer, self.params, state)
        assert model["seen"] == 0, "the first rank's"


def _local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts: dict[str, Any] = dict(tensors)
    return {name: value.to_local() if hasattr(value, "to_local") else value for name, value in parts.items()}


def _tensors(layout: Layout) -> dict[str, Tensor]:
    return _local({**layout.params, **snapshot_optimizer(layout.optimizer, layout.params).tensors})


def crossed(folder: str) -> list[str]:
    """Save under every layout, read under every layout; the pairs in which any bit differs."""
    comm = distributed.init(TrainingArguments("out", use_cpu=True))
    expected = {}
    for name in LAYOUTS:
        layout = Layout(name, 1)
        layout.step(2)
        save_checkpoint(Store.open(folder).child(name.replace(" ", "-")), layout.snapshot(comm.rank), comm)
        expected[name] = _tensors(layout)
    wrong = []
    for name in LAYOUTS:
        layout = Layout(name, 3)
        for source in LAYOUTS:
            with torch.no_grad():
                for local in _local(layout.params).values():
                    local.zero_()
            layout.restore(Store.open(folder).child(source.replace(" ", "-")), comm)
            tensors = _tensors(layout)
            if tensors.keys() != expected[name].keys():
                wrong.append(f"{source} -> {name}: names")
            wrong += [
                f"{source} -> {name}: {key}"
                for key, value in tensors.items()
                if not torch.equal(value, expected[name][key])
            ]
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    assert len(LAYOUTS) ** 2 > 150
    assert run_distributed(crossed, 4, str(folder), timeout_s=150) == [[], [], [], []]
    return folder


def test_every_pair_of_layouts_and_one_copy_of_each_element(saved: Path) -> None:
    whole = Layout("whole", 1)
    whole.step(2)
    expected: dict[str, Tensor] = {f"model/{name}": value for name, value in whole.params.items()}
    state = snapshot_optimizer(whole.optimizer, whole.params)
    expected |= {f"optimizer/{name}": value for name, value in state.tensors.items()}
    total = sum(value.numel() * value.element_size() for value in expected.values()) + 8  # the buffer
    for name, layout in LAYOUTS.items():
        root = Store.open(saved / name.replace(" ", "-"))
        if layout is None:
            continue
        loaded = load_checkpoint(root, "checkpoint-1", SingleProcess())
        tensors = {f"model/{key}": value for key, value in loaded.read_model().items()}
        snapshot = loaded.read_optimizer()
        assert snapshot is not None
        tensors |= {f"optimizer/{key}": value for key, value in snapshot.tensors.items()}
        assert tensors.pop("model/seen") == 0
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], value) for key, value in expected.items()), name
        index = json.loads(loaded.read_file("shards.json"))["tensors"]
        sizes = {"F32": 4, "I64": 8}
        written = [math.prod(block[2]) * sizes[each["dtype"]] for each in index.values() for block in each["blocks"]]
        assert sum(written) == total, name


def ranges_of_fsdp() -> list[str]:
    """What FSDP holds of a tensor-parallel one, whose parts are uneven, on every rank of eight; and of a sum."""
    wrong = []
    for replicas, tensors, size in itertools.product((2, 4), (2, 4), range(20)):
        if replicas * tensors != 8:
            continue
        for rank in range(8):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
            try:
                mesh = init_device_mesh("cpu", (replicas, tensors), mesh_dim_names=("shard", "tensor"))
                at = list(mesh.get_coordinate() or ())
                inner = _chunk(torch.arange(size), tensors, at[1])
                local = _chunk(inner, replicas, at[0])
                how = [_strided(0, tensors), Shard(0)]
                divided = DTensor.from_local(local, mesh, how, run_check=False, shape=torch.Size([size]), stride=(1,))
                held = [n for start, stop in local_part(divided, rank=rank).ranges[0] for n in range(start, stop)]
                if held != local.tolist():
                    wrong.append(f"{size} elements, {at} of {replicas} x {tensors}: {held}")
                total = DTensor.from_local(local, mesh, [Partial(), Replicate()], run_check=False)
                with pytest.raises(ConfigError, match="in a way that is not known"):
                    local_part(total, rank=rank)
            finally:
                dist.destroy_process_group()
    return wrong


def _chunk(tensor: Tensor, parts: int, index: int) -> Tensor:
    chunks = tensor.chunk(parts)
    return chunks[index] if index < len(chunks) else tensor[:0]


def test_uneven_parts_of_tensor_parallel_parts() -> None:
    assert run_distributed(ranges_of_fsdp, 1) == [[]]


def differing(folder: str) -> list[list[Any]]:
    """One value of one copy changes on one rank; a buffer differs, which it may."""
    comm = distributed.init(TrainingArguments("out", use_cpu=True))
    root, seen = Store.open(folder), list[list[Any]]()
    for place in ("odd", PLAIN, "optimizer"):
        layout = Layout("rows in groups", 1)
        layout.step(2)
        if comm.rank == 3:
            state = layout.optimizer.state
            changed: Any = state[layout.params["odd"]]["exp_avg"] if place == "optimizer" else layout.params[place]
            with torch.no_grad():
                (changed.to_local() if hasattr(changed, "to_local") else changed).view(-1)[0] += 1
        with pytest.raises(NotReproducibleError) as caught:
            save_checkpoint(root, layout.snapshot(comm.rank), comm)
        seen.append([caught.value.message, caught.value.rank, len(list_checkpoints(root))])
    return seen


def test_copies_that_differ_are_named_and_nothing_is_committed(tmp_path: Path) -> None:
    [odd, norm, state], *others = run_distributed(differing, 4, str(tmp_path))
    assert others == [[odd, norm, state]] * 3
    assert "'model/odd'" in odd[0]
    assert "between rank 1 (tensor=1, shard=0) and rank 3 (tensor=1, shard=1)" in odd[0]
    assert "'model/norm'" in norm[0]
    assert "rank 0 (tensor=0, shard=0)" in norm[0]
    assert "'optimizer/odd/exp_avg'" in state[0]
    assert [each[1:] for each in (odd, norm, state)] == [[3, 0]] * 3
