"""The values of a table's cells: numbers as people write them, texts, and what stands for no value.

Dates, and texts whose words are hashed, become several numbers for a network. Prepared rows and new rows have the texts
(dates in ISO 8601); the numbers are made with the batches.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np

from trainer_lib.base.json_text import parse_json
from trainer_lib.data.rows.given_rows import refuse_row
from trainer_lib.data.rows.reading import FIELD, MONEY, Reading
from trainer_lib.data.rows.row_files import read_id
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.shared.recipe_options import choose
from trainer_lib.recipes.tables.splitting import find_forms, has_zone, parse_times, read_times

NOTHING = frozenset({"", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "\\N"})
"""Texts that stand for no value."""
USUAL = frozenset({"NA", "<NA>", "#NA", "#N/A N/A", "None", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"})
"""Texts that pandas reads as no value as well; here only among numbers, because NA may be Namibia."""
_UNIT = f"({MONEY}|%)?"
_AMOUNT = re.compile(rf"([-+−]?)\s*{_UNIT}\s*([\d.,'’\s]*\d[.,]?)\s*{_UNIT}")
_SPACED = re.compile(r"[1-9]\d{0,2}([\s'’]\d{3})+([.,]\d+)?")
_POINT = re.compile(r"\d{1,3}(,\d{3})+\.\d+|\d{1,3}(,\d{3}){2,}")
_COMMA = re.compile(r"\d{1,3}(\.\d{3})+,\d+|\d{1,3}(\.\d{3}){2,}|\d+,\d+")
_EITHER = re.compile(r"[1-9]\d{0,2}[.,]\d{3}")
_INDEX = re.compile(r"(Unnamed: \d+(_level_\d+)?|__index_level_\d+__)?")
_LONGEST = 40  # characters of a number


def read_reading(given: Mapping[str, Any]) -> Reading:
    """The form of files, by `prepare.options.read`. Raises ConfigError for an unknown setting or value."""
    known = [field for field in fields(Reading) if field.name != "answer"]
    defaults: dict[str, Any] = {field.name: [] if field.default == () else field.default for field in known}
    chosen = choose(given, defaults, field=FIELD)
    for name in ("separator", "encoding", "quote", "escape", "sheet", "decimal", "thousands"):
        if not isinstance(chosen[name], str | None):
            raise ConfigError("This option takes text.", field=f"{FIELD}.{name}", value=chosen[name])
    return Reading(**chosen)


def plain_value(value: Any, name: str, place: str, reading: Reading) -> Any:
    """A number, a text, or None for what a file writes as nothing."""
    if isinstance(value, str):
        text = value.strip()
        return None if text in NOTHING or text in reading.gaps else reading.with_point(text)
    if reading.gaps and value is not None and text_of(value) in reading.gaps:
        return None
    if value is None or isinstance(value, bool | int | float):
        return None if isinstance(value, float) and math.isnan(value) else value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, date | datetime):
        return value.isoformat()
    raise refuse_row(place, name, f"a {type(value).__name__} is neither a number nor a text")


def number_of(value: Any) -> float | None:
    """The finite number that a value stands for; None for a text that stands for none."""
    try:
        number = as_float(value)
    except ValueError:
        number = _read_amount(str(value))
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_float(value: Any) -> float:
    """`float`, which reads 1_2 as 12: here that raises ValueError."""
    if isinstance(value, str) and "_" in value:
        raise ValueError(value)
    return float(value)


def _read_amount(text: str) -> float:
    """Money, per cent, and numbers with marks between thousands or a decimal comma; NaN for any other text.

    A text such as 1,234, which is one thousand to some and a little more than one to others, is not a number.
    """
    match = _AMOUNT.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return math.nan
    digits = match[3]
    if _SPACED.fullmatch(digits):
        digits = re.sub(r"[\s'’]", "", digits).replace(",", ".")
    elif _POINT.fullmatch(digits):
        digits = digits.replace(",", "")
    elif _COMMA.fullmatch(digits) and not _EITHER.fullmatch(digits):
        digits = digits.replace(".", "").replace(",", ".")
    with suppress(ValueError):
        number = float(f"{match[1].replace('−', '-')}{digits}")
        return number / 100 if "%" in (match[2], match[4]) else number
    return math.nan


def number_form(value: Any) -> tuple[str, str]:
    """The mark in a text that is a number, and its unit: % or that of money; both are empty for any other value.

    The mark is that before the fraction; of 1,234 and 1.234, which may be one thousand, it is "?," and "?.".
    """
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) and len(value) <= _LONGEST else None
    if match is None:
        return "", ""
    digits, unit = match[3], match[2] or match[4] or ""
    if _EITHER.fullmatch(digits):
        return f"?{digits[-4]}", unit
    return "," if _COMMA.fullmatch(digits) else "." if "." in digits else "", unit


def as_text(value: Any) -> str:
    """A value of a table as a text; empty where there is none."""
    return "" if value is None else text_of(value)


def as_number(value: Any) -> float:
    """A value of a column of numbers; NaN where there is none."""
    number = None if value is None else number_of(value)
    return math.nan if number is None else number


def text_of(value: Any) -> str:
    """A value as the text of a category: 3 and 3.0 are one."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def name_of(value: Any) -> str:
    """A value of a column whose numbers are names: pandas writes 3.0 for 3 where others are missing."""
    text = text_of(value)
    return text[:-2] if text.endswith(".0") and text[:-2].isdecimal() else text


def id_of(value: Any, place: str) -> int | str | None:
    """The id of a row as its file has it; None where it is missing."""
    if value is None or value == "":
        return None
    if (row_id := read_id(value)) is None:
        what = f"{place}: a row's id is an integer or a text, not a {type(value).__name__}."
        raise DataError(what, field="rows")
    return row_id


def is_index(name: str) -> bool:
    """Whether a column is the index of a table that pandas wrote: it has no name, or one that pandas gave."""
    return _INDEX.fullmatch(name) is not None


def read_exact_text(value: Any, where: str) -> str | None:
    """A text with the spaces at its ends. Raises DataError for another value."""
    if value is None or isinstance(value, str):
        return value if value and value.strip() else None
    raise DataError(f"{where}: a {type(value).__name__} is not a text.", field="rows")


def read_texts(value: Any, where: str) -> list[str] | None:
    """A list of texts, which a cell has in JSON or as Python writes it; numbers in it are names."""
    if isinstance(value, str):
        value = _read_list(value.strip(), where)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: a {type(value).__name__} is not a list.", field="rows")
    for number, name in enumerate(value):
        if isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip():
            what = "is empty" if name is None or isinstance(name, str) else f"is a {type(name).__name__}, not a text"
            raise DataError(f"{where}: number {number} of the list {what}.", field="rows")
    return [str(name) for name in value]


def _read_list(text: str, where: str) -> list[Any] | None:
    if isinstance(found := parse_literal(text), list):
        return found
    if text in NOTHING:
        return None
    remedy = 'Write lists in JSON, such as ["a", "b"]; of a text with spans of characters, its words and their tags.'
    raise DataError(f"{where}: a text is not a list, such as '{text[:40]}'.", field="rows", remedy=remedy)


def parse_literal(text: str) -> Any:
    """The list or mapping that a cell has in JSON, or as Python writes it and pandas does; None for another text."""
    for parse in (parse_json, ast.literal_eval) if text.lstrip()[:1] in ("[", "{") else ():
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return parse(text)
    return None


def read_names(value: Any, where: str, *, separator: str | None, folds: bool) -> list[str]:
    """The different classes in a cell: a list, or texts between separators; empty where there is none."""
    if isinstance(value, str) and (text := value.strip()) not in NOTHING:
        if separator is None and not text.startswith("["):
            what = f"{where}: '{text[:40]}' is not a list"
            raise DataError(f"{what} (prepare.options.label_separator splits a text).", field="rows")
        split = None if separator is None else [part.strip() for part in text.split(separator) if part.strip()]
        value = _read_list(text, where) if split is None else split
    marks = list(value) if isinstance(value, list | tuple) else []
    is_marked = bool(marks) and all(mark in (0, 1) for mark in marks)
    if is_marked and (len(set(marks)) < len(marks) or type(marks[0]) is not int):  # the places are classes
        remedy = "Give the names of the classes that a row has: [name for name, mark in zip(NAMES, MARKS) if mark]."
        raise DataError(f"{where}: {marks[:8]} marks classes by 0 and 1.", field="rows", remedy=remedy)
    names = read_texts(value, where) or ()
    return list(dict.fromkeys(fold(name) if folds else name.strip() for name in names))


# -- numbers that a network gets of texts ------------------------------------------------------------------------------
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
    """The words of a text as `size` numbers: words count up or down in one of them, by their hash."""
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
    return dates, ISO + "%z" if form in (None, ISO) and any(map(has_zone, values[:1])) else form or ISO


def read_date(text: str, form: str, name: str, place: str) -> str:
    """A date of a new row in ISO 8601. Raises DataError for another text."""
    if not (date := _read_date(text, form)):
        raise refuse_row(place, name, f"'{text[:40]}' is not a date of the form {form}")
    if has_zone(text) != ("%z" in form):
        has, have = ("no", "have one") if "%z" in form else ("a", "have none")
        raise refuse_row(place, name, f"'{text[:40]}' has {has} time zone, and the dates of the training {have}")
    return date


# A text takes a millisecond, and rows share their days.
@functools.lru_cache(1 << 16)
def _read_date(text: str, form: str) -> str:
    """A date in ISO 8601; empty for another text."""
    for known in (ISO,) if form.startswith(ISO) else (form, ISO):
        if not np.isnat(time := parse_times([text], known)[0]):
            return str(np.datetime_as_string(time.astype("datetime64[s]")))
    return ""


def looks_like_date(text: str) -> bool:
    """Whether a text can be read as a date."""
    if len(text) > 40 or sum(map(str.isdigit, text)) < 4 or text.isdigit():
        return False
    return not np.isnat(parse_times([text], ISO)[0]) or bool(find_forms(text))
