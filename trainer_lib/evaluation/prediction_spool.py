"""Predictions collected on disk, not in memory.

Batches are appended to an unlinked temporary file, so nothing is left behind, however the process ends. Arrays are
returned as copies or copy-on-write maps: ``labels[labels == -100] = pad`` changes neither the file nor another array.
Results up to 16 MiB per leaf stay in memory, and so do outputs that no array can map (`eval_use_gather_object`: lists
of boxes per image, texts, numbers).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer_lib.data.loading.collators import IGNORED
from trainer_lib.errors import DataError, StorageFullError, is_full_disk
from trainer_lib.evaluation import nested
from trainer_lib.evaluation.nested import Array

MAX_MEMORY_BYTES = 16 << 20


def _open_file(folder: Path | None) -> Any:
    """A file without a name: in memory while it is small, then on the disk."""
    return tempfile.SpooledTemporaryFile(
        MAX_MEMORY_BYTES, dir=None if folder is None else str(folder), prefix="trainflow-spool-"
    )


class _Column:
    """One leaf: the bytes of all batches, one after the other along the first dimension."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._file, self._bytes = folder, _open_file(folder), 0
        self._segments: list[tuple[np.dtype[Any], tuple[int, ...]]] = []

    def append(self, array: Array) -> None:
        array = np.atleast_1d(array)  # a scalar per batch becomes one row
        with full_disk_named(self._folder, array.nbytes):
            self._file.write(array.tobytes())
        self._segments.append((array.dtype, array.shape))
        self._bytes += array.nbytes

    def segments(self) -> Iterator[Array]:
        """The batches' arrays in their original shapes."""
        offset = 0
        for dtype, shape in self._segments:
            segment = self._map(dtype, offset, shape)
            offset += segment.nbytes
            yield segment

    def array(self) -> Array:
        """All rows as one array ``[rows, …]``; narrower rows are padded on the right with -100."""
        widths = {shape[1:] for _, shape in self._segments}
        dtype = np.result_type(*{dtype for dtype, _ in self._segments})
        if len({len(width) for width in widths}) > 1:
            what = "Batches of predictions differ in their number of dimensions."
            remedy = "Return tensors of one rank, or use preprocess_logits_for_metrics."
            raise DataError(what, field="predictions", value=sorted(widths), remedy=remedy)
        if len(widths) == 1 and all(dtype == kind for kind, _ in self._segments):
            # Equal shapes: the file's bytes are the array already.
            return self._map(dtype, 0, (sum(shape[0] for _, shape in self._segments), *next(iter(widths))))
        with contextlib.closing(_Column(self._folder)) as padded:
            for segment in self.segments():
                padded.append(_pad(segment, widths, dtype))
            return padded.array()

    def _map(self, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> Array:
        """An array of the caller's: a part of the file that was read, or a copy-on-write map of it."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with full_disk_named(self._folder, self._bytes):
            self._file.seek(offset)  # writes what is buffered
        if self._bytes > MAX_MEMORY_BYTES and size:
            found = np.asarray(np.memmap(self._file, dtype=dtype, mode="c", offset=offset, shape=shape))
        else:
            found = np.frombuffer(bytearray(self._file.read(size)), dtype).reshape(shape)
        self._file.seek(0, 2)
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk it fails to write what none will read
            self._file.close()


def _pad(array: Array, widths: set[tuple[int, ...]], dtype: np.dtype[Any]) -> Array:
    """An array ``[rows, …]`` as wide as the widest, filled up with -100."""
    padded = np.full((len(array), *map(max, zip(*widths, strict=True))), IGNORED, dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


@contextlib.contextmanager
def full_disk_named(folder: Path | None, needed: int) -> Iterator[None]:
    """Turn an error of a full disk into a StorageFullError with the folder; `needed`: bytes that were to be written."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        place = folder or Path(tempfile.gettempdir())
        what = f"The predictions need {needed:,} more bytes, and {shutil.disk_usage(place).free:,} are free."
        remedy = "Free space, set TMPDIR, or use preprocess_logits_for_metrics or batch_eval_metrics."
        raise StorageFullError(what, field="output_dir", value=str(place), remedy=remedy) from error


class PredictionSpool:
    """Collects a tree of arrays batch by batch, in temporary files in `folder`; None: the system's."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._form: Any = None
        self._columns: list[_Column] = []
        self.num_batches = 0

    def append(self, tree: Any) -> None:
        """Add a batch: a tree of arrays or tensors ``[batch, …]``. Raises DataError for another tree than before."""
        arrays: list[Array] = []
        form = nested.describe_form(nested.to_numpy(tree), arrays)
        if self._form is None:
            self._form = form
            self._columns = [_Column(self._folder) for _ in arrays]
        elif form != self._form:
            remedy = "Return the same structure, or set eval_use_gather_object=True to keep lists and texts."
            raise DataError("Batches differ in what the model returns.", field="predictions", value=form, remedy=remedy)
        for column, leaf in zip(self._columns, arrays, strict=True):
            column.append(leaf)
        self.num_batches += 1

    def tree(self) -> Any:
        """All batches as one tree of arrays ``[rows, …]``; None without any batch."""
        if not self.num_batches:
            return None
        return nested.rebuild(self._form, [column.array() for column in self._columns])

    def by_batch(self) -> list[Any]:
        """All batches as a list of trees of arrays ``[batch, …]``."""
        columns = [list(column.segments()) for column in self._columns]
        return [nested.rebuild(self._form, [column[i] for column in columns]) for i in range(self.num_batches)]

    def close(self) -> None:
        """Close the files. Arrays that were returned stay valid."""
        for column in self._columns:
            column.close()


class ObjectSpool:
    """Collects trees of arrays, texts and numbers batch by batch, with the interface of `PredictionSpool`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._file = folder, _open_file(folder)
        self._sizes: list[int] = []
        self.num_batches = 0

    def append(self, tree: Any) -> None:
        """Add a batch. Raises ConfigError for a value of another kind."""
        data = nested.pack_tree(tree)
        with full_disk_named(self._folder, len(data)):
            self._file.write(data)
        self._sizes.append(len(data))
        self.num_batches += 1

    def by_batch(self) -> list[Any]:
        """All batches as a list of trees."""
        with full_disk_named(self._folder, sum(self._sizes)):
            self._file.seek(0)  # writes what is buffered
        # Not bytes: arrays of these are read-only.
        return [nested.unpack_tree(bytearray(self._file.read(size))) for size in self._sizes]

    def tree(self) -> Any:
        """All batches as one tree: lists joined, arrays concatenated (padded with -100); None without any batch."""
        batches = self.by_batch()
        return _join(batches) if batches else None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # on a full disk it fails to write what none will read
            self._file.close()


def _join(batches: list[Any]) -> Any:
    """Join trees into one: mappings and tuples part by part, lists end to end, arrays ``[batch, …]`` along axis 0."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: _join([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple):
        return tuple(_join([batch[place] for batch in batches]) for place in range(len(first)))
    if isinstance(first, list):
        return [part for batch in batches for part in batch]
    if not isinstance(first, np.ndarray):
        return None if first is None else batches
    arrays = [np.atleast_1d(array) for array in batches]
    widths = {array.shape[1:] for array in arrays}
    if len({len(width) for width in widths}) > 1:  # no common shape: a list of arrays, one per batch
        return arrays
    return np.concatenate([_pad(array, widths, np.result_type(*arrays)) for array in arrays])
