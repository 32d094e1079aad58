"""JSON within bounds of depth and memory: the one place that reads it.

Whatever is wrong with a text is a ValueError, whose message is a clause ("it is nested more than 100 levels deep"). A
record from which decisions are taken carries a *seal*, a digest of the rest of it, so that a changed record is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

MAX_DEPTH = 100
MAX_CONTAINERS = 4_000_000
"""The most lists and objects that one text may hold: each takes some 70 bytes of memory for 2 bytes of text."""
_FILE_BYTES = 64 << 20
_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}

T = TypeVar("T")


class BrokenSealError(ValueError):
    """A record does not fit its seal: something changed it after trainflow wrote it."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__("it was changed after trainflow wrote it")
        self.record = record


@overload
def parse_json(data: bytes | str, *, unique: bool = False) -> Any: ...
@overload
def parse_json(data: bytes | str, kind: type[T], *, unique: bool = False) -> T: ...
def parse_json(data: bytes | str, kind: type[Any] = object, *, unique: bool = False) -> Any:
    """Parse JSON, UTF-8 or text, whose whole is of `kind`: dict, list or str. Raises ValueError.

    `unique` refuses an object that names a key twice; readers differ in which of the two they take. Nesting is bounded
    by `MAX_DEPTH`, the number of containers by `MAX_CONTAINERS`.
    """
    text = data if isinstance(data, str) else bytes(data).decode("utf-8")
    # Counting brackets before parsing bounds the memory that parsing takes.
    containers = text.count("[") + text.count("{")
    if containers > MAX_CONTAINERS:
        raise ValueError(f"it has more than {MAX_CONTAINERS:,} lists and objects")
    try:
        value = json.loads(text, object_pairs_hook=_require_unique_keys if unique else None)
    except RecursionError:
        raise _too_deep() from None
    if containers > MAX_DEPTH:
        require_shallow(value)
    if not isinstance(value, kind):
        raise ValueError(f"it is not {_NAMES[kind]}")
    return value


def parse_record(data: bytes | str | None) -> dict[str, Any]:
    """Parse an object; empty for None, and for what is not one (a record that a crash has cut)."""
    try:
        return parse_json(data, dict) if data else {}
    except ValueError:
        return {}


@overload
def read_json(path: Path) -> Any: ...
@overload
def read_json(path: Path, kind: type[T]) -> T: ...
def read_json(path: Path, kind: type[Any] = object) -> Any:
    """Parse a file of this machine. Raises OSError, and ValueError as `parse_json` or for more than 64 MiB."""
    with path.open("rb") as file:
        # No more than the file has: `read` makes room for all that it is asked for.
        data = file.read(min(os.fstat(file.fileno()).st_size, _FILE_BYTES) + 1)
    if len(data) > _FILE_BYTES:
        raise ValueError(f"it has more than {_FILE_BYTES:,} bytes")
    return parse_json(data, kind)


def seal_of(record: Mapping[str, Any]) -> str:
    """SHA-256 (hexadecimal) of a record as its file has it, without the seal."""
    return hashlib.sha256(json.dumps({**record}, sort_keys=True).encode()).hexdigest()


def render_sealed(record: Mapping[str, Any]) -> bytes:
    """Return a record as JSON with its seal; `parse_sealed` is the inverse."""
    # Through JSON: the seal covers what a reader of the file gets.
    plain = parse_json(json.dumps({**record}), dict)
    return json.dumps({**plain, "seal": seal_of(plain)}, indent=1).encode() + b"\n"


def parse_sealed(data: bytes) -> dict[str, Any]:
    """Parse a record and check its seal, if it has one. Raises BrokenSealError, or ValueError as `parse_json`."""
    record = parse_json(data, dict, unique=True)
    seal = record.pop("seal", None)
    if seal is not None and seal != seal_of(record):
        raise BrokenSealError(record)
    return record


def require_shallow(value: object) -> None:
    """Raise ValueError for a value that `parse_json` would refuse for its depth."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        members = (inner.values() if isinstance(inner, dict) else inner for inner in level)
        level = [inner for group in members for inner in group if isinstance(inner, dict | list | tuple)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, value in pairs:
        # json keeps the last of two equal keys without a word.
        if name in record:
            raise ValueError(f"the key '{name[:80]}' is given twice")
        record[name] = value
    return record
