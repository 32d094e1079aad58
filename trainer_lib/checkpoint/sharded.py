"""Sharded tensors in a checkpoint: every rank writes its blocks, any number of ranks reads the blocks that it needs.

``shards/rank-<n>.safetensors`` holds the blocks that rank n held, under ``model/<name>`` and ``optimizer/<name>`` (a
second one of the same tensor under ``1/model/<name>``). ``shards.json`` is the index: for every tensor its dtype, its
shape and where its blocks are, whose offset and shape have a number for each dimension::

    {"tensors": {name: {"dtype": "F32", "shape": [...], "blocks": [[file, offset, shape, position, sha256], ...]}},
     "tied": {other name: name}}

The blocks of a tensor are all of its elements, without gap or overlap: of every element that several ranks hold the
first one writes it, and the others' digests are compared before the commit. Blocks are read whole and compared with
their digests, the index with the commit, so no byte is used that was not committed, although no rank reads whole files.
No collective carries a tensor. (torch.distributed.checkpoint divides tensors in the same way; its index is a pickle.)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.checkpoint.layout import SHARD_INDEX, damaged_file, shard_file
from trainer_lib.checkpoint.tensors import (
    DTYPES,
    dtype_name,
    is_shape,
    open_safetensors,
    view_bytes,
    write_header,
    write_safetensors,
)
from trainer_lib.distributed.communicator import Communicator, run_on_all_ranks
from trainer_lib.distributed.sharding import Box, LazyTensors, LocalPart, is_sharded, local_part, whole_box
from trainer_lib.errors import InfrastructureError, NotReproducibleError
from trainer_lib.storage import DigestingWriter, FileEntry, Store

_AHEAD = 64 * 2**20
"""Bytes that are requested at a time (at least one block): remote stores serve the ranges of a request in parallel."""
_DIGESTED = 16 * 2**20
"""Bytes of a block (at least one row) that have one digest: who needs some rows reads little more than these."""


@dataclass(frozen=True)
class LocalShard:
    """The part that this rank writes, or compares with that of another rank."""

    # ``<group>/<name>`` → this rank's part. Rank 0 has every name, because it states the shapes.
    parts: Mapping[str, LocalPart]
    tied: Mapping[str, str]  # other name → the name that the tensor is stored under
    place: str = ""  # this rank's coordinates in the mesh, as an error names them: "tensor=1, shard=0"


def collect_local_parts(groups: Mapping[str, Mapping[str, Tensor]], rank: int, place: str = "") -> LocalShard:
    """This rank's part of groups of tensors (group → name → `[...]`), under ``<group>/<name>``. Raises ConfigError."""
    parts: dict[str, LocalPart] = {}
    tied: dict[str, str] = {}
    kept: dict[int, str] = {}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            full = f"{group}/{name}"
            # Ties are found by object: every rank sees the same ones, whereas addresses differ from rank to rank.
            if (first := kept.setdefault(id(tensor), full)) != full:
                tied[full] = first
                continue
            part = local_part(tensor, rank=rank)
            # Rank 0 keeps all of them for the index, which needs every shape.
            if part.is_first_copy or rank == 0 or _is_equal_everywhere(name, tensor, groups.get("model", {})):
                parts[full] = part
    return LocalShard(parts, tied, place)


def _is_equal_everywhere(name: str, tensor: Tensor, model: Mapping[str, Tensor]) -> bool:
    """Whether ranks must hold equal copies: of parameters and their state, whereas buffers may count on each rank."""
    param = model.get(name) if name in model else model.get(name.rpartition("/")[0])
    return is_sharded(tensor) or (isinstance(param, nn.Parameter) and param.shape == tensor.shape)


def write_shard(store: Store, shard: LocalShard, rank: int) -> tuple[FileEntry, dict[str, Any]]:
    """Write this rank's file; returns its entry, and JSON for `build_index`. Raises ConfigError and StorageError."""
    file = shard_file(rank)
    stored: dict[str, Tensor] = {}
    for name, part in shard.parts.items():
        if part.is_first_copy:
            stored |= {f"{n}/{name}" if n else name: values for n, (_, values) in enumerate(part.boxes())}
    with store.open_write(file) as writer:
        positions = write_safetensors(writer, stored)
    blocks: dict[str, list[Any]] = {}  # of a copy without a file: its digest is compared
    for name, part in shard.parts.items():
        for number, (box, values) in enumerate(part.boxes()):
            begin = positions.get(f"{number}/{name}" if number else name, 0)
            for rows, start in _split_rows(box, values.element_size()):
                digest = hashlib.sha256(view_bytes(rows.view(values, box))).hexdigest()
                place = (list(rows.offset), list(rows.shape), begin + start)
                blocks.setdefault(name, []).append([file if part.is_first_copy else "", *place, digest])
    specs = {name: [dtype_name(name, part.values.dtype), list(part.shape)] for name, part in shard.parts.items()}
    record = {"blocks": blocks, "specs": specs if rank == 0 else {}, "tied": dict(shard.tied)}
    return writer.entry, {**record, "place": shard.place}


def _split_rows(box: Box, itemsize: int) -> Iterator[tuple[Box, int]]:
    """Yield the parts of a box that have one digest, and the first byte of each in the box."""
    if not box.shape:
        yield box, 0
        return
    row_bytes = math.prod(box.shape[1:]) * itemsize
    rows = max(1, _DIGESTED // max(1, row_bytes))
    for first in range(0, box.shape[0] if row_bytes else 0, rows):
        shape = (min(rows, box.shape[0] - first), *box.shape[1:])
        yield Box((box.offset[0] + first, *box.offset[1:]), shape), first * row_bytes


def index_file(store: Store, rel: str, group: str, expect: FileEntry) -> dict[str, Any]:
    """The index of a file of whole tensors, all of which is read and compared, so that they can be read one by one."""
    tensors: dict[str, Any] = {}
    with open_safetensors(store, rel, expect) as (reader, header):
        for name, (dtype, shape, begin, _) in sorted(header.items(), key=lambda item: item[1][2]):
            blocks = []
            for box, start in _split_rows(whole_box(shape), dtype.itemsize):
                values = reader.tensor(dtype, list(box.shape), 0, box.numel * dtype.itemsize)
                digest = hashlib.sha256(view_bytes(values)).hexdigest()
                blocks.append([rel, list(box.offset), list(box.shape), reader.start + begin + start, digest])
            tensors[f"{group}/{name}"] = {"dtype": dtype_name(name, dtype), "shape": shape, "blocks": blocks}
    tied = {f"{group}/{alias}": f"{group}/{name}" for alias, name in reader.aliases.items()}
    return {"tensors": tensors, "tied": tied}


def build_index(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the index from what `write_shard` returned on every rank, in rank order.

    Raises NotReproducibleError for ranks that differ, InfrastructureError for elements that are not written once.
    """
    specs = shards[0]["specs"].items()
    tensors: dict[str, Any] = {name: {"dtype": dtype, "shape": shape, "blocks": []} for name, (dtype, shape) in specs}
    for shard in shards:
        for name, blocks in shard["blocks"].items():
            tensors[name]["blocks"] += [block for block in blocks if block[0]]
    for name, tensor in tensors.items():
        boxes = [Box(tuple(offset), tuple(shape)) for _, offset, shape, _, _ in tensor["blocks"]]
        if problem := find_gap(tensor["shape"], boxes):
            what = f"The processes did not write the tensor {name!r} once: {problem}."
            remedy = "Build the same model with the same layout on every process."
            raise InfrastructureError(what, field="model", remedy=remedy)
    _compare_copies(tensors, shards)
    return {"tensors": tensors, "tied": shards[0]["tied"]}


def _compare_copies(tensors: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> None:
    written = {(name, str(block[1:3])): block for name, tensor in tensors.items() for block in tensor["blocks"]}
    copies = ((rank, *item) for rank, shard in enumerate(shards) for item in shard["blocks"].items())
    for rank, name, blocks in copies:
        for _, offset, shape, _, digest in blocks:
            file, *_, expected = written.get((name, str([offset, shape])), [""])
            if digest != expected:
                first = next((n for n in range(len(shards)) if shard_file(n) == file), 0)
                places = [shards[n]["place"] for n in (first, rank)]
                raise _differing_copies(f"{name!r} from {offset} on", (first, rank), places)


def _differing_copies(what: str, ranks: tuple[int, int], places: Sequence[str]) -> NotReproducibleError:
    here, there = (f"rank {rank} ({place or 'no mesh'})" for rank, place in zip(ranks, places, strict=True))
    return NotReproducibleError(
        f"Two processes that should hold the same values do not: {what} differs between {here} and {there}.",
        field="model",
        rank=ranks[1],
        remedy="Resume from the checkpoint before; look for a parameter that is changed on one process only, a failing"
        " device, or an operation that is not deterministic.",
    )


# -- whole tensors, which every rank holds and the first one writes ----------------------------------------------------


def digest_copies(params: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, int]:
    """Digest parameters (name → `[...]`) and their state in the same shape (name/key → `[...]`).

    A digest is the sum of a tensor's words of 64 bits: any word that changes changes it, and no copy is made. Tensors
    that are divided, without values, or of a subclass are left out.
    """
    wanted = {f"model/{name}": tensor for name, tensor in params.items()}
    wanted |= {
        f"optimizer/{name}": tensor
        for name, tensor in state.items()
        if (param := params.get(name.rpartition("/")[0])) is not None and param.shape == tensor.shape
    }
    plain = {
        name: tensor.detach()
        for name, tensor in wanted.items()
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type in ("cpu", "cuda")
    }
    sums = [_sum_words(tensor) for tensor in plain.values()]
    totals = torch.stack([total.to(sums[0].device) for total in sums]).tolist() if sums else []
    return dict(zip(plain, totals, strict=True))


def _sum_words(tensor: Tensor) -> Tensor:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    end = data.numel() // 8 * 8
    return data[:end].view(torch.int64).sum() + data[end:].sum()


def compare_copies(comm: Communicator, digests: Mapping[str, int], place: str) -> None:
    """Compare what `digest_copies` returned on every rank. Collective. Raises NotReproducibleError on all of them."""
    ours = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    gathered = comm.gather_json(ours)
    differ = comm.broadcast_json(gathered is not None and len(set(gathered)) > 1)
    if not differ:
        return
    everything = comm.gather_json([dict(digests), place])  # only now, since names are many bytes
    run_on_all_ranks(comm, lambda: _compare_digests(everything or []))


def _compare_digests(ranks: Sequence[tuple[Mapping[str, int], str]]) -> None:
    for rank, (digests, place) in enumerate(ranks):
        first, first_place = ranks[0]
        for name, digest in digests.items():
            if first.get(name, digest) != digest:
                raise _differing_copies(repr(name), (0, rank), (first_place, place))


def find_gap(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """The reason why boxes are not every element of a tensor of this shape once; None when they are."""
    boxes = [box for box in boxes if box.numel]
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        return "a block has another number of dimensions"
    if any(start + size > full for box in boxes for start, size, full in zip(*box, shape, strict=True)):
        return "a block lies outside of it"
    starts = np.array([box.offset for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    sizes = np.array([box.shape for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    if _do_overlap(starts, starts + sizes):
        return "two blocks overlap"
    return None if sum(box.numel for box in boxes) == math.prod(shape) else "a block is missing"


def _do_overlap(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> bool:
    """Whether any two of the boxes [starts, ends), each `[boxes, dimensions]`, have an element in common."""
    for axis in range(starts.shape[1]):
        order = np.argsort(starts[:, axis], kind="stable")
        reach = np.maximum.accumulate(ends[order, axis])
        # Where no box crosses: boxes of the two sides cannot meet.
        borders = np.flatnonzero(reach[:-1] <= starts[order[1:], axis]) + 1
        if len(borders):
            sides = np.split(order, borders) if len(borders) + 1 < len(order) else []
            return any(_do_overlap(starts[side], ends[side]) for side in sides if len(side) > 1)
    return any(bool(((starts[n] < ends[:n]) & (starts[:n] < ends[n])).all(axis=1).any()) for n in range(1, len(starts)))


class _Block(NamedTuple):
    """A box of the tensor `name`: `size` bytes of `file` from `position` on."""

    name: str
    box: Box
    size: int
    file: str
    position: int
    sha256: str


@dataclass(frozen=True)
class _Spec:
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[_Block, ...]


class ShardedTensors(LazyTensors):
    """The tensors of one group, read when they are asked for, whole or by boxes. Raises DamagedError for a wrong index.

    A request in the order of the names is fastest, because the blocks that follow are fetched along.
    """

    def __init__(self, store: Store, group: str, index: Any, files: Mapping[str, FileEntry]) -> None:
        self._store = store
        where = f"{store.url}/{SHARD_INDEX}"
        prefix, name = f"{group}/", ""
        specs: dict[str, _Spec] = {}
        try:
            for name, record in index["tensors"].items():
                if name.startswith(prefix):
                    specs[name] = _spec(name, record, files)
            for name, first in index["tied"].items():
                if name.startswith(prefix):
                    specs[name] = specs[first]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"it is not an index that trainflow writes ({name!r}: {str(error)[:200]})"
            raise damaged_file(where, reason) from error
        self._specs = {name.removeprefix(prefix): spec for name, spec in specs.items()}
        super().__init__(self._specs)
        # Names that are likely to be asked for whole, in order: their blocks are fetched ahead.
        self._expected = list(self._specs)
        self._ready: dict[_Block, Tensor] = {}

    def read_spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor, without reading it."""
        return self._specs[name].dtype, self._specs[name].shape

    def read_boxes(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        """Read boxes of a tensor: new tensors `[*box.shape]` on the CPU, in its saved dtype. Raises DamagedError."""
        spec = self._specs[name]
        # Every element lies in exactly one block (`_spec` has checked that), so all of them are filled.
        made = [torch.empty(box.shape, dtype=spec.dtype) for box in boxes]
        needed = [block for block in spec.blocks if any(block.box.overlap(box) for box in boxes)]
        following = self._following(name, boxes)
        for number, block in enumerate(needed):
            if block not in self._ready:
                self._fetch(itertools.chain(needed[number:], following))
            values = self._ready[block].view(spec.dtype).reshape(block.box.shape)
            for box, target in zip(boxes, made, strict=True):
                if (common := box.overlap(block.box)) is not None:
                    common.view(target, box).copy_(common.view(values, block.box))
        return made

    def write_file(self, writer: DigestingWriter) -> None:
        """Write all tensors into one safetensors file, some rows at a time: the memory does not grow with the model."""
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(spec), name) for name, spec in self._specs.items()}
        specs = {name: self.read_spec(name) for name, stored in names.items() if name == stored}
        aliases = {name: stored for name, stored in names.items() if name != stored}
        self._expected = [name for name in write_header(writer, specs, aliases) if name in specs]
        for name in list(self._expected):
            for box in self._slabs(self._specs[name]):
                writer.write(view_bytes(self.read_boxes(name, [box])[0]))

    @staticmethod
    def _slabs(spec: _Spec) -> Iterator[Box]:
        """Yield boxes of whole rows, in order, that end where blocks end: no block is read for two of them."""
        rows = spec.shape[0] if spec.shape else 1
        if not math.prod(spec.shape):
            return
        most = max(1, _AHEAD // (math.prod(spec.shape[1:]) * spec.dtype.itemsize))
        if not spec.shape or rows <= most:
            yield whole_box(spec.shape)
            return
        start = 0
        for border in sorted({block.box.offset[0] for block in spec.blocks} | {rows}):
            if border - start >= most or border == rows:
                yield Box((start, *[0] * (len(spec.shape) - 1)), (border - start, *spec.shape[1:]))
                start = border

    @override
    def __getitem__(self, name: str) -> Tensor:
        return self.read_boxes(name, [whole_box(self._specs[name].shape)])[0]

    def _fetch(self, blocks: Iterable[_Block]) -> None:
        """Read the first of some blocks, and those after it until enough are at hand; those before are dropped."""
        self._ready, taken = {}, 0
        for block in blocks:
            if taken and taken + block.size > _AHEAD:
                break
            taken += block.size
            self._ready[block] = torch.empty(block.size, dtype=torch.uint8)
        by_file: dict[str, list[tuple[int, memoryview]]] = {}
        for block, values in self._ready.items():
            by_file.setdefault(block.file, []).append((block.position, values.numpy().data))
        for file, parts in by_file.items():
            self._store.read_into(file, parts)
        for block, values in self._ready.items():
            if hashlib.sha256(values.numpy().data).hexdigest() != block.sha256:
                what = f"its block of {block.name!r} from {list(block.box.offset)} on is not the committed one"
                raise damaged_file(f"{self._store.url}/{block.file}", what)

    def _following(self, name: str, boxes: Sequence[Box]) -> Iterable[_Block]:
        # A request that was not expected says nothing about the next one, so nothing is fetched along.
        if name not in self._expected or list(boxes) != [whole_box(self._specs[name].shape)]:
            return ()
        del self._expected[: self._expected.index(name) + 1]
        return itertools.chain.from_iterable(self._specs[other].blocks for other in self._expected)


def _spec(name: str, record: Mapping[str, Any], files: Mapping[str, FileEntry]) -> _Spec:
    """Parse one tensor of an index; ValueError and the like unless its blocks are every element once."""
    shape, dtype = record["shape"], DTYPES[record["dtype"]]
    if not is_shape(shape):
        raise TypeError("its shape is not one")
    blocks = []
    for file, offset, size, position, sha256 in record["blocks"]:
        if not all(type(number) is int and 0 <= number < 2**62 for number in (*offset, *size, position)):
            raise ValueError("a block has an impossible place")
        if not isinstance(sha256, str):
            raise TypeError("a digest is not one")
        box = Box(tuple(offset), tuple(size))
        blocks.append(_Block(name, box, box.numel * dtype.itemsize, file, position, sha256))
    if problem := find_gap(shape, [block.box for block in blocks]):
        raise ValueError(problem)
    for block in blocks:
        if block.position + block.size > files[block.file].size:
            raise ValueError(f"a block lies behind the end of {block.file}")
    return _Spec(dtype, tuple(shape), tuple(blocks))
