"""Records of finished files, so that a repeated run does not write them again. A record is written after its file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer_lib.storage import FileEntry, Store

MAX_RECORD_BYTES = 1 << 20


class Part(NamedTuple):
    """A finished file and its writer's notes."""

    entry: FileEntry
    notes: dict[str, Any]


def record_part(store: Store, entry: FileEntry, settings: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Record that `entry` is complete, and the settings from which it was written."""
    record = {"file": dataclasses.asdict(entry), "settings": dict(settings), "notes": dict(notes)}
    store.write_bytes(_record_path(entry.path), json.dumps(record).encode())


def find_finished_part(store: Store, path: str, settings: Mapping[str, Any]) -> Part | None:
    """The finished file at `path`, if it was written from these settings and is intact; otherwise None."""
    data = store.read_if_exists(_record_path(path), limit=MAX_RECORD_BYTES)
    if data is None:
        return None
    try:
        record = json.loads(data)
        entry = FileEntry(**record["file"])
        if record["settings"] != dict(settings) or entry.path != path:
            return None
        notes = dict(record["notes"])
    except (ValueError, KeyError, TypeError):
        return None  # a crash cut the record short: the file is written again
    # The size first, because a digest reads the whole file.
    if not store.exists(path) or store.size(path) != entry.size or store.digest(path) != entry.sha256:
        return None
    return Part(entry, notes)


def _record_path(path: str) -> str:
    return f"records/{path}.json"
