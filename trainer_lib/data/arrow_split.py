"""A prepared split as a map-style dataset: rows are looked up in memory-mapped shards, none is read ahead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainer_lib.data.cache import FileCache
from trainer_lib.data.columns import ROW_ID, Column
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import FileEntry, Store

Getter = Callable[[int], Any]


class ArrowSplit:
    """Rows of one split by number: ``split[i] -> {column: value}`` in constant time. Safe to pickle and to fork.

    Values are bool, int, float, str, bytes or NumPy arrays of the reader's own (writable; a row is copied out of the
    map). `row_id` names a row and is no input: `row_ids` gives it. Shards on a remote store are downloaded once, at
    first use, into a bounded cache.

    Args:
        data: the prepared data as requests carry it: ``{"url", "splits", "files", …}``.
        split: which one.
        cache: where remote shards are kept; the user's cache by default.

    Raises:
        ConfigError: there is no such split.
    """

    is_pure = True  # reading a row draws no random number: loaders need not seed around it

    def __init__(self, data: Mapping[str, Any], split: str, cache: FileCache | None = None) -> None:
        if split not in data["splits"]:
            known = ", ".join(data["splits"])
            raise ConfigError("is not a prepared split.", field="split", value=split, remedy=f"Prepared were: {known}.")
        info = data["splits"][split]
        files = {str(file["path"]): file for file in data["files"]}
        self.name = split
        self._url = str(data["url"])
        self._shards = [_entry(files[path]) for path in info["shards"]]
        self._cache = cache
        self._columns = {str(name): str(kind) for name, kind in info["columns"].items()}
        self._opened: dict[int, dict[str, Getter]] = {}
        self._rows = int(info["rows"])
        self._starts = self._row_starts()

    @property
    def column_names(self) -> list[str]:
        """The columns of a row."""
        return [name for name in self._columns if name != ROW_ID]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, row = self._place(index)
        return {name: get(row) for name, get in self._getters(shard).items() if name != ROW_ID}

    def row_ids(self, start: int, stop: int) -> np.ndarray:
        """The ids of rows `start` … `stop` - 1, int64 [stop - start]."""
        places = (self._place(index) for index in range(start, stop))
        return np.fromiter((self._getters(shard)[ROW_ID](row) for shard, row in places), np.int64, stop - start)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def _place(self, index: int) -> tuple[int, int]:
        if not -self._rows <= index < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        index = int(index) % self._rows
        shard = bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    def _row_starts(self) -> list[int]:
        """First row of each shard. All but the last hold equally many, so the first one's length tells."""
        if len(self._shards) == 1:
            return [0]
        length = self._batch(0).num_rows
        return [number * length for number in range(len(self._shards))]

    def _getters(self, shard: int) -> dict[str, Getter]:
        getters = self._opened.get(shard)
        if getters is None:
            batch = self._batch(shard)
            getters = {field.name: _getter(batch.column(field.name), Column.of_field(field)) for field in batch.schema}
            self._opened[shard] = getters
        return getters

    def _batch(self, shard: int) -> pa.RecordBatch:
        entry = self._shards[shard]
        path = self._local(entry)
        try:
            batch: pa.RecordBatch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        except (OSError, pa.ArrowInvalid) as error:
            raise DamagedError(
                f"is not the shard that prepare wrote ({error}).",
                field=entry.path,
                remedy="Run with --force prepare-data.",
            ) from error
        return batch

    def _local(self, entry: FileEntry) -> Path:
        store = Store.open(self._url)
        if store.is_local:
            return store.local_path(entry.path)
        self._cache = self._cache or FileCache.default()
        return self._cache.fetch(store, entry)


def _entry(file: Mapping[str, Any]) -> FileEntry:
    return FileEntry(str(file["path"]), int(file["size"]), str(file["sha256"]))


def _getter(array: pa.Array, column: Column) -> Getter:
    """How to take row i out of a column: a view of the map, which costs a quarter of an Arrow scalar."""
    if column.kind in ("string", "bytes"):
        return lambda row: array[row].as_py()
    if column.kind == "scalar":
        scalars = array.to_numpy(zero_copy_only=False)
        return lambda row: scalars[row].item()
    dtype = np.dtype(column.dtype)
    values = array.values.to_numpy().view(np.bool_) if dtype.kind == "b" else array.values.to_numpy()
    if column.kind == "array":
        shaped = values.reshape(len(array), *column.shape)
        return lambda row: shaped[row].copy()
    offsets = array.offsets.to_numpy()
    return lambda row: values[offsets[row] : offsets[row + 1]].copy()
