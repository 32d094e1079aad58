"""Records of finished files, so that a repeated run does not write them again. A record is written after its file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from trainer_lib.base.json_text import parse_json
from trainer_lib.data.part_records import RECORDS, PartRecords
from trainer_lib.errors import InfrastructureError
from trainer_lib.storage import FileEntry, Store

MAX_RECORD_BYTES = 1 << 20


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
    """The files of one job, ``<folder>/part-00007.<ending>`` for part 7, of which several processes write some each.

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
        """All parts in their order, once all processes have ended.

        Raises:
            InfrastructureError: a part is missing.
        """
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
