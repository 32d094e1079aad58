"""Files that `torch.save` wrote, read without unpickling them.

Such a file is a ZIP archive of ``data.pkl``, a pickle, and the bytes of each tensor's storage. A pickle is a program
that may import and call anything. Here it is not executed but interpreted: its instructions only build numbers, texts,
lists and dictionaries, and what it asks to import is kept as a word. A handful of words are understood (a tensor over a
storage, a NumPy array, an ordered dictionary); any other is refused by its name. Archives that unpack to more bytes
than they have, tensors that reach beyond their bytes, and formats from before torch 1.6 are refused as well.

The instructions are those of the standard library's ``pickletools``. Only `trainflow checkpoints import` uses this
module: checkpoints of trainflow hold no such file.
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

_PROGRAM_LIMIT = 128 * 2**20  # bytes of data.pkl
_RECORDS = 2_000_000  # files in the archive
_SMALLEST = 22  # bytes of the record that ends an archive
_VALUES = 2_000_000  # values in the result
_DEPTH = 64  # levels of nesting in the result
_DIMENSIONS = 64  # torch's own limit

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
    """Read a file's value: dicts with text or number keys, lists, tuples, numbers, texts, and tensors on the CPU.

    Tensors keep their saved shape and dtype; NumPy arrays become tensors.

    Raises:
        DamagedError: the file is not what `torch.save` writes, or asks for something that is not understood; the
            message says what.
        StorageError: the file cannot be read.
    """
    where = f"{store.url}/{rel}"
    size = store.size(rel)
    with store.open_read(rel) as stream:
        try:
            if size < _SMALLEST or not zipfile.is_zipfile(stream):
                raise refuse_file(where, "it is not a ZIP archive, which torch writes since version 1.6")
            stream.seek(0)
            with zipfile.ZipFile(stream) as archive:
                program = _program(archive, size, where)
                folder = program.filename.removesuffix("data.pkl")
                value = _Interpreter(archive, folder, where).interpret(archive.read(program))
            return _Plain(where).copy_value(value, 0)
        except StorageError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EINVAL:
                raise
            raise refuse_file(where, "its records lie outside of it") from error  # a seek before the file's first byte
        except MemoryError:
            raise refuse_file(where, "it asks for more memory than there is") from None
        except Exception as error:  # the many ways in which an archive or a program can be wrong
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise refuse_file(where, f"it cannot be read ({reason})") from error


def refuse_file(where: str, reason: str) -> DamagedError:
    """The error for a file at a URL that cannot be imported; `reason` is a clause ("it is compressed")."""
    return DamagedError(
        f"The file is refused: {reason}.",
        field=where,
        remedy="Nothing was imported. If you trust the file, load it with the program that wrote it and save it again.",
    )


def _program(archive: zipfile.ZipFile, size: int, where: str) -> zipfile.ZipInfo:
    """Check that the archive is one that torch writes; returns the record of its pickle."""
    records = archive.infolist()
    programs = [record for record in records if record.filename.rpartition("/")[2] == "data.pkl"]
    if len(records) > _RECORDS or len({each.filename for each in records}) != len(records) or len(programs) != 1:
        raise refuse_file(where, "its records are not those of torch.save")
    # Bit 1 marks an encrypted record.
    if any(record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records):
        raise refuse_file(where, "it is compressed, which torch never does")
    if sum(record.file_size for record in records) > size or programs[0].file_size > _PROGRAM_LIMIT:
        raise refuse_file(where, "it would unpack to more bytes than it has")
    order = programs[0].filename.removesuffix("data.pkl") + "byteorder"
    # Older versions of torch write no such record.
    if order in archive.namelist() and archive.read(order) != b"little":
        raise refuse_file(where, "it was written on a big-endian machine")
    return programs[0]


@dataclass(frozen=True)
class _Word:
    """A thing that the program would import, as the text ``module name``."""

    text: str


@dataclass
class _Made:
    """A NumPy type or array under construction: `text` names a type, `state` is set by BUILD."""

    kind: str
    text: str = ""
    state: Any = None


@dataclass
class _Interpreter:
    """Interprets a pickle's instructions on plain values, and refuses any other.

    Attributes:
        archive: the ZIP archive, for the bytes of storages.
        folder: the archive's folder, with a slash at its end.
        where: the file's URL, for messages.
        stack, marks, memo: the pickle machine's state.
        storages: the storages that were read, as uint8 tensors `[bytes]`.
    """

    archive: zipfile.ZipFile
    folder: str
    where: str
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[Any, Any] = field(default_factory=dict)
    storages: dict[str, Tensor] = field(default_factory=dict)

    def interpret(self, program: bytes) -> Any:
        """Interpret a program; returns the value that it builds."""
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

    def pop_since_mark(self) -> list[Any]:
        """Pop the values above the last mark."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def pop_last(self, count: int) -> tuple[Any, ...]:
        """Pop the last values."""
        if count > len(self.stack):
            raise ValueError("the stack is empty")
        values = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return values

    def push_word(self, text: str) -> None:
        """GLOBAL: keep what would be imported as a word, if it is a known one."""
        # Words of torch name storages and types; as functions only those in `_CALLS` are carried out.
        known = text in _CALLS or text.startswith("torch ") or text in ("numpy ndarray", "torch.storage UntypedStorage")
        if not known:
            raise refuse_file(
                self.where, f"loading it would import {text.replace(' ', '.')[:80]!r}, which can run code"
            )
        self.push(_Word(text))

    def call_word(self) -> None:
        """REDUCE: build one of the things that are understood."""
        function, arguments = self.pop_last(2)
        make = _CALLS.get(function.text) if isinstance(function, _Word) else None
        if make is None:
            named = function.text.replace(" ", ".") if isinstance(function, _Word) else type(function).__name__
            raise refuse_file(self.where, f"loading it would call {named[:80]!r}, which can run code")
        self.push(make(*arguments))

    def set_state(self) -> None:
        """BUILD: set the state of an array or of a number's type; attributes of a dictionary are ignored."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _Made):
            target.state = state
        elif not isinstance(target, dict):
            raise refuse_file(self.where, f"loading it would set the state of a {type(target).__name__}")

    def push_storage(self) -> None:
        """BINPERSID: read a storage's bytes, as a flat tensor of its dtype."""
        _, kind, key, _, count = self.stack.pop()
        dtype = _DTYPES[kind.text.rpartition(" ")[2]]
        if key not in self.storages:
            record = self.archive.getinfo(f"{self.folder}data/{key}")
            flat = torch.empty(record.file_size, dtype=torch.uint8)
            with self.archive.open(record) as stream:
                # Straight into the tensor's memory, without a second copy of a large storage.
                filled, view = 0, flat.numpy().data
                while taken := stream.readinto(view[filled:]):  # type: ignore[attr-defined]  # io.BufferedIOBase has it
                    filled += taken
            if filled != record.file_size:
                raise ValueError("a storage ends too early")
            self.storages[key] = flat
        flat = self.storages[key]
        if type(count) is not int or count * dtype.itemsize != flat.numel():
            raise ValueError(f"a storage has {flat.numel():,} bytes instead of {count} x {dtype.itemsize}")
        # A storage may be viewed by several tensors, which share it here as they did there.
        self.push(flat.view(dtype))

    def put_items(self, pairs: list[Any]) -> None:
        """SETITEM, SETITEMS: set keys of the dictionary on the stack."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError("items are set in something that is not a dictionary")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def extend(self, values: list[Any]) -> None:
        """APPEND, APPENDS: extend the list on the stack."""
        if not isinstance(self.stack[-1], list):
            raise ValueError("something that is not a list is appended to")
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
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_since_mark())),
    "TUPLE1": lambda machine, _: machine.push(machine.pop_last(1)),
    "TUPLE2": lambda machine, _: machine.push(machine.pop_last(2)),
    "TUPLE3": lambda machine, _: machine.push(machine.pop_last(3)),
    "BINPUT": lambda machine, key: machine.memo.__setitem__(key, machine.stack[-1]),
    "LONG_BINPUT": lambda machine, key: machine.memo.__setitem__(key, machine.stack[-1]),
    "MEMOIZE": lambda machine, _: machine.memo.__setitem__(len(machine.memo), machine.stack[-1]),
    "BINGET": lambda machine, key: machine.push(machine.memo[key]),
    "LONG_BINGET": lambda machine, key: machine.push(machine.memo[key]),
    "SETITEM": lambda machine, _: machine.put_items(list(machine.pop_last(2))),
    "SETITEMS": lambda machine, _: machine.put_items(machine.pop_since_mark()),
    "APPEND": lambda machine, _: machine.extend(list(machine.pop_last(1))),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_since_mark()),
    "GLOBAL": lambda machine, text: machine.push_word(text),
    "REDUCE": lambda machine, _: machine.call_word(),
    "BUILD": lambda machine, _: machine.set_state(),
    "BINPERSID": lambda machine, _: machine.push_storage(),
}


# -- what a program may ask for ----------------------------------------------------------------------------------------


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """A view of a storage `[values]` with the given shape and stride; inside its bounds, and not larger than it."""
    numbers = [offset, *shape, *stride]
    if len(shape) != len(stride) or len(shape) > _DIMENSIONS or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("a tensor's shape is malformed")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    count = math.prod(shape)
    if count and (last >= storage.numel() or count > storage.numel()):
        raise ValueError("a tensor is larger than its bytes")
    return torch.as_strided(storage, shape, stride, offset) if count else torch.empty(shape, dtype=storage.dtype)


def _array(made: _Made) -> Any:
    """The tensor of a NumPy array, whose state is ``(version, shape, type, is Fortran, bytes)``."""
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
    """Copies the result into plain containers, within bounds.

    A program may put one object into many places, so that a small file grows without end when it is copied.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._left = _VALUES

    def copy_value(self, value: Any, depth: int) -> Any:
        """Copy a value.

        Raises:
            DamagedError: the value is too large, nested too deeply, or something other than plain values.
        """
        self._left -= 1
        if self._left < 0 or depth > _DEPTH:
            raise refuse_file(self._where, f"it holds more than {_VALUES:,} values, or nests them deeper than {_DEPTH}")
        if value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor):
            return value
        if isinstance(value, _Made) and value.kind == "array":
            return _array(value)
        if isinstance(value, list | tuple):
            items = [self.copy_value(item, depth + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
            return {key: self.copy_value(item, depth + 1) for key, item in value.items()}
        raise refuse_file(self._where, f"it holds a {type(value).__name__.strip('_')}")
