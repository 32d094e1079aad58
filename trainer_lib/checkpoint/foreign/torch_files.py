"""Files that `torch.save` wrote, read by torch without running what is in them.

Such a file is a ZIP archive of ``data.pkl``, a pickle, and the bytes of each tensor's storage. A pickle is a program
that may import and call anything; torch's `weights_only` interpreter carries out a closed list of its instructions and
imports (tensors, numbers, texts, lists, dictionaries; here NumPy's arrays of numbers as well) and refuses any other by
its name. Archives that unpack to more bytes than they have, tensors larger than their bytes, values without end and
formats from before torch 1.6 are refused as well.

Only `trainflow checkpoints import` uses this module, in a worker process: checkpoints of trainflow hold no such file.
"""

from __future__ import annotations

import errno
import re
import zipfile
from typing import Any, BinaryIO

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
# In torch's message: the import that it refuses, or what else is wrong. Its rest advises to load the file all the same.
_IMPORT = re.compile(r"GLOBAL (\S+)")
_REASON = re.compile(r"WeightsUnpickler error:\s*(.+)")


def _numpy_names() -> list[Any]:
    """The constructors of NumPy's arrays and numbers in a random state, under NumPy's old and new names."""
    core = np._core.multiarray  # type: ignore[attr-defined]  # NumPy's stubs leave it out
    names: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(code)) for code in "?bhilqBHILQefd")]
    for function in (core._reconstruct, core.scalar):
        names += [(function, f"numpy.{module}.multiarray.{function.__name__}") for module in ("core", "_core")]
    return names


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
            _check_archive(stream, size, where)
            with torch.serialization.safe_globals(_numpy_names()):
                value = torch.load(stream, map_location="cpu", weights_only=True)
            return _Plain(where).copy_value(value, 0)
        except StorageError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EINVAL:
                raise
            raise refuse_file(where, "its records lie outside of it") from error  # a seek before the file's first byte
        except MemoryError:
            raise refuse_file(where, "it asks for more memory than there is") from None
        except Exception as error:  # the many ways in which an archive or a program can be wrong
            raise refuse_file(where, _describe_refusal(error)) from error


def refuse_file(where: str, reason: str) -> DamagedError:
    """The error for a file at a URL that cannot be imported; `reason` is a clause ("it is compressed")."""
    return DamagedError(
        f"The file is refused: {reason}.",
        field=where,
        remedy="Nothing was imported. If you trust the file, load it with the program that wrote it and save it again.",
    )


def _describe_refusal(error: Exception) -> str:
    text = str(error)
    if (refused := _IMPORT.search(text)) is not None:
        return f"loading it would import {refused[1][:80]!r}, which can run code"
    reason = _REASON.search(text)
    text = text if reason is None else reason[1]
    return f"it cannot be read ({(text.splitlines() or [type(error).__name__])[0][:160]})"


def _check_archive(stream: BinaryIO, size: int, where: str) -> None:
    """Check that the stream is an archive as torch writes it; leaves the stream at its start."""
    if size < _SMALLEST or not zipfile.is_zipfile(stream):
        raise refuse_file(where, "it is not a ZIP archive, which torch writes since version 1.6")
    stream.seek(0)
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
    programs = [record for record in records if record.filename.rpartition("/")[2] == "data.pkl"]
    if len(records) > _RECORDS or len({record.filename for record in records}) != len(records) or len(programs) != 1:
        raise refuse_file(where, "its records are not those of torch.save")
    # Bit 1 marks an encrypted record.
    if any(record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 for record in records):
        raise refuse_file(where, "it is compressed, which torch never does")
    if sum(record.file_size for record in records) > size or programs[0].file_size > _PROGRAM_LIMIT:
        raise refuse_file(where, "it would unpack to more bytes than it has")
    stream.seek(0)


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
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
            return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.item()
        if isinstance(value, Tensor):
            return self._check_tensor(value.detach())
        if isinstance(value, list | tuple):
            items = [self.copy_value(item, depth + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
            return {key: self.copy_value(item, depth + 1) for key, item in value.items()}
        raise refuse_file(self._where, f"it holds a {type(value).__name__.strip('_')}")

    def _check_tensor(self, tensor: Tensor) -> Tensor:
        """Return a dense tensor `[...]` on the CPU whose values are all in the file."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise refuse_file(self._where, "it holds a tensor that is sparse, quantized or without values")
        # An expanded tensor of a few bytes would fill the memory when it is copied.
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise refuse_file(self._where, "a tensor is larger than its bytes")
        return tensor
