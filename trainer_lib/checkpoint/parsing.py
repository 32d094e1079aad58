"""JSON from files that may come from anywhere: bounded in memory and time, and one kind of failure."""

from __future__ import annotations

import json
from typing import Any

CONTAINERS = 4_000_000
"""Lists and objects that are read at most: each takes some 70 bytes for 2 bytes of text."""


def parse_json(data: bytes, *, unique: bool = False) -> Any:
    """The value that `data` holds.

    Args:
        data: UTF-8.
        unique: whether a name that stands twice in an object is refused (of two, readers take different ones).

    Raises:
        ValueError: not JSON; nested deeper than Python's stack; more lists and objects than `CONTAINERS`.
    """
    if data.count(b"[") + data.count(b"{") > CONTAINERS:
        raise ValueError(f"it has more than {CONTAINERS:,} lists and objects")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_without_doubles if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("it names something twice")
    return record
