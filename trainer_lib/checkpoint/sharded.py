"""A checkpoint that every rank writes its part of and any number of ranks reads: an index over safetensors files.

``shards/rank-<n>.safetensors`` holds the rows (of dimension 0) that lay on rank n, under ``model/<name>`` and
``optimizer/<name>``; ``shards.json`` says of every tensor its dtype, its shape and where its rows are::

    {"tensors": {name: {"dtype": "F32", "shape": [...], "chunks": [[file, first row, rows, position, sha256], ...]}},
     "tied": {other name: name}}

A reader asks for the rows it needs. Chunks are read whole and compared with their digests, the index with the commit,
so no byte is used that was not committed, although no rank reads whole files. No collective carries a tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpoint.layout import SHARD_INDEX, shard_file
from trainer_lib.checkpoint.tensors import DTYPES, damaged_file, dtype_name, is_shape, view_bytes, write_safetensors
from trainer_lib.sharding import Rows, is_sharded, local_rows
from trainer_lib.storage import FileEntry, Store

_BLOCK = 64 * 2**20
"""Bytes that are asked for at a time, at least one chunk: remote stores serve the ranges of a block side by side."""


@dataclass(frozen=True)
class LocalShard:
    """What this rank writes.

    Attributes:
        rows: name → this rank's rows; of a tensor that several ranks hold, on the first of them only. Rank 0 has all
            names, for their shapes.
        tied: other name → the name that a tensor is kept under.
    """

    rows: Mapping[str, Rows]
    tied: Mapping[str, str]


def is_any_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Whether some of them are divided over ranks. The same on every rank."""
    return any(map(is_sharded, tensors.values()))


def collect_local_rows(groups: Mapping[str, Mapping[str, Tensor]], rank: int) -> LocalShard:
    """This rank's part of groups of tensors, all under ``<group>/<name>``."""
    rows: dict[str, Rows] = {}
    tied: dict[str, str] = {}
    kept: dict[int, str] = {}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            full = f"{group}/{name}"
            # The same object under several names on every rank alike: memory would tell rank by rank.
            if (first := kept.setdefault(id(tensor), full)) != full:
                tied[full] = first
                continue
            held = local_rows(tensor, rank=rank)
            if held.is_first_copy or rank == 0:
                rows[full] = held
    return LocalShard(rows, tied)


def write_shard(store: Store, parts: LocalShard, rank: int) -> tuple[FileEntry, dict[str, Any]]:
    """Write this rank's file; its entry, and what the index says of it, JSON.

    Raises ConfigError and StorageError as `write_safetensors` does.
    """
    file = shard_file(rank)
    own = {name: rows.values for name, rows in parts.rows.items() if rows.is_first_copy and rows.values.numel()}
    with store.open_write(file) as writer:
        positions = write_safetensors(writer, own)
    chunks = {}
    for name, values in own.items():
        rows = parts.rows[name]
        digest = hashlib.sha256(view_bytes(values)).hexdigest()
        chunks[name] = [file, rows.start, len(values) if values.ndim else 1, positions[name], digest]
    specs = {name: [dtype_name(name, rows.values), list(rows.shape)] for name, rows in parts.rows.items()}
    return writer.entry, {"chunks": chunks, "specs": specs if rank == 0 else {}, "tied": dict(parts.tied)}


def build_index(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The index over what `write_shard` said on every rank, in rank order."""
    first = shards[0]
    tensors: dict[str, Any] = {
        name: {"dtype": dtype, "shape": shape, "chunks": []} for name, (dtype, shape) in first["specs"].items()
    }
    for shard in shards:
        for name, chunk in shard["chunks"].items():
            tensors[name]["chunks"].append(chunk)
    for tensor in tensors.values():
        tensor["chunks"].sort(key=lambda chunk: chunk[1])
    return {"tensors": tensors, "tied": first["tied"]}


@dataclass(frozen=True)
class _Chunk:
    file: str
    start: int
    rows: int
    position: int
    sha256: str


@dataclass(frozen=True)
class _Spec:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def within(self, start: int, stop: int) -> list[_Chunk]:
        return [each for each in self.chunks if each.start < stop and each.start + each.rows > start]


class ShardedTensors(Mapping[str, Tensor]):
    """The tensors of one group, read when asked for; some rows of one without the others.

    Asking in the order of the names is the fastest: what comes next is fetched along.
    """

    def __init__(self, store: Store, group: str, index: Any, files: Mapping[str, FileEntry]) -> None:
        """Raises DamagedError for an index that contradicts itself or the files that were committed."""
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
        self._expected: list[tuple[str, int, int]] = [(name, 0, _length(one)) for name, one in self._specs.items()]
        self._ready: dict[_Chunk, Tensor] = {}

    def read_spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Element type and shape of a tensor."""
        return self._specs[name].dtype, self._specs[name].shape

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop), as memory of its own. Raises DamagedError, StorageError."""
        spec = self._specs[name]
        chunks = spec.within(start, stop) if spec.row_bytes else []
        if any(chunk not in self._ready for chunk in chunks):
            self._fetch(name, start, stop)
        out = torch.empty((stop - start, *spec.shape[1:]), dtype=spec.dtype)
        for chunk in chunks:
            low, high = max(start, chunk.start), min(stop, chunk.start + chunk.rows)
            values = self._ready[chunk].view(spec.dtype).reshape(chunk.rows, *spec.shape[1:])
            out[low - start : high - start] = values[low - chunk.start : high - chunk.start]
        return out

    def __getitem__(self, name: str) -> Tensor:
        return self.read_rows(name, 0, _length(self._specs[name])).reshape(self._specs[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def _fetch(self, name: str, start: int, stop: int) -> None:
        """The chunks of a request, and of as many that are expected after it as make a block."""
        wanted: dict[_Chunk, int] = {}
        for other, low, high in self._following(name, start, stop):
            spec = self._specs[other]
            wanted.update((chunk, chunk.rows * spec.row_bytes) for chunk in spec.within(low, high) if spec.row_bytes)
            if sum(wanted.values()) >= _BLOCK:
                break
        self._ready = {chunk: torch.empty(size, dtype=torch.uint8) for chunk, size in wanted.items()}
        by_file: dict[str, list[tuple[int, memoryview]]] = {}
        for chunk, values in self._ready.items():
            by_file.setdefault(chunk.file, []).append((chunk.position, values.numpy().data))
        for file, parts in by_file.items():
            self._store.read_into(file, parts)
        for chunk, values in self._ready.items():
            if hashlib.sha256(values.numpy().data).hexdigest() != chunk.sha256:
                raise damaged_file(f"{self._store.url}/{chunk.file}", "rows of it are not those that were committed")

    def _following(self, name: str, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        request = (name, start, stop)
        yield request
        if request in self._expected:
            del self._expected[: self._expected.index(request) + 1]
            yield from self._expected


def _length(spec: _Spec) -> int:
    return spec.shape[0] if spec.shape else 1


def _spec(record: Mapping[str, Any], files: Mapping[str, FileEntry]) -> _Spec:
    """One tensor of an index; ValueError and the like unless its chunks are its rows, one after another."""
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
    if row != _length(spec) and math.prod(shape):
        raise ValueError("rows are missing")
    return spec
