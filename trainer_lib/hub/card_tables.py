"""Markdown of a card: tables, and text that cannot become markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def join_lines(text: str) -> str:
    """The text in one line."""
    return " ".join(text.split())


def escape(text: str) -> str:
    """Escape text so that it cannot leave its table cell or become markup."""
    # A backslash first: it would escape the bars' own backslashes.
    escaped = join_lines(text).replace("\\", "\\\\").replace("|", "\\|")
    return escaped.replace("<", "&lt;").replace("`", "'")


def format_value(value: Any) -> str:
    """A value of a cell, with six digits; None is an empty one."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
