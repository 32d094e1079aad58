"""The values of a table's cells: numbers as people write them, texts, and what stands for no value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from trainer_lib.data.column import Column
from trainer_lib.data.given_rows import parse_text
from trainer_lib.data.reading import FIELD, Reading
from trainer_lib.data.row_files import read_id
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.option_names import choose
from trainer_lib.recipes.table_features import fold

READ: dict[str, Any] = {
    "separator": None,  # between two values of a CSV file
    "encoding": None,  # as Python names it
    "quote": None,  # around a value with separators in it; "": there is none
    "escape": None,  # before a quote that belongs to a value
    "columns": [],  # names of the columns, where no line has them
    "skip_lines": 0,  # before the line with the names
    "sheet": None,  # of a workbook; None: its first one with rows
    "partitions": False,  # folders such as year=2024 are columns
    "decimal": None,  # before the fraction of a number
    "thousands": None,  # between its thousands
    "na_values": [],  # texts that stand for no value, besides the usual ones
}
"""The form of files (`prepare.options.read`); None: found from the file."""
NOTHING = frozenset({"", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null"})
"""Texts that stand for no value."""
USUAL = frozenset({"NA", "<NA>", "#NA", "#N/A N/A", "None", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"})
"""Texts that pandas reads as no value as well; here only among numbers, because NA may be Namibia."""
_AMOUNT = re.compile(r"([-+]?)\s*[$€£¥]?\s*([\d.,\s]*\d[.,]?)\s*([$€£¥%]?)")
_SPACED = re.compile(r"[1-9]\d{0,2}(\s\d{3})+([.,]\d+)?")
_POINT = re.compile(r"\d{1,3}(,\d{3})+\.\d+|\d{1,3}(,\d{3}){2,}")
_COMMA = re.compile(r"\d{1,3}(\.\d{3})+,\d+|\d{1,3}(\.\d{3}){2,}|\d+,\d+")
_EITHER = re.compile(r"\d{1,3},\d{3}")

_INDEX = re.compile(r"(Unnamed: \d+(_level_\d+)?|__index_level_\d+__)?")
_LONGEST = 40  # characters of a number


def read_reading(given: Mapping[str, Any]) -> Reading:
    """The form of files, by `prepare.options.read`. Raises ConfigError for an unknown setting or value."""
    chosen = choose(given, READ, field=FIELD)
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
    raise DataError(f"{place}, column '{name}': a {type(value).__name__} is neither a number nor a text.", field="rows")


def number_of(value: Any) -> float | None:
    """The finite number that a value stands for; None for a text that stands for none."""
    try:
        number = float(value)
    except ValueError:
        number = _read_amount(str(value))
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read_amount(text: str) -> float:
    """Money, per cent, and numbers with marks between thousands or a decimal comma; NaN for any other text.

    A text such as 1,234, which is one thousand to some and a little more than one to others, is not a number.
    """
    match = _AMOUNT.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return math.nan
    digits = match[2]
    if _SPACED.fullmatch(digits):
        digits = "".join(digits.split()).replace(",", ".")
    elif _POINT.fullmatch(digits):
        digits = digits.replace(",", "")
    elif _COMMA.fullmatch(digits) and not _EITHER.fullmatch(digits):
        digits = digits.replace(".", "").replace(",", ".")
    with suppress(ValueError):
        number = float(f"{match[1]}{digits}")
        return number / 100 if match[3] == "%" else number
    return math.nan


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
    """A list of texts; numbers in it are names."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        what = "a text is not a list" if isinstance(value, str) else f"a {type(value).__name__} is not a list"
        raise DataError(f"{where}: {what}. A CSV file has no lists.", field="rows")
    for number, each in enumerate(value):
        if isinstance(each, bool) or not isinstance(each, str | int) or not str(each).strip():
            what = "is empty" if each is None or isinstance(each, str) else f"is a {type(each).__name__}, not a text"
            raise DataError(f"{where}: number {number} of the list {what}.", field="rows")
    return [str(each) for each in value]


def read_names(value: Any, where: str, *, separator: str | None, folds: bool) -> list[str]:
    """The different classes in a cell: a list, or texts between separators; empty where there is none."""
    if isinstance(value, str):
        text = value.strip()
        if text in NOTHING:
            value = None
        elif separator is not None:
            value = [part.strip() for part in text.split(separator) if part.strip()]
        elif text.startswith("["):
            value = parse_text(where, "", text, Column("list", "string"))
        else:
            what = f"{where}: '{text[:40]}' is not a list"
            raise DataError(f"{what} (prepare.options.label_separator splits a text).", field="rows")
    names = map(str.strip, read_texts(value, where) or ())
    return list(dict.fromkeys(fold(name) if folds else name for name in names))
