"""Lengths of time as people write them (``1d``, ``12h``, ``1h 30m``) and read them (``1 d``), and sizes in bytes."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta

UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}  # seconds of each unit

FORMS = "Write a number with its unit: 90s, 30m, 12h, 1d, 2w, or 1d12h."
_PART = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)
# What is called older than a year by mistake is mostly a unit that was not meant.
_MOST_S = 100 * 365 * 86_400


def read_seconds(text: str) -> float | None:
    """Seconds in a text such as ``12h`` or ``1d 6h``; a plain number counts as seconds. None for any other text."""
    try:
        return float(text)
    except ValueError:
        pass
    position, total = 0, 0.0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None or part[2].lower() not in UNITS:
            return total if position and not text[position:].strip() else None
        total += float(part[1]) * UNITS[part[2].lower()]
        position = part.end()
    return total if position else None


def seconds_since(time: str | None) -> float | None:
    """Seconds since a time in ISO-8601 with its zone; None for any other text."""
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(time or "")).total_seconds()
    except (ValueError, TypeError):
        return None


def find_problem(seconds: float) -> str | None:
    """The mistake in a positive duration, in words; None: there is none."""
    if not math.isfinite(seconds):
        return "The duration must be finite."
    if seconds <= 0:
        return "The duration must be above zero."
    return "The duration must be below a hundred years." if seconds > _MOST_S else None


def describe(length: timedelta) -> str:
    """``1 d``, ``12 h``, ``1 d 6 h``, ``0.5 s``."""
    left = length.total_seconds()
    parts = []
    for unit, seconds in (("d", 86_400), ("h", 3600), ("min", 60)):
        count, left = divmod(left, seconds)
        if count:
            parts.append(f"{count:g} {unit}")
    if left or not parts:
        parts.append(f"{left:g} s")
    return " ".join(parts)


def describe_bytes(count: float) -> str:
    """Return a number of bytes with a unit of powers of 1000: ``1.23 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def describe_seconds(seconds: float) -> str:
    """Return a length of time as ``3.2 s``, ``42 s``, ``3 min 5 s`` or ``2 h 7 min``."""
    if seconds < 9.95:
        return f"{round(seconds, 1):g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
