"""Reading files that may come from anywhere: JSON within bounds of memory and time, and one error for damage."""

from __future__ import annotations

import json
from typing import Any

from trainer_lib.errors import DamagedError

CONTAINERS = 4_000_000
"""The most lists and objects that one JSON text may hold: each takes some 70 bytes of memory for 2 bytes of text."""


def parse_json(data: bytes, *, unique: bool = False) -> Any:
    """Parse JSON.

    Args:
        data: UTF-8.
        unique: refuse an object that names a key twice; readers differ in which of the two they take.

    Raises:
        ValueError: `data` is not JSON, is nested deeper than Python's stack, or has more than `CONTAINERS` containers.
    """
    # Counting brackets before parsing bounds the memory that parsing takes.
    if data.count(b"[") + data.count(b"{") > CONTAINERS:
        raise ValueError(f"it has more than {CONTAINERS:,} lists and objects")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_require_unique_keys if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def damaged_file(where: str, reason: str) -> DamagedError:
    """The error for a committed file that is not as it was committed.

    Args:
        where: the file's URL.
        reason: what is wrong, a clause ("it is missing").
    """
    return DamagedError(
        f"The file is damaged: {reason}.",
        field=where,
        remedy="Use an earlier checkpoint (a resume does by itself), or restore the file.",
    )


def _require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    # json keeps the last of two equal keys without a word.
    if len(record) != len(pairs):
        raise ValueError("it names something twice")
    return record
