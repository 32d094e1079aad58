"""Files that a repeated run need not write again: one small record each, written after the file it vouches for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer_lib.storage import FileEntry, Store

RECORD_BYTES = 1 << 20


class Part(NamedTuple):
    """A finished file, and what its writer noted."""

    entry: FileEntry
    notes: dict[str, Any]


def record_part(store: Store, entry: FileEntry, settings: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Say that `entry` is complete, and from which settings it was made."""
    record = {"file": dataclasses.asdict(entry), "settings": dict(settings), "notes": dict(notes)}
    store.write_bytes(_record(entry.path), json.dumps(record).encode())


def finished_part(store: Store, path: str, settings: Mapping[str, Any]) -> Part | None:
    """The finished file at `path`, if it was made from these settings and its bytes still have their digest."""
    data = store.read_if_exists(_record(path), limit=RECORD_BYTES)
    if data is None:
        return None
    try:
        record = json.loads(data)
        entry = FileEntry(**record["file"])
        if record["settings"] != dict(settings) or entry.path != path:
            return None
        notes = dict(record["notes"])
    except (ValueError, KeyError, TypeError):
        return None  # a record cut short by the crash: the file is written again
    if not store.exists(path) or store.size(path) != entry.size or store.digest(path) != entry.sha256:
        return None
    return Part(entry, notes)


def _record(path: str) -> str:
    return f"records/{path}.json"
