"""Predictions collected on disk, not in memory.

Batches are appended to an unlinked temporary file, so nothing is left behind, however the process ends. Arrays are
returned as copy-on-write maps: ``labels[labels == -100] = pad`` changes neither the file nor another array. Results up
to 16 MiB per leaf stay in memory.

Outputs that are not only arrays (`eval_use_gather_object`: lists of boxes per image, texts, numbers), whose form may
differ from batch to batch, are returned in memory, since no array can map them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer_lib.data.collators import IGNORED
from trainer_lib.errors import DataError, StorageFullError, is_full_disk
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.nested import Array

MAX_MEMORY_BYTES = 16 << 20
FILE_PREFIX = "trainflow-spool-"


class _Column:
    """One leaf: the arrays of all batches, one after the other along the first dimension."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: list[Array] = []
        self._held_bytes = 0
        self._file: IO[bytes] | None = None
        self._segments: list[tuple[np.dtype[Any], tuple[int, ...]]] = []

    def append(self, array: Array) -> None:
        # A scalar per batch becomes one row.
        array = array if array.ndim else array.reshape(1)
        self._segments.append((array.dtype, array.shape))
        if self._file is None:
            # A copy: the batch's memory is reused by the next one.
            self._held.append(array.copy())
            self._held_bytes += array.nbytes
            if self._held_bytes > MAX_MEMORY_BYTES:
                self._move_to_disk()
        else:
            self._write(self._file, np.ascontiguousarray(array))

    def _move_to_disk(self) -> None:
        with full_disk_named(self._folder, self._held_bytes):
            self._file = tempfile.TemporaryFile(dir=self._folder, prefix=FILE_PREFIX)  # noqa: SIM115 - closed by close()
        for array in self._held:
            self._write(self._file, array)
        self._held, self._held_bytes = [], 0

    def _write(self, file: IO[bytes], array: Array) -> None:
        folder = self._folder or Path(tempfile.gettempdir())
        # Asking for the free space costs a system call: small arrays are written without asking.
        if array.nbytes > MAX_MEMORY_BYTES // 4 and shutil.disk_usage(folder).free < array.nbytes * 2:
            raise _full(folder, array.nbytes)
        with full_disk_named(folder, array.nbytes):
            file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")

    def segments(self) -> Iterator[Array]:
        """The batches' arrays in their original shapes."""
        if self._file is None:
            yield from self._held
            return
        self._flush(self._file)
        offset = 0
        for dtype, shape in self._segments:
            yield self._map(self._file, dtype, offset, shape)
            offset += int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    def array(self) -> Array:
        """All rows as one array ``[rows, …]``; narrower rows are padded on the right with -100."""
        widths = {shape[1:] for _, shape in self._segments}
        dtype = np.result_type(*{dtype for dtype, _ in self._segments})
        rows = sum(shape[0] for _, shape in self._segments)
        if len({len(width) for width in widths}) > 1:
            raise DataError(
                "Batches of predictions differ in their number of dimensions.",
                field="predictions",
                value=sorted(widths),
                remedy="Return tensors of one rank, or use preprocess_logits_for_metrics.",
            )
        if self._file is None:
            if len(widths) == 1:
                return np.concatenate(self._held)
            return fill_padded(np.empty(compute_padded_shape(rows, widths), dtype=dtype), self._held)
        if len(widths) == 1 and all(dtype == kind for kind, _ in self._segments):
            # Equal shapes: the file's bytes are the array already.
            self._flush(self._file)
            return self._map(self._file, dtype, 0, (rows, *next(iter(widths))))
        shape = compute_padded_shape(rows, widths)
        with tempfile.TemporaryFile(dir=self._folder, prefix=FILE_PREFIX) as file:
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            with full_disk_named(self._folder, size):
                _reserve(file, size)
            target: Array = np.memmap(file, dtype=dtype, mode="r+", shape=shape)
            fill_padded(target, self.segments())
            target.flush()  # type: ignore[attr-defined]
            # A second, copy-on-write map: the caller's changes must not reach the file.
            return self._map(file, dtype, 0, shape)

    @staticmethod
    def _map(file: IO[bytes], dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> Array:
        if 0 in shape:  # an empty range cannot be mapped
            return np.empty(shape, dtype=dtype)
        return np.asarray(np.memmap(file, dtype=dtype, mode="c", offset=offset, shape=shape))

    def _flush(self, file: IO[bytes]) -> None:
        needed = sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in self._segments)
        with full_disk_named(self._folder, needed):
            file.flush()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk it fails to write what none will read
                self._file.close()


def _reserve(file: IO[bytes], size: int) -> None:
    """Give the file its full size, which a memory map needs, and room on the disk for all of it."""
    # On a full disk, writing to a page of the map that has no room yet kills the process (SIGBUS).
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(file.fileno(), 0, size)
    else:  # macOS
        file.truncate(size)


@contextlib.contextmanager
def full_disk_named(folder: Path | None, needed: int) -> Iterator[None]:
    """Turn an error of a full disk into a StorageFullError with the folder; `needed`: bytes that were to be written."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise _full(folder or Path(tempfile.gettempdir()), needed) from error


def _full(folder: Path, needed: int) -> StorageFullError:
    return StorageFullError(
        f"The predictions need {needed:,} more bytes, and {shutil.disk_usage(folder).free:,} are free.",
        field="output_dir",
        value=str(folder),
        remedy="Free space, set TMPDIR, or use preprocess_logits_for_metrics or batch_eval_metrics.",
    )


def compute_padded_shape(rows: int, widths: set[tuple[int, ...]]) -> tuple[int, ...]:
    """The smallest shape ``(rows, …)`` that holds rows of all these shapes."""
    return (rows, *(max(sizes) for sizes in zip(*widths, strict=True)))


def fill_padded(target: Array, arrays: Iterable[Array]) -> Array:
    """Copy arrays ``[rows_i, …]`` below each other into `target` ``[rows, …]``; fill the rest with -100; return it."""
    row = 0
    for array in arrays:
        block = target[row : row + len(array)]
        if block.shape[1:] != array.shape[1:]:
            # Before the copy, and only where something stays uncovered.
            block[...] = IGNORED
        block[tuple(slice(0, size) for size in array.shape)] = array
        row += len(array)
    return target


class PredictionSpool:
    """Collects a tree of arrays batch by batch.

    Args:
        folder: where the temporary files are created; None for the system's temporary folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._structure: Any = None
        self._form: Any = None
        self._columns: list[_Column] = []
        self.num_batches = 0

    def append(self, tree: Any) -> None:
        """Add a batch: a tree of arrays or tensors ``[batch, …]``.

        Raises:
            DataError: the tree's structure differs from that of earlier batches.
        """
        arrays: list[Array] = []
        form = nested.flatten_tree(tree, arrays)
        if self._form is None:
            self._form, self._structure = form, nested.describe_form(tree, [])
            self._columns = [_Column(self._folder) for _ in arrays]
        elif form != self._form:
            raise DataError(
                "Batches differ in what the model returns.",
                field="predictions",
                value=form,
                remedy="Return the same structure, or set eval_use_gather_object=True to keep lists and texts.",
            )
        for column, leaf in zip(self._columns, arrays, strict=True):
            column.append(leaf)
        self.num_batches += 1

    def tree(self) -> Any:
        """All batches as one tree of arrays ``[rows, …]``; None without any batch."""
        if not self.num_batches:
            return None
        return nested.rebuild(self._structure, [column.array() for column in self._columns])

    def by_batch(self) -> list[Any]:
        """All batches as a list of trees of arrays ``[batch, …]``."""
        columns: Sequence[list[Array]] = [list(column.segments()) for column in self._columns]
        return [nested.rebuild(self._structure, [column[i] for column in columns]) for i in range(self.num_batches)]

    def close(self) -> None:
        """Close the files. Arrays that were returned stay valid."""
        for column in self._columns:
            column.close()


class ObjectSpool:
    """Collects trees of arrays, texts and numbers batch by batch, with the interface of `PredictionSpool`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by close()
            max_size=MAX_MEMORY_BYTES, dir=str(folder) if folder else None, prefix=FILE_PREFIX
        )
        self._sizes: list[int] = []
        self._folder = folder

    @property
    def num_batches(self) -> int:
        """Number of batches."""
        return len(self._sizes)

    def append(self, tree: Any) -> None:
        """Add a batch. Raises ConfigError for a value of another kind."""
        data = nested.pack_tree(tree)
        with full_disk_named(self._folder, len(data)):
            self._file.write(data)
        self._sizes.append(len(data))

    def by_batch(self) -> list[Any]:
        """All batches as a list of trees."""
        with full_disk_named(self._folder, sum(self._sizes)):
            self._file.seek(0)  # writes what is buffered
        # Copies: unpacked arrays are read-only.
        return [_copied(nested.unpack_tree(self._file.read(size))) for size in self._sizes]

    def tree(self) -> Any:
        """All batches as one tree: lists joined, arrays concatenated (padded with -100); None without any batch."""
        batches = self.by_batch()
        return _join(batches) if batches else None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # on a full disk it fails to write what none will read
            self._file.close()


def _copied(tree: Any) -> Any:
    return nested.map_tree(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)


def _join(batches: list[Any]) -> Any:
    """Join trees into one: mappings and tuples part by part, lists end to end, arrays ``[batch, …]`` along axis 0."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: _join([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple):
        return tuple(_join([batch[place] for batch in batches]) for place in range(len(first)))
    if isinstance(first, list):
        return [part for batch in batches for part in batch]
    if isinstance(first, np.ndarray):
        return _concatenate(batches)
    return None if first is None else batches


def _concatenate(arrays: list[Any]) -> Any:
    arrays = [np.atleast_1d(array) for array in arrays]
    widths = {array.shape[1:] for array in arrays}
    if len({len(width) for width in widths}) > 1:  # no common shape: a list of arrays, one per batch
        return arrays
    if len(widths) == 1:
        return np.concatenate(arrays)
    rows = sum(len(array) for array in arrays)
    return fill_padded(np.empty(compute_padded_shape(rows, widths), dtype=np.result_type(*arrays)), arrays)
