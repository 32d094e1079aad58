"""Text of strangers (names of metrics, columns, runs, files; messages), as a medium shows it without obeying it."""

from __future__ import annotations

import html
import unicodedata

_LONGEST = 1000
# Joiners are part of words (Persian, Hindi) and of emoji.
_KEPT = frozenset("\n\t\u200c\u200d")


def to_terminal(text: str) -> str:
    """Return text whose control characters, marks of direction and lone surrogates are written out: `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _is_shown(char) else _written_out(char) for char in text)


def to_cell(text: str, longest: int = _LONGEST) -> str:
    """Return `to_terminal` of a text on one line, cut to `longest` characters."""
    line = to_terminal(" ".join(text[: 2 * longest].split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def to_markdown(text: str) -> str:
    """Return text that Markdown shows as it is, on one line: not markup, not HTML, not the end of a table's cell."""
    # A backslash first: it would escape the bars' own backslashes.
    escaped = to_cell(text).replace("\\", "\\\\").replace("|", "\\|")
    # Without brackets side by side there is no link and no picture.
    return escaped.replace("<", "&lt;").replace("`", "'").replace("](", "] (")


def to_html(text: str) -> str:
    """Return text that HTML and SVG show as it is."""
    return html.escape(to_terminal(text))


def _is_shown(char: str) -> bool:
    return char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs"


def _written_out(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}"
