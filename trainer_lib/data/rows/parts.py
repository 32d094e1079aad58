"""The parts of a job, and the records that say which are finished, so that a repeated run does not write them again.

    records/<folder>/000002/00002007.json    of part 2007, written after its file

A thousand records are in a folder, so no listing and nothing in memory grows with their number. Imports neither torch
nor pyarrow.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import InfrastructureError
from trainer_lib.locks.shared_parts import BLOCK, block_name
from trainer_lib.storage import FileEntry, Store

FOLDER = "predictions"
SUMS = "sums"
ERROR = "error"
"""Column with what is wrong with a row, where bad rows are allowed."""
RECORDS = "records"
_NAME = re.compile(r"(\d{8,})\.json")
_AT_ONCE = 16  # records that are read at a time: on an object store they take a while, and little else

MAX_RECORD_BYTES = 1 << 20

T = TypeVar("T")


class PartRecords:
    """The records of one job.

    Args:
        store: the job's folder.
        folder: of these records, below the folder of all.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store.child(RECORDS, *folder.split("/"))

    def read(self, part: int, *, limit: int) -> bytes | None:
        """The record of a part; None without one."""
        return self._store.read_if_exists(_path(part), limit=limit)

    def write(self, part: int, record: bytes) -> None:
        """Write a part's record."""
        # Created, so that no other process sees half of it. It may be there: of a process that lost the part to us.
        if not self._store.create(_path(part), record):
            self._store.write_bytes(_path(part), record)

    def delete(self, part: int) -> None:
        """Remove a part's record."""
        self._store.delete(_path(part))

    def list_block(self, block: int) -> set[int]:
        """The numbers of a block's parts that have a record."""
        return {int(match[1]) for name in self._store.children(block_name(block)) if (match := _NAME.fullmatch(name))}

    def list_blocks(self) -> list[int]:
        """The blocks that may have records, in order."""
        return sorted(int(name) for name in self._store.children() if name.isdecimal())

    def is_empty(self) -> bool:
        """Whether there is no record at all."""
        return not any(map(self.list_block, self.list_blocks()))

    def look_at_all(self, look: Callable[[int], T]) -> Iterator[tuple[int, T]]:
        """Call a function for parts with a record, in threads; yield in order what it returns."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for block in self.list_blocks():
                numbers = sorted(self.list_block(block))
                yield from zip(numbers, threads.map(look, numbers), strict=True)


def _path(part: int) -> str:
    return f"{block_name(part // BLOCK)}/{part:08d}.json"


class Part(NamedTuple):
    """A finished file and its writer's notes."""

    entry: FileEntry
    notes: dict[str, Any]


def record_part(store: Store, entry: FileEntry, settings: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Record that `entry` is complete, and the settings from which it was written."""
    store.write_bytes(_record_path(entry.path), _render(entry, settings, notes))


def find_finished_part(
    store: Store, path: str, settings: Mapping[str, Any], *, compare_digest: bool = True
) -> Part | None:
    """The finished file at `path`, if it was written from these settings and is intact; otherwise None.

    Args:
        compare_digest: read the whole file; False compares its size only.
    """
    data = store.read_if_exists(_record_path(path), limit=MAX_RECORD_BYTES)
    return None if data is None else _match(store, path, settings, data, compare_digest=compare_digest)


def _match(store: Store, path: str, settings: Mapping[str, Any], data: bytes, *, compare_digest: bool) -> Part | None:
    """The file of a record, if it was written from these settings and is intact."""
    try:
        record = parse_json(data)
        entry = FileEntry(**record["file"])
        if record["settings"] != dict(settings) or entry.path != path:
            return None
        notes = dict(record["notes"])
    except (ValueError, KeyError, TypeError):
        return None  # a crash cut the record short: the file is written again
    # The size first, because a digest reads the whole file.
    if not store.exists(path) or store.size(path) != entry.size:
        return None
    return Part(entry, notes) if not compare_digest or store.digest(path) == entry.sha256 else None


class NumberedParts:
    """The files of one job, ``<folder>/part-00007.<ending>`` for part 7, which several processes write.

    Args:
        store: the job's folder.
        folder: of the files, below the job's.
        ending: of the files' names.
        settings: what a part is written from, by its number: a part that was written from other settings is not it.
    """

    def __init__(self, store: Store, folder: str, ending: str, settings: Callable[[int], Mapping[str, Any]]) -> None:
        self._store = store
        self._folder = folder
        self._settings = settings
        self._ending = ending
        self._records = PartRecords(store, folder)

    def path(self, part: int) -> str:
        """Path of a part's file, below the job's folder."""
        return f"{self._folder}/part-{part:05d}.{self._ending}"

    def write(self, part: int, data: bytes, notes: Mapping[str, Any]) -> FileEntry:
        """Write a part, and then its record."""
        # One write: a part is whole or absent.
        entry = self._store.write_bytes(self.path(part), data)
        self._records.write(part, _render(entry, self._settings(part), notes))
        return entry

    def is_finished(self, part: int) -> bool:
        """Whether a part is recorded and its file has the recorded size."""
        return self._find(part, compare_digest=False) is not None

    def list_finished(self, block: int) -> set[int]:
        """The numbers of a block's parts that have a record."""
        return self._records.list_block(block)

    def is_any_finished(self) -> bool:
        """Whether a part has a record."""
        return not self._records.is_empty()

    def forget_damaged(self) -> None:
        """Remove the records of parts whose file is not what was written: they are written again.

        For the one process that starts the others, before it does: it reads every finished file.
        """

        def look(part: int) -> None:
            if self._find(part, compare_digest=True) is None:
                self._records.delete(part)

        for _ in self._records.look_at_all(look):
            pass

    def collect(self) -> Iterator[Part]:
        """All parts in their order, once all processes have ended. Raises InfrastructureError if one is missing."""
        found = self._records.look_at_all(lambda part: self._find(part, compare_digest=False))
        for expected, (number, part) in enumerate(found):
            if part is None or number != expected:
                raise InfrastructureError(
                    "Parts of the result are missing although every worker has ended.",
                    field=self._store.url,
                    remedy="Run the command again: what is finished is kept.",
                )
            yield part

    def _find(self, part: int, *, compare_digest: bool) -> Part | None:
        data = self._records.read(part, limit=MAX_RECORD_BYTES)
        if data is None:
            return None
        return _match(self._store, self.path(part), self._settings(part), data, compare_digest=compare_digest)


def _render(entry: FileEntry, settings: Mapping[str, Any], notes: Mapping[str, Any]) -> bytes:
    record = {"file": dataclasses.asdict(entry), "settings": dict(settings), "notes": dict(notes)}
    return json.dumps(record).encode()


def _record_path(path: str) -> str:
    return f"{RECORDS}/{path}.json"


def numbered_parts(store: Store, key: str, file_format: str) -> NumberedParts:
    """The files of the predictions below `store`; a file that was made under another key is not one of them."""
    return NumberedParts(store, FOLDER, file_format, lambda part: {"key": key, "part": part})


def split_parts(store: Store, split: str, *, rows: int, rows_per_file: int) -> NumberedParts:
    """The files with a split's predictions below a stage's folder; they hold fixed ranges of the rows."""
    return NumberedParts(
        store, f"{FOLDER}/{split}", "parquet", lambda part: {"rows": list(row_range(part, rows, rows_per_file))}
    )


def sum_parts(store: Store, split: str, *, rows: int, rows_per_range: int) -> NumberedParts:
    """The files with what ranges of a split's rows add to the sums of its metrics, while it is evaluated."""
    return NumberedParts(
        store, f"{SUMS}/{split}", "json", lambda part: {"rows": list(row_range(part, rows, rows_per_range))}
    )


def row_range(part: int, rows: int, rows_per_file: int) -> tuple[int, int]:
    """The rows [start, stop) of a part of so many rows."""
    start = part * rows_per_file
    return start, min(start + rows_per_file, rows)
