"""Blocks of tensors: whatever boxes were written, any box is read from them, exactly and in little memory."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.checkpoints import save
from trainer_lib.checkpoint import sharded
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.sharded import LocalShard, ShardedTensors, build_index, find_gap, write_shard
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.distributed.sharding import Box, LocalPart, _share, whole_box
from trainer_lib.errors import DamagedError
from trainer_lib.storage import Store

NAME = "model/w"
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Two or three elements for each digest, few blocks for each request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "_DIGESTED", 12)
        patch.setattr(sharded, "_AHEAD", 64)
        yield


def divide(box: Box, draw: random.Random, cuts: int) -> list[Box]:
    """Cut a box at random places into up to 2^cuts boxes."""
    wide = [dim for dim, size in enumerate(box.shape) if size > 1]
    if not cuts or not wide:
        return [box]
    dim = draw.choice(wide)
    at = draw.randint(1, box.shape[dim] - 1)
    low = Box(box.offset, (*box.shape[:dim], at, *box.shape[dim + 1 :]))
    offset = (*box.offset[:dim], box.offset[dim] + at, *box.offset[dim + 1 :])
    high = Box(offset, (*box.shape[:dim], box.shape[dim] - at, *box.shape[dim + 1 :]))
    return divide(low, draw, cuts - 1) + divide(high, draw, cuts - draw.randint(1, 2) if cuts > 1 else 0)


def inside(shape: tuple[int, ...], draw: random.Random) -> Box:
    starts = [draw.randint(0, size) for size in shape]
    return Box(tuple(starts), tuple(draw.randint(0, size - start) for size, start in zip(shape, starts, strict=True)))


def written(store: Store, whole: Tensor, boxes: list[Box]) -> ShardedTensors:
    """The tensor as ranks wrote it, each a box."""
    shape = tuple(whole.shape)
    shards, files = [], {}
    for rank, box in enumerate(boxes):
        ranges = tuple(((start, start + size),) for start, size in zip(box.offset, box.shape, strict=True))
        parts = {NAME: LocalPart(box.view(whole, whole_box(shape)), shape, ranges, True)}
        entry, said = write_shard(store, LocalShard(parts, {}), rank)
        files[entry.path] = entry
        shards.append(said)
    return ShardedTensors(store, "model", json.loads(json.dumps(build_index(shards))), files)


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=4), seed=st.integers(0, 2**32), cuts=st.integers(0, 3))
def test_any_box_is_read_from_any_division(shape: list[int], seed: int, cuts: int) -> None:
    draw = random.Random(seed)
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    boxes = divide(whole_box(shape), draw, cuts)
    store = Store.open(f"memory://blocks/{seed}")
    try:
        tensors = written(store, whole, boxes)
        requests = [inside(tuple(shape), draw) for _ in range(4)]
        for request, read in zip(requests, tensors.read_boxes("w", requests), strict=True):
            assert torch.equal(read, request.view(whole, whole_box(shape)))
            # The intersections are every element of the request once.
            common = [box.overlap(request) for box in boxes]
            assert sum(box.numel for box in common if box is not None) == request.numel
        assert torch.equal(tensors["w"], whole)
        with store.open_write("one.safetensors") as writer:
            tensors.write_file(writer)
        assert torch.equal(read_safetensors(store, "one.safetensors")["w"], whole)
        assert tensors.read_spec("w") == (torch.float32, tuple(shape))
    finally:
        store.delete_tree()
    assert find_gap(shape, boxes) is None
    if whole.numel():
        assert find_gap(shape, boxes[1:]) == "a block is missing"
        assert find_gap(shape, [*boxes, boxes[0]]) == "two blocks overlap"
        assert find_gap([*shape, 1], boxes) == "a block has another number of dimensions"
        if shape:
            moved = Box((boxes[0].offset[0] + 1, *boxes[0].offset[1:]), boxes[0].shape)
            assert find_gap(shape, [moved, *boxes[1:]]) is not None


@settings(max_examples=100, deadline=None)
@given(size=st.integers(0, 40), parts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=3))
def test_the_ranges_of_every_process_are_those_that_torch_gives_it(size: int, parts: list[tuple[int, int]]) -> None:
    """`parts`: for each dimension of the mesh its size, and the pieces of a strided shard (1 for a plain one)."""
    everything = []
    for indices in itertools.product(*(range(count) for count, _ in parts)):
        ranges: tuple[tuple[int, int], ...] = ((0, size),)
        elements = torch.arange(size)
        for (count, pieces), index in zip(parts, indices, strict=True):
            ranges = _share(ranges, count, index, pieces)
            elements = torch.cat([
                (*piece.chunk(count), *[piece[:0]] * count)[index] for piece in elements.chunk(pieces)
            ])  # fmt: skip
        held = [number for start, stop in ranges for number in range(start, stop)]
        assert held == elements.tolist()
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ranges) if stop <= start)
        everything += held
    assert sorted(everything) == list(range(size))


def memory(name: str) -> int:
    """MiB of this process: its memory now (`VmRSS`), or the peak (`VmHWM`)."""
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name))) // 1024


def test_a_model_in_blocks_becomes_one_file_in_flat_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 MiB of weights, requests of 4 MiB."""
    store = Store.open(tmp_path)
    monkeypatch.setattr(sharded, "_DIGESTED", MIB)
    monkeypatch.setattr(sharded, "_AHEAD", 4 * MIB)
    whole = torch.arange(64 * MIB // 4, dtype=torch.float32).reshape(-1, 64)
    half = len(whole) // 2
    shards, files = [], {}
    for rank in range(4):  # two-dimensional blocks
        rows, columns = (rank // 2 * half, rank // 2 * half + half), (rank % 2 * 32, rank % 2 * 32 + 32)
        values = whole[rows[0] : rows[1], columns[0] : columns[1]]
        parts = {f"model/{name}": LocalPart(values, tuple(whole.shape), ((rows,), (columns,)), True) for name in "ab"}
        entry, said = write_shard(store, LocalShard(parts, {"model/tied": "model/b"}), rank)
        files[entry.path] = entry
        shards.append(said)
    index = build_index(shards)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    with store.open_write("model.safetensors") as writer:
        ShardedTensors(store, "model", index, files).write_file(writer)
    assert memory("VmHWM") - before < 40
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert sorted(tensors) == ["a", "b"]
    assert all(torch.equal(value, whole) for value in tensors.values())


def test_whole_tensors_are_read_one_by_one_and_compared_again(tmp_path: Path) -> None:
    """As where processes share a model that was saved whole: none of them holds all of it."""
    root = Store.open(tmp_path)
    save(root)
    whole = load_checkpoint(root, "checkpoint-2", SingleProcess())
    singly = load_checkpoint(root, "checkpoint-2", SingleProcess())
    singly.reads_singly = True
    (model, state), (expected, full) = ((each.read_model(), each.read_optimizer()) for each in (singly, whole))
    assert state is not None
    assert full is not None
    for tensors, others in ((model, expected), (state.tensors, full.tensors)):
        assert isinstance(tensors, ShardedTensors) and tensors.keys() == others.keys()
        assert all(torch.equal(tensors[name], value) for name, value in others.items())
        assert all(tensors.read_spec(name) == (value.dtype, tuple(value.shape)) for name, value in others.items())
    model, path = singly.read_model(), tmp_path / "checkpoint-2" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # after it was compared
    with pytest.raises(DamagedError, match="is not the committed one"):
        dict(model)
