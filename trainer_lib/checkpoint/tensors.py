"""Tensors as safetensors files, streamed through a store: no local copy, no second read, no pickle.

The format (https://github.com/huggingface/safetensors#format)::

    8 bytes        length of the header in bytes, little-endian
    the header     {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}, JSON
    the rest       the bytes of all tensors, row-major, without gaps; offsets count from here

Tensors that share memory (tied weights) are stored once. The metadata records their other names, so any safetensors
reader loads the file, and this one returns every name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer_lib.base.json_text import parse_json
from trainer_lib.checkpoint.layout import damaged_file
from trainer_lib.errors import ConfigError
from trainer_lib.storage import DigestingWriter, FileEntry, Store

ALIASES = "trainflow.aliases"  # the metadata key of the tied names: JSON, {other name: stored name}

_HEADER_LIMIT = 32 * 2**20  # some 200,000 tensors; reading one takes about ten times that in memory
_DIMENSIONS = 64  # torch's own limit
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(writer: DigestingWriter, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write tensors, name → `[...]`, of any device and memory layout, one at a time; positions of their first bytes.

    Tied names share one. Raises StorageError, and ConfigError for what safetensors cannot hold.
    """
    stored, aliases = _separate_ties(tensors)
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    positions = write_header(writer, specs, aliases)
    for name in positions:
        if name in stored:
            writer.write(view_bytes(stored[name]))
    return positions


def write_header(
    writer: DigestingWriter, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], aliases: Mapping[str, str]
) -> dict[str, int]:
    """Write the header of a file, whose bytes must follow: `aliases` are other names of the tensors.

    Returns the position of the first byte by name, in the order of the bytes; then the other names. Raises ConfigError.
    """
    # Widest first: every tensor starts at a multiple of its element size, as readers that map the file expect.
    order = sorted(specs, key=lambda name: (-specs[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # As metadata, because the format allows one name for each range of bytes.
    if aliases:
        header["__metadata__"][ALIASES] = json.dumps(aliases, sort_keys=True)
    begin = 0
    for name in order:
        dtype, shape = specs[name]
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(name, dtype), "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor starts at a multiple of 8 bytes
    if len(text) > _HEADER_LIMIT:
        remedy = "Join small tensors into larger ones."
        raise ConfigError(f"One file cannot list {len(order):,} tensors.", field="checkpoint", remedy=remedy)
    writer.write(len(text).to_bytes(8, "little") + text)
    positions = {name: 8 + len(text) + int(header[name]["data_offsets"][0]) for name in order}
    return positions | {alias: positions[name] for alias, name in aliases.items()}


def read_safetensors(store: Store, rel: str, *, expect: FileEntry | None = None) -> dict[str, Tensor]:
    """Read every tensor of a file: name → `[...]` on the CPU, in its saved shape and dtype; tied names share one.

    The file is read once, from front to back, and digested on the way: size and digest of `expect` are compared before
    anything is returned. A header that promises more bytes than the file has is refused before memory is taken. Raises
    DamagedError and StorageError.
    """
    with open_safetensors(store, rel, expect) as (reader, header):
        tensors = {name: reader.tensor(*header[name]) for name in sorted(header, key=lambda name: header[name][2])}
    return tensors | {alias: tensors[name] for alias, name in reader.aliases.items()}


@contextlib.contextmanager
def open_safetensors(
    store: Store, rel: str, expect: FileEntry | None
) -> Iterator[tuple[_Reader, dict[str, tuple[torch.dtype, list[int], int, int]]]]:
    """Open a file for a block that reads all of it, in order: its reader, and the header (name → dtype, shape, range).

    Raises as `read_safetensors`; what it says of the content when the block ends.
    """
    where = f"{store.url}/{rel}"
    if expect is not None and not store.exists(rel):
        raise damaged_file(where, "it is missing")
    size = store.size(rel)
    # Before a byte is read: a file of another size is damaged whatever it holds.
    if expect is not None and size != expect.size:
        raise damaged_file(where, f"it has {size:,} bytes, committed {expect.size:,}")
    with store.open_read(rel) as stream:
        reader = _Reader(stream, where)
        yield reader, _header(reader, size)
        if reader.read(1):
            raise damaged_file(where, "it has more bytes than its header says")
    if expect is not None and reader.digest.hexdigest() != expect.sha256:
        raise damaged_file(where, "its digest is not the one that was committed")


class _Reader:
    """A stream that is digested while it is read."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self.digest = hashlib.sha256()
        self.aliases: dict[str, str] = {}  # other name → name of a tensor
        self.where = where
        self.start = 0  # the position of the first tensor
        self._stream = stream

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.digest.update(data)
        return data

    def tensor(self, dtype: torch.dtype, shape: list[int], begin: int, end: int) -> Tensor:
        """Read the next `end - begin` bytes as a tensor `[*shape]`."""
        flat = torch.empty(end - begin, dtype=torch.uint8)
        view = flat.numpy().data
        filled = 0
        while filled < len(view):
            # In pieces: a stream may return fewer bytes than it was asked for.
            taken = self._stream.readinto(view[filled : filled + 8 * 2**20])  # type: ignore[attr-defined]  # see Store
            if not taken:
                raise damaged_file(self.where, "it ends too early")
            self.digest.update(view[filled : filled + taken])
            filled += taken
        return flat.view(dtype).reshape(shape) if filled else torch.empty(shape, dtype=dtype)


def _header(reader: _Reader, size: int) -> dict[str, tuple[torch.dtype, list[int], int, int]]:
    """Read the header: name → dtype, shape, begin, end. The entries cover the file exactly, so sizes can be trusted."""
    length = int.from_bytes(reader.read(8), "little")
    if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
        raise damaged_file(reader.where, "its header has an impossible length")
    try:
        record = parse_json(reader.read(length), unique=True)
        metadata = record.pop("__metadata__", {})
        entries = {name: _entry(value) for name, value in record.items()}
        reader.aliases = parse_json(metadata.get(ALIASES, "{}").encode(), unique=True)
        if not all(isinstance(name, str) for name in [*reader.aliases, *reader.aliases.values()]):
            raise TypeError("aliases")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged_file(reader.where, "its header is malformed") from error
    if any(name not in entries or alias in entries for alias, name in reader.aliases.items()):
        raise damaged_file(reader.where, "it names tied tensors that are not there")
    reader.start, position = 8 + length, 0
    for dtype, shape, begin, end in sorted(entries.values(), key=lambda entry: entry[2:]):
        if begin != position or end - begin != math.prod(shape) * dtype.itemsize:
            raise damaged_file(reader.where, "its header contradicts itself")
        position = end
    if position != size - 8 - length:
        raise damaged_file(reader.where, f"its header promises {position:,} bytes, there are {size - 8 - length:,}")
    return entries


def _entry(value: dict[str, Any]) -> tuple[torch.dtype, list[int], int, int]:
    begin, end = value["data_offsets"]
    if not is_shape(value["shape"]) or not is_shape([begin]) or not is_shape([end]):
        raise TypeError("numbers")
    return DTYPES[value["dtype"]], value["shape"], begin, end


def is_shape(value: Any) -> bool:
    """Whether a parsed value is a shape that torch can make a tensor of."""
    if not isinstance(value, list) or len(value) > _DIMENSIONS:
        return False
    are_sizes = all(type(size) is int and 0 <= size < 2**62 for size in value)
    # max(size, 1): with a size of 0 the others still make the strides, which overflow all the same.
    return are_sizes and math.prod(max(size, 1) for size in value) < 2**62


def _separate_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate the tensors to store from the further names of one of them: {name: tensor}, {other name: name}."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout is not torch.strided:
            what = f"Tensor {name!r} has no plain values ({'meta' if tensor.is_meta else tensor.layout})."
            raise ConfigError(what, field="checkpoint", remedy="Materialize it before saving.")
        view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        memory = (tensor.device, tensor.data_ptr(), *view)
        if tensor.numel() and memory in first:
            aliases[name] = first[memory]
        else:
            first[memory] = name
            stored[name] = tensor.detach()
    return stored, aliases


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The safetensors name of a dtype. Raises ConfigError, about the tensor `name`, if it has none."""
    try:
        return _NAMES[dtype]
    except KeyError:
        what = f"Tensor {name!r} has the dtype {dtype}, which safetensors lacks."
        remedy = "Keep it in another dtype, or as a non-persistent buffer."
        raise ConfigError(what, field="checkpoint", remedy=remedy) from None


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor `[...]` on any device, row-major; a view if the tensor is contiguous on the CPU."""
    # resolve_*: conjugate and negated views keep the sign as a flag, not in memory.
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
