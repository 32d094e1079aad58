"""The parts of a job, and the records that say which are finished, so that a repeated run does not write them again.

    records/<folder>/000002/00002007.json    of part 2007, written after its files

A thousand records are in a folder, so no listing and nothing in memory grows with their number. Imports neither torch
nor pyarrow.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import InfrastructureError
from trainer_lib.locks.shared_parts import BLOCK, block_name
from trainer_lib.storage import FileEntry, Store

FOLDER = "predictions"
ERROR = "error"  # column with what is wrong with a row, where bad rows are allowed
RECORDS = "records"
_NAME = re.compile(r"(\d{8,})\.json")
_AT_ONCE = 16  # records that are read at a time: on an object store they take a while, and little else
_LIMIT = 64 << 20  # bytes of a record

T = TypeVar("T")


class Part(NamedTuple):
    """The files of a finished part, and its writer's notes."""

    files: tuple[FileEntry, ...]
    notes: dict[str, Any]


class Parts:
    """The finished parts of the job in a folder; their records are in `folder` below that of all records.

    `settings`: what a part is written from, by its number: a part that was written from other settings is not it.
    """

    def __init__(self, store: Store, folder: str, settings: Callable[[int], Mapping[str, Any]]) -> None:
        self._store = store
        self._records = store.child(RECORDS, *folder.split("/"))
        self._settings = settings

    def record(self, part: int, files: Sequence[FileEntry], notes: Mapping[str, Any]) -> None:
        """Record that a part is finished, once its files are there."""
        plain = {"files": [*map(dataclasses.asdict, files)], "settings": dict(self._settings(part)), "notes": notes}
        path, record = _path(part), json.dumps(plain).encode()
        # Created, so that no other process sees half of it. It may be there: of a process that lost the part to us.
        if not self._records.create(path, record):
            self._records.write_bytes(path, record)

    def read(self, part: int) -> Part | None:
        """The record of a part that was written from these settings; else None. Its files are not looked at."""
        data = self._records.read_if_exists(_path(part), limit=_LIMIT)
        if data is None:
            return None
        try:
            record = parse_json(data)
            files = tuple(FileEntry(**file) for file in record["files"])
            return Part(files, dict(record["notes"])) if record["settings"] == dict(self._settings(part)) else None
        except (ValueError, KeyError, TypeError):
            return None  # a crash cut the record short: the part is written again

    def find(self, part: int, *, digests: bool = False) -> Part | None:
        """A finished part whose files have the recorded sizes; with `digests` they are read and compared."""
        found, store = self.read(part), self._store
        is_intact = found is not None and all(
            store.exists(file.path)
            and store.size(file.path) == file.size
            and (not digests or store.digest(file.path) == file.sha256)
            for file in found.files
        )
        return found if is_intact else None

    def is_finished(self, part: int) -> bool:
        """Whether a part is recorded and its files have the recorded sizes."""
        return self.find(part) is not None

    def list_finished(self, block: int) -> set[int]:
        """The numbers of a block's parts that have a record."""
        return {int(match[1]) for name in self._records.children(block_name(block)) if (match := _NAME.fullmatch(name))}

    def is_any_finished(self) -> bool:
        """Whether a part has a record."""
        return any(map(self.list_finished, self._list_blocks()))

    def look_at_all(self, look: Callable[[int], T]) -> Iterator[tuple[int, T]]:
        """Call a function for parts with a record, in threads; yield in order what it returns."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for block in self._list_blocks():
                numbers = sorted(self.list_finished(block))
                yield from zip(numbers, threads.map(look, numbers), strict=True)

    def forget_damaged(self, *, digests: bool = True) -> None:
        """Remove the records of parts whose files are not what was written: they are written again.

        For the one process that starts the others, before it does. `digests`: read every finished file.
        """

        def look(part: int) -> None:
            if self.find(part, digests=digests) is None:
                self.forget(part)

        for _ in self.look_at_all(look):
            pass

    def forget(self, part: int) -> None:
        """Remove a part's record."""
        self._records.delete(_path(part))

    def collect(self) -> Iterator[Part]:
        """All parts in their order, once all processes have ended. Raises InfrastructureError if one is missing."""
        for expected, (number, part) in enumerate(self.look_at_all(self.find)):
            if part is None or number != expected:
                what = "Parts of the result are missing although every worker has ended."
                remedy = "Run the command again: what is finished is kept."
                raise InfrastructureError(what, field=self._store.url, remedy=remedy)
            yield part

    def _list_blocks(self) -> list[int]:
        return sorted(int(name) for name in self._records.children() if name.isdecimal())


def _path(part: int) -> str:
    return f"{block_name(part // BLOCK)}/{part:08d}.json"


class NumberedParts(Parts):
    """Parts of a file each, such as ``<folder>/part-00007.<ending>`` for part 7.

    `folder` is that of the files, below the job's, and `name` is theirs, with a place for the number.
    """

    def __init__(self, store: Store, folder: str, name: str, settings: Callable[[int], Mapping[str, Any]]) -> None:
        super().__init__(store, folder, lambda part: {"path": self.path(part), **settings(part)})
        self._folder, self._name = folder, name

    def path(self, part: int) -> str:
        """Path of a part's file, below the job's folder."""
        return f"{self._folder}/{self._name.format(part)}"

    def write(self, part: int, data: bytes, notes: Mapping[str, Any]) -> FileEntry:
        """Write a part, and then its record."""
        # One write: a part is whole or absent.
        entry = self._store.write_bytes(self.path(part), data)
        self.record(part, [entry], notes)
        return entry


class SplitParts(NumberedParts):
    """The files with the predictions of a split's `rows` below a stage's folder, `total` in number."""

    def __init__(self, store: Store, split: str, *, rows: int, rows_per_file: int) -> None:
        folder, name = f"{FOLDER}/{split}", "part-{:05d}.parquet"
        super().__init__(store, folder, name, lambda part: {"rows": list(self.row_range(part))})
        self._rows, self._rows_per_file = rows, rows_per_file
        self.total = -(-rows // rows_per_file)

    def row_range(self, part: int) -> tuple[int, int]:
        """The rows [start, stop) of a part."""
        start = part * self._rows_per_file
        return start, min(start + self._rows_per_file, self._rows)


def numbered_parts(store: Store, key: str, file_format: str) -> NumberedParts:
    """The files of the predictions below `store`; a file that was made under another key is not one of them."""
    return NumberedParts(store, FOLDER, f"part-{{:05d}}.{file_format}", lambda part: {"key": key, "part": part})
