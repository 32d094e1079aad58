"""Predictions pile up on disk, not in memory, and come back as memory-mapped arrays.

Batches are appended to an unlinked temporary file, so nothing is left behind however the process ends. Arrays handed
out are copy-on-write maps: ``labels[labels == -100] = pad`` changes neither the file nor another's array.
Small results (up to 16 MiB) never leave memory.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer_lib.data.collators import IGNORED
from trainer_lib.errors import DataError, StorageFullError
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.nested import Array

IN_MEMORY = 16 << 20  # bytes


class _Column:
    """One leaf: the arrays of all batches, one after the other along the first dimension."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: list[Array] = []
        self._held_bytes = 0
        self._file: IO[bytes] | None = None
        self._segments: list[tuple[np.dtype[Any], tuple[int, ...]]] = []

    def append(self, array: Array) -> None:
        array = array if array.ndim else array.reshape(1)
        self._segments.append((array.dtype, array.shape))
        if self._file is None:
            self._held.append(array.copy())
            self._held_bytes += array.nbytes
            if self._held_bytes > IN_MEMORY:
                self._spill()
        else:
            self._write(self._file, np.ascontiguousarray(array))

    def _spill(self) -> None:
        self._file = tempfile.TemporaryFile(dir=self._folder, prefix="trainflow-spool-")  # noqa: SIM115 - kept open
        for array in self._held:
            self._write(self._file, array)
        self._held, self._held_bytes = [], 0

    def _write(self, file: IO[bytes], array: Array) -> None:
        folder = self._folder or Path(tempfile.gettempdir())
        if array.nbytes > IN_MEMORY // 4 and (free := shutil.disk_usage(folder).free) < array.nbytes * 2:
            raise StorageFullError(
                f"Predictions need {array.nbytes:,} more bytes, {free:,} are free.",
                field="output_dir",
                value=str(folder),
                remedy="Free space, set TMPDIR, or use preprocess_logits_for_metrics or batch_eval_metrics.",
            )
        file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")

    def segments(self) -> Iterator[Array]:
        """The batches' arrays as they came."""
        if self._file is None:
            yield from self._held
            return
        self._file.flush()
        at = 0
        for dtype, shape in self._segments:
            yield self._map(self._file, dtype, at, shape)
            at += int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    def array(self) -> Array:
        """All rows as one array; rows of other widths are padded on the right with -100."""
        widths = {shape[1:] for _, shape in self._segments}
        dtype = np.result_type(*{dtype for dtype, _ in self._segments})
        rows = sum(shape[0] for _, shape in self._segments)
        if len({len(width) for width in widths}) > 1:
            raise DataError(
                "Batches differ in their number of dimensions.",
                field="predictions",
                value=sorted(widths),
                remedy="Return tensors of one rank, or use preprocess_logits_for_metrics.",
            )
        if self._file is None:
            if len(widths) == 1:
                return np.concatenate(self._held)
            return fill_padded(np.empty(padded_shape(rows, widths), dtype=dtype), self._held)
        if len(widths) == 1 and all(dtype == each for each, _ in self._segments):
            self._file.flush()
            return self._map(self._file, dtype, 0, (rows, *next(iter(widths))))
        shape = padded_shape(rows, widths)
        with tempfile.TemporaryFile(dir=self._folder, prefix="trainflow-spool-") as file:
            file.truncate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            target: Array = np.memmap(file, dtype=dtype, mode="r+", shape=shape)
            fill_padded(target, self.segments())
            target.flush()  # type: ignore[attr-defined]
            return self._map(file, dtype, 0, shape)

    @staticmethod
    def _map(file: IO[bytes], dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> Array:
        if 0 in shape:
            return np.empty(shape, dtype=dtype)
        return np.asarray(np.memmap(file, dtype=dtype, mode="c", offset=offset, shape=shape))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def padded_shape(rows: int, widths: set[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that holds `rows` rows of each of these shapes."""
    return (rows, *(max(sizes) for sizes in zip(*widths, strict=True)))


def fill_padded(target: Array, arrays: Iterable[Array]) -> Array:
    """Lay arrays one after the other into `target`, of `padded_shape`; what they leave of it becomes -100."""
    row = 0
    for array in arrays:
        block = target[row : row + len(array)]
        if block.shape[1:] != array.shape[1:]:
            block[...] = IGNORED
        block[tuple(slice(0, size) for size in array.shape)] = array
        row += len(array)
    return target


class Spool:
    """Collects a tree of arrays batch by batch.

    Args:
        folder: where the files are made; TMPDIR when None.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._shape: Any = None
        self._form: Any = None
        self._columns: list[_Column] = []
        self.batches = 0

    def append(self, tree: Any) -> None:
        """Add a batch. Raises DataError when its structure is not that of the batches before."""
        arrays: list[Array] = []
        form = nested.flatten(tree, arrays)
        if self._form is None:
            self._form, self._shape = form, nested.structure(tree)
            self._columns = [_Column(self._folder) for _ in arrays]
        elif form != self._form:
            raise DataError(
                "Batches differ in what the model returns.",
                field="predictions",
                value=nested.structure(tree),
                remedy="Return the same, or set eval_use_gather_object=True to gather lists and texts as they are.",
            )
        for column, leaf in zip(self._columns, arrays, strict=True):
            column.append(leaf)
        self.batches += 1

    def tree(self) -> Any:
        """Everything, leaf by leaf one array; None when nothing was added."""
        return None if not self.batches else nested.rebuild(self._shape, [each.array() for each in self._columns])

    def by_batch(self) -> list[Any]:
        """Everything as a list of the batches' trees."""
        columns: Sequence[list[Array]] = [list(column.segments()) for column in self._columns]
        return [nested.rebuild(self._shape, [column[i] for column in columns]) for i in range(self.batches)]

    def close(self) -> None:
        """Close the files; arrays handed out stay valid."""
        for column in self._columns:
            column.close()
