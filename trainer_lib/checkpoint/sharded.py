"""Sharded tensors in a checkpoint: every rank writes its rows, any number of ranks reads the rows that it needs.

``shards/rank-<n>.safetensors`` holds the rows (of dimension 0) that rank n held, under ``model/<name>`` and
``optimizer/<name>``. ``shards.json`` is the index: for every tensor its dtype, its shape and where its rows are::

    {"tensors": {name: {"dtype": "F32", "shape": [...], "chunks": [[file, first row, rows, position, sha256], ...]}},
     "tied": {other name: name}}

A chunk is the rows of one tensor in one file. Chunks are read whole and compared with their digests, the index with
the commit, so no byte is used that was not committed, although no rank reads whole files. No collective carries a
tensor. (torch.distributed.checkpoint divides tensors in the same way; its index is a pickle.)
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trainer_lib.checkpoint.layout import SHARD_INDEX, damaged_file, shard_file
from trainer_lib.checkpoint.tensors import DTYPES, dtype_name, is_shape, view_bytes, write_safetensors
from trainer_lib.distributed.sharding import Rows, is_sharded, local_rows
from trainer_lib.storage import FileEntry, Store

_BLOCK = 64 * 2**20
"""Bytes that are requested at a time (at least one chunk): remote stores serve the ranges of a block in parallel."""


@dataclass(frozen=True)
class LocalShard:
    """The rows that this rank writes.

    Attributes:
        rows: ``<group>/<name>`` → this rank's rows. Of rows that several ranks hold, only the first rank has them; rank
            0 has every name, because it states the shapes.
        tied: other name → the name that the tensor is stored under.
    """

    rows: Mapping[str, Rows]
    tied: Mapping[str, str]


def is_any_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any of the tensors (name → `[...]`) is sharded; equal on every rank."""
    return any(map(is_sharded, tensors.values()))


def collect_local_rows(groups: Mapping[str, Mapping[str, Tensor]], rank: int) -> LocalShard:
    """Collect this rank's rows of groups of tensors (group → name → `[rows, ...]`), under ``<group>/<name>``.

    Raises:
        ConfigError: a tensor is sharded along another dimension than its first.
    """
    rows: dict[str, Rows] = {}
    tied: dict[str, str] = {}
    kept: dict[int, str] = {}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            full = f"{group}/{name}"
            # Ties are found by object: every rank sees the same ones, whereas addresses differ from rank to rank.
            if (first := kept.setdefault(id(tensor), full)) != full:
                tied[full] = first
                continue
            held = local_rows(tensor, rank=rank)
            # A replicated tensor is written once. Rank 0 keeps all of them for the index, which needs every shape.
            if held.is_first_copy or rank == 0:
                rows[full] = held
    return LocalShard(rows, tied)


def write_shard(store: Store, parts: LocalShard, rank: int) -> tuple[FileEntry, dict[str, Any]]:
    """Write this rank's file; returns its entry and this rank's part of the index (JSON, for `build_index`).

    Raises:
        ConfigError: a tensor cannot be written, as `write_safetensors` raises it.
        StorageError: the store cannot be written.
    """
    file = shard_file(rank)
    own = {name: rows.values for name, rows in parts.rows.items() if rows.is_first_copy and rows.values.numel()}
    with store.open_write(file) as writer:
        positions = write_safetensors(writer, own)
    chunks = {}
    for name, values in own.items():
        rows = parts.rows[name]
        # One digest a chunk: a rank that reads some rows can check them alone.
        digest = hashlib.sha256(view_bytes(values)).hexdigest()
        chunks[name] = [file, rows.start, len(values) if values.ndim else 1, positions[name], digest]
    specs = {name: [dtype_name(name, rows.values), list(rows.shape)] for name, rows in parts.rows.items()}
    return writer.entry, {"chunks": chunks, "specs": specs if rank == 0 else {}, "tied": dict(parts.tied)}


def build_index(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the index from what `write_shard` returned on every rank, in rank order."""
    first = shards[0]
    tensors: dict[str, Any] = {
        name: {"dtype": dtype, "shape": shape, "chunks": []} for name, (dtype, shape) in first["specs"].items()
    }
    for shard in shards:
        for name, chunk in shard["chunks"].items():
            tensors[name]["chunks"].append(chunk)
    for tensor in tensors.values():  # in the order of the rows, which need not be that of the ranks
        tensor["chunks"].sort(key=lambda chunk: chunk[1])
    return {"tensors": tensors, "tied": first["tied"]}


@dataclass(frozen=True)
class _Chunk:
    """Rows [start, start + rows) of one tensor: `rows * row_bytes` bytes of `file` from `position` on."""

    file: str
    start: int
    rows: int
    position: int
    sha256: str


@dataclass(frozen=True)
class _Spec:
    """The index's entry of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of a tensor without dimensions, of its one value."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def find_chunks(self, start: int, stop: int) -> list[_Chunk]:
        """The chunks that hold any of the rows [start, stop)."""
        # They are in the order of the rows, without gap or overlap.
        first = max(0, bisect_right(self.chunks, start, key=lambda chunk: chunk.start) - 1)
        end = bisect_left(self.chunks, stop, key=lambda chunk: chunk.start)
        return [chunk for chunk in self.chunks[first:end] if chunk.start + chunk.rows > start]


class ShardedTensors(Mapping[str, Tensor]):
    """The tensors of one group, read when they are asked for, whole or by rows.

    A request in the order of the names is fastest, because the chunks that follow are fetched along.

    Raises:
        DamagedError: the index contradicts itself or the committed files.
    """

    def __init__(self, store: Store, group: str, index: Any, files: Mapping[str, FileEntry]) -> None:
        self._store = store
        self._where = f"{store.url}/{SHARD_INDEX}"
        prefix = f"{group}/"
        try:
            tensors = {name: _spec(one, files) for name, one in index["tensors"].items() if name.startswith(prefix)}
            tied = {name: first for name, first in index["tied"].items() if name.startswith(prefix)}
            specs = tensors | {name: tensors[first] for name, first in tied.items()}
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise damaged_file(self._where, "it is not an index that trainflow writes") from error
        self._specs = {name.removeprefix(prefix): spec for name, spec in specs.items()}
        # Requests (name, first row, end) that are likely to come, in order: they are fetched ahead.
        self._expected: list[tuple[str, int, int]] = [(name, 0, _num_rows(one)) for name, one in self._specs.items()]
        self._ready: dict[_Chunk, Tensor] = {}

    def read_spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor, without reading it."""
        return self._specs[name].dtype, self._specs[name].shape

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a tensor: a new tensor `[stop - start, ...]` on the CPU, in its saved dtype.

        Raises:
            DamagedError: a chunk is not as it was committed.
            StorageError: the store cannot be read.
        """
        spec = self._specs[name]
        chunks = spec.find_chunks(start, stop) if spec.row_bytes else []
        if any(chunk not in self._ready for chunk in chunks):
            # Rows that are not at hand yet; a request in the expected order finds them fetched.
            self._fetch(name, start, stop)
        # Every row lies in exactly one chunk (`_spec` has checked that), so all of `out` is filled.
        out = torch.empty((stop - start, *spec.shape[1:]), dtype=spec.dtype)
        for chunk in chunks:
            low, high = max(start, chunk.start), min(stop, chunk.start + chunk.rows)
            values = self._ready[chunk].view(spec.dtype).reshape(chunk.rows, *spec.shape[1:])
            out[low - start : high - start] = values[low - chunk.start : high - chunk.start]
        return out

    @override
    def __getitem__(self, name: str) -> Tensor:
        return self.read_rows(name, 0, _num_rows(self._specs[name])).reshape(self._specs[name].shape)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    @override
    def __len__(self) -> int:
        return len(self._specs)

    def _fetch(self, name: str, start: int, stop: int) -> None:
        """Read the chunks of a request, and of the requests expected after it until a block is full."""
        wanted: dict[_Chunk, int] = {}
        for other, low, high in self._following(name, start, stop):
            spec = self._specs[other]
            wanted.update(
                (chunk, chunk.rows * spec.row_bytes) for chunk in spec.find_chunks(low, high) if spec.row_bytes
            )
            if sum(wanted.values()) >= _BLOCK:
                break
        # The blocks before are dropped: a reader that asks in order does not need them again.
        self._ready = {chunk: torch.empty(size, dtype=torch.uint8) for chunk, size in wanted.items()}
        by_file: dict[str, list[tuple[int, memoryview]]] = {}
        for chunk, values in self._ready.items():
            by_file.setdefault(chunk.file, []).append((chunk.position, values.numpy().data))
        for file, parts in by_file.items():
            self._store.read_into(file, parts)
        for chunk, values in self._ready.items():
            if hashlib.sha256(values.numpy().data).hexdigest() != chunk.sha256:
                raise damaged_file(f"{self._store.url}/{chunk.file}", "its rows are not the committed ones")

    def _following(self, name: str, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        request = (name, start, stop)
        yield request
        # A request that was not expected says nothing about the next one, so nothing is fetched along.
        if request in self._expected:
            del self._expected[: self._expected.index(request) + 1]
            yield from self._expected


def _num_rows(spec: _Spec) -> int:
    return spec.shape[0] if spec.shape else 1


def _spec(record: Mapping[str, Any], files: Mapping[str, FileEntry]) -> _Spec:
    """Parse one tensor of an index; ValueError and the like unless its chunks are its rows without gap or overlap."""
    shape = record["shape"]
    if not is_shape(shape):
        raise TypeError("shape")
    spec = _Spec(DTYPES[record["dtype"]], tuple(shape), tuple(_Chunk(*chunk) for chunk in record["chunks"]))
    row = 0
    for chunk in spec.chunks:
        numbers = (chunk.start, chunk.rows, chunk.position)
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or chunk.start != row:
            raise ValueError("rows")
        if not isinstance(chunk.sha256, str):
            raise TypeError("digest")
        if chunk.position + chunk.rows * spec.row_bytes > files[chunk.file].size:
            raise ValueError("position")
        row += chunk.rows
    # Without any elements there is nothing to miss.
    if row != _num_rows(spec) and math.prod(shape):
        raise ValueError("rows are missing")
    return spec
