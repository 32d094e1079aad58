"""Files that `torch.save` wrote, read without unpickling them.

Such a file is a ZIP archive: ``data.pkl``, a pickle, and the bytes of each tensor's storage. A pickle is a program that
may import and call anything. Here it is not executed but interpreted: its instructions only put numbers, texts, lists
and dictionaries together, and what it asks to import is taken as a word. Half a dozen words are understood (a tensor
over a storage, an array of NumPy, an ordered dictionary); any other is refused by its name. Archives that unpack to
more than they are, tensors that reach beyond their bytes, and the formats from before torch 1.6 are refused as well.

Used by `trainflow checkpoints import` alone: our own checkpoints hold no such file.
"""

from __future__ import annotations

import errno
import math
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.errors import DamagedError, StorageError
from trainer_lib.storage import Store

_PROGRAM_LIMIT = 128 * 2**20
_RECORDS = 2_000_000
_SMALLEST = 22  # bytes: an archive's end
_VALUES = 2_000_000
_DEPTH = 64
_DIMENSIONS = 64

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexFloatStorage": torch.complex64,
    "BoolStorage": torch.bool,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "UntypedStorage": torch.uint8,
}
_NUMPY = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


def read_torch_file(store: Store, rel: str) -> Any:
    """What a file holds, as dicts with text or number keys, lists, tuples, numbers, texts and tensors on the CPU.

    NumPy arrays become tensors.

    Raises:
        DamagedError: it is not what `torch.save` writes, or asks for something that is not understood; says what.
        StorageError: it cannot be read.
    """
    where = f"{store.url}/{rel}"
    size = store.size(rel)
    with store.open_read(rel) as stream:
        try:
            if size < _SMALLEST or not zipfile.is_zipfile(stream):
                raise refuse_file(where, "it is no ZIP archive, as torch writes since version 1.6")
            stream.seek(0)
            with zipfile.ZipFile(stream) as archive:
                program = _program(archive, size, where)
                folder = program.filename.removesuffix("data.pkl")
                value = _Interpreter(archive, folder, where).run(archive.read(program))
            return _Plain(where).value(value, 0)
        except StorageError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EINVAL:
                raise
            raise refuse_file(where, "its records lie outside of it") from error
        except MemoryError:
            raise refuse_file(where, "it asks for more memory than there is") from None
        except Exception as error:  # the many ways in which an archive or a program can be wrong
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise refuse_file(where, f"it cannot be read ({reason})") from error


def refuse_file(where: str, reason: str) -> DamagedError:
    """The failure for a file that cannot be imported."""
    return DamagedError(
        f"The file is refused: {reason}.",
        field=where,
        remedy="Nothing was imported. If you trust the file, load it with the program that wrote it and save it anew.",
    )


def _program(archive: zipfile.ZipFile, size: int, where: str) -> zipfile.ZipInfo:
    """The pickle's record, once the archive is known to be one that torch writes."""
    records = archive.infolist()
    programs = [record for record in records if record.filename.rpartition("/")[2] == "data.pkl"]
    if len(records) > _RECORDS or len({each.filename for each in records}) != len(records) or len(programs) != 1:
        raise refuse_file(where, "its records are not those of torch.save")
    if any(record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records):
        raise refuse_file(where, "it is compressed, which torch never does")
    if sum(record.file_size for record in records) > size or programs[0].file_size > _PROGRAM_LIMIT:
        raise refuse_file(where, "it would unpack to more than it is")
    order = programs[0].filename.removesuffix("data.pkl") + "byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise refuse_file(where, "it was written on a big-endian machine")
    return programs[0]


@dataclass(frozen=True)
class _Word:
    """Something that the program would import: ``module name``."""

    text: str


@dataclass
class _Made:
    """A NumPy type or array under construction: `text` for a type, `state` once it is known."""

    kind: str
    text: str = ""
    state: Any = None


@dataclass
class _Interpreter:
    """Carries a pickle's instructions out on plain values. Whatever is no plain value is refused."""

    archive: zipfile.ZipFile
    folder: str
    where: str
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[Any, Any] = field(default_factory=dict)
    storages: dict[str, Tensor] = field(default_factory=dict)

    def run(self, program: bytes) -> Any:
        """The value that the program makes."""
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return self.stack.pop()
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise refuse_file(
                    self.where, f"its program has the instruction {opcode.name}, which torch.save never uses"
                )
            action(self, argument)
        raise refuse_file(self.where, "its program has no end")

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        """The values above the last mark, taken off."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def last(self, count: int) -> tuple[Any, ...]:
        """The last values, taken off."""
        if count > len(self.stack):
            raise ValueError("the stack is empty")
        values = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return values

    def word(self, text: str) -> None:
        """GLOBAL: what would be imported is only noted, if it is known at all."""
        known = text in _CALLS or text.startswith("torch ") or text in ("numpy ndarray", "torch.storage UntypedStorage")
        if not known:
            raise refuse_file(
                self.where, f"loading it would import {text.replace(' ', '.')[:80]!r}, which can run code"
            )
        self.push(_Word(text))

    def call(self) -> None:
        """REDUCE: one of the things that are understood."""
        function, arguments = self.last(2)
        make = _CALLS.get(function.text) if isinstance(function, _Word) else None
        if make is None:
            named = function.text.replace(" ", ".") if isinstance(function, _Word) else type(function).__name__
            raise refuse_file(self.where, f"loading it would call {named[:80]!r}, which can run code")
        self.push(make(*arguments))

    def build(self) -> None:
        """BUILD: the state of an array or of a number's type; attributes of a dictionary are not wanted."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _Made):
            target.state = state
        elif not isinstance(target, dict):
            raise refuse_file(self.where, f"loading it would set the state of a {type(target).__name__}")

    def storage(self) -> None:
        """BINPERSID: the bytes of a storage, as a flat tensor."""
        _, kind, key, _, count = self.stack.pop()
        dtype = _DTYPES[kind.text.rpartition(" ")[2]]
        if key not in self.storages:
            record = self.archive.getinfo(f"{self.folder}data/{key}")
            flat = torch.empty(record.file_size, dtype=torch.uint8)
            with self.archive.open(record) as stream:
                filled, view = 0, flat.numpy().data
                while taken := stream.readinto(view[filled:]):  # type: ignore[attr-defined]  # io.BufferedIOBase has it
                    filled += taken
            if filled != record.file_size:
                raise ValueError("a storage ends too early")
            self.storages[key] = flat
        flat = self.storages[key]
        if type(count) is not int or count * dtype.itemsize != flat.numel():
            raise ValueError(f"a storage has {flat.numel():,} bytes instead of {count} x {dtype.itemsize}")
        self.push(flat.view(dtype))

    def put_items(self, pairs: list[Any]) -> None:
        """SETITEM, SETITEMS."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError("items are set in something that is no dictionary")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def extend(self, values: list[Any]) -> None:
        """APPEND, APPENDS."""
        if not isinstance(self.stack[-1], list):
            raise ValueError("something that is no list is appended to")
        self.stack[-1].extend(values)


_Action = Callable[[_Interpreter, Any], None]
_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_ACTIONS: dict[str, _Action] = {
    **{name: lambda machine, value: machine.push(value) for name in _LITERALS},
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(machine.last(1)),
    "TUPLE2": lambda machine, _: machine.push(machine.last(2)),
    "TUPLE3": lambda machine, _: machine.push(machine.last(3)),
    "BINPUT": lambda machine, key: machine.memo.__setitem__(key, machine.stack[-1]),
    "LONG_BINPUT": lambda machine, key: machine.memo.__setitem__(key, machine.stack[-1]),
    "MEMOIZE": lambda machine, _: machine.memo.__setitem__(len(machine.memo), machine.stack[-1]),
    "BINGET": lambda machine, key: machine.push(machine.memo[key]),
    "LONG_BINGET": lambda machine, key: machine.push(machine.memo[key]),
    "SETITEM": lambda machine, _: machine.put_items(list(machine.last(2))),
    "SETITEMS": lambda machine, _: machine.put_items(machine.since_mark()),
    "APPEND": lambda machine, _: machine.extend(list(machine.last(1))),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "GLOBAL": lambda machine, text: machine.word(text),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.storage(),
}


# -- what a program may ask for ----------------------------------------------------------------------------------------


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """A view of a storage, inside its bounds and no larger than it."""
    numbers = [offset, *shape, *stride]
    if len(shape) != len(stride) or len(shape) > _DIMENSIONS or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("a tensor's shape is malformed")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    count = math.prod(shape)
    if count and (last >= storage.numel() or count > storage.numel()):
        raise ValueError("a tensor is larger than its bytes")
    return torch.as_strided(storage, shape, stride, offset) if count else torch.empty(shape, dtype=storage.dtype)


def _array(made: _Made) -> Any:
    """A NumPy array's tensor: ``(version, shape, type, is Fortran, bytes)``."""
    _, shape, kind, fortran, data = made.state
    dtype = _number_type(kind)
    values = np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if fortran else "C")
    return torch.from_numpy(values.copy())


def _number_type(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, _Made) or kind.kind != "dtype" or kind.text not in _NUMPY:
        raise ValueError("an array holds something else than numbers")
    if kind.state is not None and kind.state[1] not in ("<", "|", "="):
        raise ValueError("an array is big-endian")
    return np.dtype(kind.text)


def _scalar(kind: Any, data: bytes) -> Any:
    return np.frombuffer(data, dtype=_number_type(kind), count=1)[0].item()


def _bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError("bytes in an unknown encoding")
    return text.encode("latin1")


_CALLS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": lambda pairs=(): dict(pairs),
    "torch Size": lambda shape=(): tuple(shape),
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": lambda data, *_: data,
    "_codecs encode": _bytes,
    "numpy dtype": lambda text, *_: _Made("dtype", str(text)),
    **{f"numpy.{core}.multiarray _reconstruct": lambda *_: _Made("array") for core in ("_core", "core")},
    **{f"numpy.{core}.multiarray scalar": _scalar for core in ("_core", "core")},
}


class _Plain:
    """Copies what was made into plain containers; the program may have let one object stand in many places."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._left = _VALUES

    def value(self, value: Any, depth: int) -> Any:
        """A plain copy. DamagedError when it is too large, too deep, or something else."""
        self._left -= 1
        if self._left < 0 or depth > _DEPTH:
            raise refuse_file(self._where, f"it holds more than {_VALUES:,} values, or nests them deeper than {_DEPTH}")
        if value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor):
            return value
        if isinstance(value, _Made) and value.kind == "array":
            return _array(value)
        if isinstance(value, list | tuple):
            items = [self.value(item, depth + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
            return {key: self.value(item, depth + 1) for key, item in value.items()}
        raise refuse_file(self._where, f"it holds a {type(value).__name__.strip('_')}")
