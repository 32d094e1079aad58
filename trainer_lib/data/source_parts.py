"""Prepared data, source by source: the rows of one source are one part, whose bytes depend on nothing else.

    data/<split>/000007-00000.arrow    rows of source 7; a part has a file for each `shard_rows` rows of a split
    records/parts/000007.json          written last: the part is finished; its files, columns and statistics

Rows without ids of their own get ``source << 32 | row``, so ids keep the order of sources and rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer_lib.data.columns import ROW_ID, Schema
from trainer_lib.data.parts import RECORDS
from trainer_lib.data.shards import check_split_name, to_arrow_file
from trainer_lib.data.statistics import Statistics, describe, merge
from trainer_lib.errors import DataError
from trainer_lib.storage import FileEntry, Store

_FOLDER = f"{RECORDS}/parts"
_NAME = re.compile(r"(\d{6,})\.json")
_LIMIT = 64 << 20
_AT_ONCE = 16
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

    def list_finished(self) -> set[int]:
        """The numbers of the parts that have a record."""
        names = self._store.children(_FOLDER)
        return {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}

    def is_finished(self, part: int) -> bool:
        """Whether a part is recorded, from these settings."""
        return self.read(part) is not None

    def read(self, part: int) -> dict[str, Any] | None:
        """The record of a finished part: split -> rows, files, lengths, columns, own_ids, statistics; else None."""
        data = self._store.read_if_exists(_path(part), limit=_LIMIT)
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
        record = json.dumps({"settings": self._settings(part), "splits": splits}).encode()
        # Created, so that no other process sees half of it. It may be there: of a process that lost the part to us.
        if not self._store.create(_path(part), record):
            self._store.write_bytes(_path(part), record)

    def forget_damaged(self, total: int) -> None:
        """Remove the records of parts that are not intact, for the one process that starts the others."""

        def look(part: int) -> None:
            record = self.read(part) if part < total else None
            if record is None or not all(
                self._is_intact(entry) for split in record.values() for entry in split["files"]
            ):
                self._store.delete(_path(part))

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(look, sorted(self.list_finished())))

    def _is_intact(self, record: Mapping[str, Any]) -> bool:
        entry = FileEntry(**record)
        store = self._store
        return (
            store.exists(entry.path)
            and store.size(entry.path) == entry.size
            and store.digest(entry.path) == entry.sha256
        )


def _path(part: int) -> str:
    return f"{_FOLDER}/{part:06d}.json"


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
    statistics: list[Statistics] = []
    schema, has_ids = None, False
    for number in itertools.count():
        chunk = list(itertools.islice(rows_left, shard_rows))
        if not chunk:
            break
        if schema is None:
            schema = Schema.infer(chunk, f"{split}', source '{source}")
            has_ids = ROW_ID in chunk[0]
        first = sum(lengths)
        batch = schema.batch(chunk, first, allow_nan=allow_nan, first_id=(part << ID_BITS) + first)
        # One write, so that a killed run leaves a whole file or none.
        entries.append(store.write_bytes(f"data/{split}/{part:06d}-{number:05d}.arrow", to_arrow_file(batch)))
        lengths.append(len(chunk))
        statistics.append(describe(batch))
        on_rows(sum(lengths))
    if schema is None:
        return None
    return {
        "rows": sum(lengths),
        "files": [*map(dataclasses.asdict, entries)],
        "lengths": lengths,
        "columns": {name: str(column) for name, column in schema.columns.items()},
        "own_ids": has_ids,
        "statistics": merge(statistics),
    }


def check_same_columns(split: str, parts: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    """The columns of a split, which all sources have.

    Args:
        parts: each source as text, and its columns.

    Raises:
        DataError: two sources have other columns; the error names them.
    """
    first, columns = parts[0]
    for source, found in parts[1:]:
        for name in {**columns, **found}:
            if columns.get(name) != found.get(name):
                there, here = (each.get(name) or "no such column" for each in (columns, found))
                raise DataError(
                    f"The sources of split '{split}' differ in column '{name}': "
                    f"{there} in {first}, {here} in {source}.",
                    field="prepare_shard",
                    value=source,
                    remedy="Give every source the same columns and types: float(x), or an array with its dtype.",
                )
    return dict(columns)
