"""Words of messages: the name that was probably meant, for every "Did you mean …?", and numbers with their nouns.

Text of strangers (names of metrics, columns, runs, files; messages) is written as a medium shows it without obeying it.
"""

from __future__ import annotations

import difflib
import html
import unicodedata
from collections.abc import Collection, Iterable
from typing import Any

from trainer_lib.errors import ConfigError

_LONGEST = 1000
# Joiners are part of words (Persian, Hindi) and of emoji.
_KEPT = frozenset("\n\t\u200c\u200d")


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Return the option most like `name`; None when no option is close enough to be worth suggesting."""
    names = list(options)
    # A name of one letter is not close to its capital for difflib.
    found = [known for known in names if known.casefold() == name.casefold() and known != name]
    found = found or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None


def counted(number: int, noun: str, several: str = "") -> str:
    """A number with its noun, as in 1 row and 2,000 rows; `several`: a plural that is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def number_words(value: float | None, digits: int = 4, sign: str = "") -> str:
    """A number as people read it, whole where more than `digits` stand before the point: 0.0213, 21,230; - for None.

    `sign`: "+" to write it before a number above zero, too.
    """
    if value is None:
        return "-"
    is_whole = isinstance(value, int) or value == 0 or 10**digits - 0.5 <= abs(value) < 1e15
    return f"{value:{sign if value else ''},.0f}" if is_whole else f"{value:{sign},.{digits}g}"


def suggestion(name: str, options: Iterable[str], *, listing: bool = True) -> str:
    """A remedy for a name that is not among `options`: the nearest option, else a list of all of them.

    Without `listing` they are too many; the remedy is then to remove the name.
    """
    names = [str(option) for option in options]
    close = nearest(name, names)
    if close is not None:
        return f'Did you mean "{close}"?'
    return f"Choose one of: {', '.join(names)}." if listing else "Remove it."


def require_known(
    name: Any, options: Collection[Any], what: str = "This is not one of the choices.", *, field: str, value: Any = ...
) -> None:
    """Raise ConfigError, with a suggestion, for a name that is not among `options`; `value` is shown instead of it."""
    if name not in options:
        raise ConfigError(
            what, field=field, value=name if value is ... else value, remedy=suggestion(str(name), options)
        )


def to_terminal(text: str) -> str:
    """Return text whose control characters, marks of direction and lone surrogates are written out: `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


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


def _shown(char: str) -> str:
    if char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs":
        return char
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}"
