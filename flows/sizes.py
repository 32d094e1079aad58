"""Bytes as people write them."""

from __future__ import annotations


def describe_bytes(count: float) -> str:
    """Return a number of bytes with a unit of powers of 1000: ``1.23 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
