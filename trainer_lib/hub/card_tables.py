"""Markdown of a card: tables, and text that cannot become markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer_lib.base.foreign_text import to_markdown


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def join_lines(text: str) -> str:
    """The text in one line."""
    return " ".join(text.split())


def format_value(value: Any) -> str:
    """A value of a cell, with six digits; None is an empty one."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return to_markdown(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
