"""Bytes and seconds as people write them."""

from __future__ import annotations


def describe_bytes(count: float) -> str:
    """Return a number of bytes with a unit of powers of 1000: ``1.23 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def describe_seconds(seconds: float) -> str:
    """Return a length of time, up to 100 s with one decimal: ``12.3 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
