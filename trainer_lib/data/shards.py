"""Writes prepared data: each split as Arrow shards of a fixed number of rows, so that a crash costs one shard.

``data/<split>/00000.arrow`` is an uncompressed Arrow IPC file with one record batch. A reader maps it and reads single
rows. ``records/data/<split>/00000.arrow.json`` records that the shard is finished. A run that is repeated under the
same key keeps the finished shards whose digest still holds, and writes the others.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from trainer_lib.data.arrow_split import ArrowSplit
from trainer_lib.data.columns import Schema
from trainer_lib.data.parts import find_finished_part, record_part
from trainer_lib.data.predictions import PredictionWriter
from trainer_lib.errors import DataError
from trainer_lib.storage import FileEntry, Store

__all__ = ["ArrowSplit", "PredictionWriter", "SplitWriter"]

# It becomes a folder's name.
_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_split_name(split: str) -> None:
    """Raise DataError for a text that cannot be the name of a split."""
    if not _SPLIT_NAME.fullmatch(split):
        raise DataError(
            "The text cannot be the name of a split.",
            field="prepare",
            value=split,
            remedy="Use letters, digits, '_', '-' and '.'.",
        )


def to_arrow_file(batch: pa.RecordBatch) -> bytes:
    """The bytes of an Arrow file with one record batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


class SplitWriter:
    """Writes one split.

    Args:
        store: the stage's folder.
        split: name of the split, and of its folder.
        shard_rows: rows per shard.
        allow_nan: store NaN and infinite values instead of refusing them.
        on_shard: called with the number of rows so far after each shard.

    Attributes:
        files: the shards, written or kept, in order.
    """

    def __init__(
        self,
        store: Store,
        split: str,
        *,
        shard_rows: int = 10_000,
        allow_nan: bool = False,
        on_shard: Callable[[int], None] = lambda rows: None,
    ) -> None:
        check_split_name(split)
        self._store = store
        self._split = split
        self._shard_rows = shard_rows
        self._allow_nan = allow_nan
        self._on_shard = on_shard
        self._schema: Schema | None = None
        self.files: list[FileEntry] = []

    def write(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Write all rows; return ``{"rows", "shards": [paths], "columns": {name: type}}``.

        The rows of finished shards are read from the iterable and dropped, so it must give the same rows every time.

        Raises:
            DataError: there are no rows, a row does not have the type of the first ones, or a value is NaN or infinite.
        """
        source = iter(rows)
        total = 0
        for number in itertools.count():
            chunk = list(itertools.islice(source, self._shard_rows))
            if not chunk:
                break
            self.files.append(self._write_shard(number, chunk, total))
            total += len(chunk)
            self._on_shard(total)
        if self._schema is None:
            raise DataError(
                f"The split '{self._split}' is empty.",
                field="prepare",
                value=self._split,
                remedy="Check the filters and sources in prepare(); leave the split out if it is not needed.",
            )
        columns = {name: str(column) for name, column in self._schema.columns.items()}
        return {"rows": total, "shards": [entry.path for entry in self.files], "columns": columns}

    def _write_shard(self, number: int, chunk: list[Mapping[str, Any]], first_row: int) -> FileEntry:
        path = f"data/{self._split}/{number:05d}.arrow"
        settings = {"first_row": first_row, "rows": len(chunk), "allow_nan": self._allow_nan}
        found = find_finished_part(self._store, path, settings)
        if found is not None:
            if self._schema is None:
                # The schema of the first run: rows that are read now must fit the shards that are there.
                stored = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found.notes["schema"])))
                self._schema = Schema.of_arrow(stored, self._split)
            return found.entry
        if self._schema is None:
            self._schema = Schema.infer(chunk, self._split)
        batch = self._schema.batch(chunk, first_row, allow_nan=self._allow_nan)
        # One write, so that a killed run leaves a whole shard or none.
        entry = self._store.write_bytes(path, to_arrow_file(batch))
        schema = base64.b64encode(self._schema.arrow.serialize().to_pybytes()).decode()
        # After the file: a record without its file would count as finished.
        record_part(self._store, entry, settings, {"schema": schema})
        return entry
