"""Prepared data, source by source: the rows of one source are one part, whose bytes depend on nothing else.

    data/<split>/000007-00000.arrow       rows of source 7; a part has a file for each `shard_rows` rows of a split
    records/parts/000000/00000007.json    written last: the part is finished; its files, columns and statistics

Rows without ids of their own get ``source << 32 | row``, so ids keep the order of sources and rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from trainer_lib.data.columns import ROW_ID, Schema
from trainer_lib.data.part_records import PartRecords
from trainer_lib.data.shards import check_split_name, to_arrow_file
from trainer_lib.data.statistics import Statistics, describe, merge
from trainer_lib.errors import DataError
from trainer_lib.storage import FileEntry, Store

_FOLDER = "parts"
_LIMIT = 64 << 20
ID_BITS = 32


class SourceParts:
    """The finished parts of one job.

    Args:
        store: the stage's folder.
        settings: what a part is made from, by its number; one that was made from others is not finished.
    """

    def __init__(self, store: Store, settings: Callable[[int], Mapping[str, Any]]) -> None:
        self._store = store
        self._settings = settings
        self._records = PartRecords(store, _FOLDER)

    def list_finished(self, block: int) -> set[int]:
        """The numbers of a block's parts that have a record."""
        return self._records.list_block(block)

    def is_finished(self, part: int) -> bool:
        """Whether a part is recorded, from these settings."""
        return self.read(part) is not None

    def read(self, part: int) -> dict[str, Any] | None:
        """The record of a finished part: split -> rows, files, lengths, columns, own_ids, statistics; else None."""
        data = self._records.read(part, limit=_LIMIT)
        if data is None:
            return None
        try:
            record = json.loads(data)
            found: dict[str, Any] = record["splits"]
        except (ValueError, KeyError, TypeError):
            return None
        return found if record["settings"] == self._settings(part) else None

    def write(self, part: int, splits: Mapping[str, Any]) -> None:
        """Record that a part is finished."""
        self._records.write(part, json.dumps({"settings": self._settings(part), "splits": splits}).encode())

    def read_all(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """The number and the record of each finished part, in order, read some at a time."""
        return self._records.look_at_all(self.read)

    def forget_damaged(self, total: int) -> None:
        """Remove the records of parts that are not intact, for the one process that starts the others."""

        def look(part: int) -> None:
            record = self.read(part) if part < total else None
            if record is None or not all(
                self._is_intact(entry) for split in record.values() for entry in split["files"]
            ):
                self._records.delete(part)

        for _ in self._records.look_at_all(look):
            pass

    def _is_intact(self, record: Mapping[str, Any]) -> bool:
        entry = FileEntry(**record)
        store = self._store
        return (
            store.exists(entry.path)
            and store.size(entry.path) == entry.size
            and store.digest(entry.path) == entry.sha256
        )


def write_rows(
    store: Store,
    part: int,
    split: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    source: str,
    shard_rows: int,
    allow_nan: bool,
    on_rows: Callable[[int], None],
) -> dict[str, Any] | None:
    """Write the rows that a source has of a split; return what the part's record holds of it, None without rows.

    Args:
        source: the source as text, for errors.
        on_rows: called with the number of rows so far.

    Raises:
        DataError: a row does not have the type of the source's first ones, or a value is NaN or infinite.
    """
    check_split_name(split)
    rows_left = iter(rows)
    entries: list[FileEntry] = []
    lengths: list[int] = []
    statistics: Statistics = {}
    schema, has_ids, rows_so_far = None, False, 0
    for number in itertools.count():
        chunk = list(itertools.islice(rows_left, shard_rows))
        if not chunk:
            break
        if schema is None:
            schema = Schema.infer(chunk, f"{split}', source '{source}")
            has_ids = ROW_ID in chunk[0]
        batch = schema.batch(chunk, rows_so_far, allow_nan=allow_nan, first_id=(part << ID_BITS) + rows_so_far)
        # One write, so that a killed run leaves a whole file or none.
        entries.append(store.write_bytes(f"data/{split}/{part:06d}-{number:05d}.arrow", to_arrow_file(batch)))
        lengths.append(len(chunk))
        rows_so_far += len(chunk)
        statistics = merge([statistics, describe(batch)])
        on_rows(rows_so_far)
    if schema is None:
        return None
    return {
        "rows": rows_so_far,
        "files": [*map(dataclasses.asdict, entries)],
        "lengths": lengths,
        "columns": {name: str(column) for name, column in schema.columns.items()},
        "own_ids": has_ids,
        "statistics": statistics,
    }


class SplitOfParts:
    """A split put together from the records of its parts, one after the other; it keeps no record.

    Attributes:
        rows: of all parts so far.
        files, lengths: its files, and the rows of each, in order.
        columns: what all parts have.
        statistics: of all rows.
        has_own_ids: whether rows of some part came with ids.
    """

    def __init__(self, name: str) -> None:
        self.rows = 0
        self.files: list[FileEntry] = []
        self.lengths: list[int] = []
        self.columns: dict[str, str] = {}
        self.statistics: Statistics = {}
        self.has_own_ids = False
        self._name = name
        self._first = ""

    def add(self, source: str, part: Mapping[str, Any]) -> None:
        """Add the record of a part, which `source` (a text) was made from.

        Raises:
            DataError: its columns are not those of the first part; the error names both sources.
        """
        if not self.files:
            self._first, self.columns = source, dict(part["columns"])
        self._check_columns(source, part["columns"])
        self.rows += part["rows"]
        self.files += [FileEntry(**entry) for entry in part["files"]]
        self.lengths += part["lengths"]
        self.statistics = merge([self.statistics, part["statistics"]])
        self.has_own_ids |= part["own_ids"]

    def _check_columns(self, source: str, found: Mapping[str, str]) -> None:
        for name in {**self.columns, **found}:
            if self.columns.get(name) != found.get(name):
                there, here = (each.get(name) or "no such column" for each in (self.columns, found))
                raise DataError(
                    f"The sources of split '{self._name}' differ in column '{name}': "
                    f"{there} in {self._first}, {here} in {source}.",
                    field="prepare_shard",
                    value=source,
                    remedy="Give every source the same columns and types: float(x), or an array with its dtype.",
                )
