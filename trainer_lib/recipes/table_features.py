"""Numbers that a network gets of a table's texts: the parts of dates, and words that are hashed.

Prepared rows and new rows have the texts (dates in ISO 8601); the numbers are made with each batch.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from trainer_lib.data.given_rows import refuse_row
from trainer_lib.errors import DataError
from trainer_lib.recipes.splitting import find_forms, parse_times, read_times

PARTS = ("year", "month", "weekday", "hour", "days")
"""The numbers of a date; the last are days since 2000."""
ISO = "ISO8601"
_DAYS_TO_2000 = 730_120  # as `toordinal` counts
_WORD = re.compile(r"\w+")


def fold(text: str) -> str:
    """A text without what case and blanks say."""
    return " ".join(text.split()).casefold()


def date_parts(text: str) -> list[float]:
    """The parts of a date in ISO 8601; NaN for an empty text."""
    if not text:
        return [float("nan")] * len(PARTS)
    time = datetime.fromisoformat(text)
    hour = time.hour + time.minute / 60
    days = time.toordinal() - _DAYS_TO_2000 + hour / 24
    return [float(time.year), float(time.month), float(time.weekday()), hour, days]


def word_counts(text: str, size: int) -> list[float]:
    """The words of a text as `size` numbers: each word counts up or down in one of them, by its hash."""
    counts = [0.0] * size
    words = _WORD.findall(text.casefold())
    for word in words:
        code = _word_code(word)
        counts[(code >> 1) % size] += (1.0 if code & 1 else -1.0) / len(words) ** 0.5
    return counts


@functools.lru_cache(1 << 16)
def _word_code(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")


def part_names(dates: Sequence[str], hashed: Mapping[str, int]) -> dict[str, list[str]]:
    """Column of texts -> the names of the numbers that it becomes."""
    names = {name: [f"{name}.{part}" for part in PARTS] for name in dates}
    return names | {name: [f"{name}.{number:04}" for number in range(size)] for name, size in hashed.items()}


def with_parts(row: Mapping[str, Any], dates: Sequence[str], hashed: Mapping[str, int]) -> dict[str, Any]:
    """A row with numbers in place of dates and of texts whose words are hashed."""
    names = part_names(dates, hashed)
    numbers = {name: value for name, value in row.items() if name not in names}
    for name, parts in names.items():
        values = word_counts(row[name], hashed[name]) if name in hashed else date_parts(row[name])
        numbers |= dict(zip(parts, values, strict=True))
    return numbers


def iso_dates(
    texts: Sequence[str], form: str | None, *, setting: str, column: str, place: Callable[[int], str]
) -> tuple[list[str], str]:
    """The dates of a column in ISO 8601, empty where there is none, and their form.

    Raises:
        DataError: a text is not a date, or it is not known in which form the dates are; the error names `setting`.
    """
    rows = [row for row, text in enumerate(texts) if text]
    values = [texts[row] for row in rows]
    times: np.ndarray = np.empty(0, "datetime64[s]")
    if values:
        times, found = read_times(
            values, form, setting=setting, column=column, place=lambda number: place(rows[number])
        )
        if (form := form or found) is None:
            what = f"The dates of column '{column}', such as {values[0]}, can be read in several ways."
            raise DataError(what, field=setting, remedy=f'Give their form, such as {setting}="%Y%m%d".')
    dates = [""] * len(texts)
    for row, text in zip(rows, np.datetime_as_string(times.astype("datetime64[s]")).tolist(), strict=True):
        dates[row] = text
    return dates, form or ISO


def read_date(text: str, form: str, name: str, place: str) -> str:
    """A date of a new row in ISO 8601. Raises DataError for another text."""
    for known in (form, ISO):
        if not np.isnat(time := parse_times([text], known)[0]):
            return str(np.datetime_as_string(time.astype("datetime64[s]")))
    raise refuse_row(place, name, f"'{text[:40]}' is not a date of the form {form}")


def looks_like_date(text: str) -> bool:
    """Whether a text can be read as a date."""
    if len(text) > 40 or sum(map(str.isdigit, text)) < 4 or text.isdigit():
        return False
    return not np.isnat(parse_times([text], ISO)[0]) or bool(find_forms(text))
