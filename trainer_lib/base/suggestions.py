"""Words of messages: the name that was probably meant, for every "Did you mean …?", and numbers with their nouns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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

    Args:
        sign: "+" to write it before a number above zero, too.
    """
    if value is None:
        return "-"
    is_whole = isinstance(value, int) or value == 0 or 10**digits - 0.5 <= abs(value) < 1e15
    return f"{value:{sign if value else ''},.0f}" if is_whole else f"{value:{sign},.{digits}g}"


def suggestion(name: str, options: Iterable[str], *, listing: bool = True) -> str:
    """Return a remedy for a name that is not among `options`: the nearest option, else a list of all of them.

    Args:
        listing: False where the options are too many to list; the remedy is then to remove the name.
    """
    names = [str(option) for option in options]
    close = nearest(name, names)
    if close is not None:
        return f'Did you mean "{close}"?'
    return f"Choose one of: {', '.join(names)}." if listing else "Remove it."
