"""Writes prepared data: splits as Arrow shards of a fixed number of rows, so that a crash costs one shard.

``data/<split>/00000.arrow`` is an uncompressed Arrow IPC file with one record batch. A reader maps it and reads single
rows. A record (`trainer_lib.data.rows.parts`) says that the shard is finished. A run that is repeated under the
same key keeps the finished shards whose digest still holds, and writes the others.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainer_lib.data.rows.column import TEXT, Column
from trainer_lib.data.rows.columns import ROW_ID, Schema
from trainer_lib.data.rows.mixture import INFO, Mixture
from trainer_lib.data.rows.parts import NumberedParts
from trainer_lib.errors import ConfigError, DamagedError, DataError
from trainer_lib.storage import FileEntry, Store

DEFAULT_BYTES = 50 * 1024**3


class FileCache:
    """A folder, of mode 0700, of files named by their SHA-256, so that pipelines share equal files.

    From `max_bytes` on the least recently used files are removed.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    @classmethod
    def default(cls) -> FileCache:
        """The user's cache: ``$TRAINFLOW_CACHE_DIR``, or ``$XDG_CACHE_HOME/trainflow/files``.

        ``$TRAINFLOW_CACHE_BYTES`` sets its size.
        """
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get("TRAINFLOW_CACHE_DIR") or home / "trainflow" / "files")
        return cls(folder, int(os.environ.get("TRAINFLOW_CACHE_BYTES") or DEFAULT_BYTES))

    def fetch(self, store: Store, entry: FileEntry) -> Path:
        """The path of a local copy of `entry`; a missing one is downloaded once per machine, its digest verified."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / entry.sha256
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The size is enough: the digest was compared when the file was downloaded.
            if not path.exists() or path.stat().st_size != entry.size:
                self._make_room(entry.size)
                # Renamed when complete: a killed download never looks like a file.
                partial = path.with_suffix(".partial")
                store.download(entry.path, partial, expect=entry)
                partial.replace(path)
            os.utime(path)  # marks the use; a mapped file that is removed stays readable until it is closed
        return path

    def _make_room(self, size: int) -> None:
        files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._folder.iterdir())
        kept = sum(bytes_ for _, bytes_, _ in files)
        for _, bytes_, path in files:
            if kept + size <= self._max_bytes:
                return
            if path.name != "lock":
                path.unlink()
                kept -= bytes_


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
            what = "The split was not prepared."
            raise ConfigError(what, field="split", value=split, remedy=f"Prepared are: {known}.")
        info = data["splits"][split]
        files = {str(file["path"]): file for file in data["files"]}
        self.name = split
        self._url = str(data["url"])
        self._shards = [FileEntry(**files[path]) for path in info["shards"]]
        self._cache = cache
        self._mixture: Mapping[str, Any] = data.get("info", {}).get(INFO, {})
        self._columns = {str(name): str(kind) for name, kind in info["columns"].items()}
        self._opened: dict[int, dict[str, Getter]] = {}
        self._rows = int(info["rows"])
        self._starts = self._row_starts(info.get("lengths") or ())

    @property
    def column_names(self) -> list[str]:
        """Names of the columns of a row."""
        return [name for name in self._columns if name != ROW_ID]

    @property
    def mixture(self) -> Mixture | None:
        """The sources of the rows, and how they are mixed in training; None: they are not."""
        return Mixture.of(self._mixture, self.name) if "sources" in self._mixture else None

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

    def column_values(self, column: str, rows: Iterable[int] | None = None) -> Iterator[Any]:
        """The values of one column in all or some rows, in their order; other columns are not read."""
        for index in range(self._rows) if rows is None else rows:
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
        """The first rows of shards. Without `lengths` all shards but the last have the length of the first."""
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
            types = {name: Column.parse(kind) for name, kind in self._columns.items()}
            getters = {name: _create_getter(batch.column(name), column) for name, column in types.items()}
            self._opened[shard] = getters
        return getters

    def _map_batch(self, shard: int) -> pa.RecordBatch:
        entry, store = self._shards[shard], Store.open(self._url)
        if store.is_local:
            path = store.local_path(entry.path)
        else:
            self._cache = self._cache or FileCache.default()
            path = self._cache.fetch(store, entry)
        try:
            # A shard is one batch, so a row's place in the file is its place in the batch.
            batch: pa.RecordBatch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        except (OSError, pa.ArrowInvalid) as error:
            what = f"The shard cannot be read ({error})."
            raise DamagedError(what, field=entry.path, remedy="Run with --force prepare-data.") from error
        return batch


def _create_getter(array: pa.Array, column: Column) -> Getter:
    """A function from row to value. It reads a view of the map, at a quarter of the cost of an Arrow scalar."""
    if column.kind in ("string", "bytes") or column.has_texts:
        return lambda row: array[row].as_py()
    if column.kind == "scalar":
        scalars = array.to_numpy(zero_copy_only=False)
        return lambda row: scalars[row].item()
    dtype = np.dtype(column.dtype)
    # Booleans as bytes, as `columns` stores them.
    values = array.values.to_numpy().view(np.bool_) if dtype.kind == "b" else array.values.to_numpy()
    if column.kind == "array":
        shaped = values.reshape(len(array), *column.shape)
        # A copy: the map is read-only, and a user's transform may change the sample.
        return lambda row: shaped[row].copy()
    offsets = array.offsets.to_numpy()
    return lambda row: values[offsets[row] : offsets[row + 1]].copy()


# It becomes a folder's name.
_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_split_name(split: str) -> None:
    """Raise DataError for a text that cannot be the name of a split."""
    if not _SPLIT_NAME.fullmatch(split):
        remedy = "Use letters, digits, '_', '-' and '.'."
        raise DataError("The text cannot be the name of a split.", field="prepare", value=split, remedy=remedy)


def to_arrow_file(batch: pa.RecordBatch) -> bytes:
    """The bytes of an Arrow file with one record batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def write_split(
    store: Store,  # the stage's folder
    split: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    shard_rows: int = 10_000,
    allow_nan: bool = False,  # store NaN and infinite values instead of refusing them
    on_shard: Callable[[int], None] = lambda rows: None,  # called with the number of rows so far after every shard
) -> tuple[dict[str, Any], list[FileEntry]]:
    """Write all rows of a split; return ``{"rows", "shards": [paths], "columns": {name: type}}`` and its files.

    The rows of finished shards are read from the iterable and dropped, so it must give the same rows every time. Raises
    DataError without rows, for a row without the type of the first ones, and for NaN and infinite values.
    """
    check_split_name(split)
    settings = {"shard_rows": shard_rows, "allow_nan": allow_nan}
    shards = NumberedParts(store, f"data/{split}", "{:05d}.arrow", lambda part: settings)
    source, files, total = iter(rows), list[FileEntry](), 0
    schema: Schema | None = None
    for number in itertools.count():
        if not (chunk := list(itertools.islice(source, shard_rows))):
            break
        found = shards.find(number, digests=True)
        if found is not None and found.notes.get("rows") == len(chunk):
            # The columns of the first run: rows that are read now must fit the shards that are there.
            schema = schema or Schema.parse(found.notes["columns"], split)
            files += found.files
        else:
            schema = schema or Schema.infer(chunk, split)
            notes = {"rows": len(chunk), "columns": schema.to_texts()}
            data = to_arrow_file(schema.batch(chunk, total, allow_nan=allow_nan))
            files.append(shards.write(number, data, notes))
        total += len(chunk)
        on_shard(total)
    if schema is None:
        remedy = "Check the filters and sources in prepare(); leave the split out if it is not needed."
        raise DataError(f"The split '{split}' is empty.", field="prepare", value=split, remedy=remedy)
    return {"rows": total, "shards": [entry.path for entry in files], "columns": schema.to_texts()}, files
