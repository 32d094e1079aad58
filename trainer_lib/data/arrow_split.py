"""A prepared split as a map-style dataset: rows are looked up in memory-mapped shards and never read ahead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainer_lib.data.cache import FileCache
from trainer_lib.data.column import TEXT, Column
from trainer_lib.data.columns import ROW_ID, column_of
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import FileEntry, Store

Getter = Callable[[int], Any]


class ArrowSplit:
    """The rows of one split: ``split[i]`` is ``{column: value}``, in constant time. Safe to pickle and to fork.

    Values are bool, int, float, str, bytes, lists of str or writable NumPy arrays, copied out of the map. The column
    `row_id` names a row and is not an input of the model: `row_ids` returns it. Shards of a remote store are downloaded
    once, at first use, into a bounded cache.

    Args:
        data: the prepared data as in a request: ``{"url", "splits", "files", …}``.
        split: name of the split.
        cache: folder for remote shards; default: the user's cache.

    Raises:
        ConfigError: the split does not exist. DamagedError: a shard cannot be read.
    """

    is_pure = True  # reading a row draws no random numbers, so loaders need not seed around it

    def __init__(self, data: Mapping[str, Any], split: str, cache: FileCache | None = None) -> None:
        if split not in data["splits"]:
            known = ", ".join(data["splits"])
            raise ConfigError(
                "The split was not prepared.", field="split", value=split, remedy=f"Prepared are: {known}."
            )
        info = data["splits"][split]
        files = {str(file["path"]): file for file in data["files"]}
        self.name = split
        self._url = str(data["url"])
        self._shards = [_parse_entry(files[path]) for path in info["shards"]]
        self._cache = cache
        self._columns = {str(name): str(kind) for name, kind in info["columns"].items()}
        self._opened: dict[int, dict[str, Getter]] = {}
        self._rows = int(info["rows"])
        self._starts = self._row_starts(info.get("lengths") or ())

    @property
    def column_names(self) -> list[str]:
        """Names of the columns of a row."""
        return [name for name in self._columns if name != ROW_ID]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, row = self._locate(index)
        return {name: get(row) for name, get in self._open_getters(shard).items() if name != ROW_ID}

    def row_ids(self, start: int, stop: int) -> np.ndarray:
        """The ids of rows [start, stop), int64 or texts ``[stop - start]``."""
        places = (self._locate(index) for index in range(start, stop))
        kind = object if self._columns[ROW_ID] == TEXT else np.int64
        return np.fromiter((self._open_getters(shard)[ROW_ID](row) for shard, row in places), kind, stop - start)

    def column_values(self, column: str) -> Iterator[Any]:
        """The values of one column, in the order of the rows; the others are not read."""
        for index in range(self._rows):
            shard, row = self._locate(index)
            yield self._open_getters(shard)[column](row)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}  # a worker process maps the shards itself

    def _locate(self, index: int) -> tuple[int, int]:
        if not -self._rows <= index < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        index = int(index) % self._rows
        shard = bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    def _row_starts(self, lengths: Sequence[int]) -> list[int]:
        """The first row of each shard. Without `lengths` all shards but the last have the length of the first."""
        if lengths:
            return list(accumulate(lengths, initial=0))[:-1]
        if len(self._shards) == 1:
            return [0]
        length = self._map_batch(0).num_rows
        return [number * length for number in range(len(self._shards))]

    def _open_getters(self, shard: int) -> dict[str, Getter]:
        getters = self._opened.get(shard)
        if getters is None:
            batch = self._map_batch(shard)
            getters = {field.name: _create_getter(batch.column(field.name), column_of(field)) for field in batch.schema}
            self._opened[shard] = getters
        return getters

    def _map_batch(self, shard: int) -> pa.RecordBatch:
        entry = self._shards[shard]
        path = self._find_local_file(entry)
        try:
            # A shard is one batch, so a row's place in the file is its place in the batch.
            batch: pa.RecordBatch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        except (OSError, pa.ArrowInvalid) as error:
            raise DamagedError(
                f"The shard cannot be read ({error}).",
                field=entry.path,
                remedy="Run with --force prepare-data.",
            ) from error
        return batch

    def _find_local_file(self, entry: FileEntry) -> Path:
        store = Store.open(self._url)
        if store.is_local:
            return store.local_path(entry.path)
        self._cache = self._cache or FileCache.default()
        return self._cache.fetch(store, entry)


def _parse_entry(file: Mapping[str, Any]) -> FileEntry:
    return FileEntry(str(file["path"]), int(file["size"]), str(file["sha256"]))


def _create_getter(array: pa.Array, column: Column) -> Getter:
    """A function from row to value. It reads a view of the map, at a quarter of the cost of an Arrow scalar."""
    if column.kind in ("string", "bytes") or column.has_texts:
        return lambda row: array[row].as_py()
    if column.kind == "scalar":
        scalars = array.to_numpy(zero_copy_only=False)
        return lambda row: scalars[row].item()
    dtype = np.dtype(column.dtype)
    # A byte for each boolean, as `columns` stores them.
    values = array.values.to_numpy().view(np.bool_) if dtype.kind == "b" else array.values.to_numpy()
    if column.kind == "array":
        shaped = values.reshape(len(array), *column.shape)
        # A copy: the map is read-only, and a user's transform may change the sample.
        return lambda row: shaped[row].copy()
    offsets = array.offsets.to_numpy()
    return lambda row: values[offsets[row] : offsets[row + 1]].copy()
