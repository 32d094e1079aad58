"""What the texts of a CSV file stand for, by the type of their column."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer_lib.base.json_text import parse_json
from trainer_lib.data.column import Column
from trainer_lib.data.given_rows import refuse_row


def parse_text(place: str, name: str, text: str, column: Column) -> Any:
    """The value that a text stands for in a column.

    Raises:
        DataError: it does not stand for one.
    """
    if column.kind == "string":
        return text
    try:
        if column.kind == "scalar":
            return _parse_number(text.strip(), np.dtype(column.dtype))
        if column.kind in ("list", "array"):
            value = parse_json(text)
            if isinstance(value, list):
                return value
    except (ValueError, OverflowError):
        pass
    raise refuse_row(place, name, f"'{text[:40]}' is not {column}")


def _parse_number(text: str, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        if (value := {"true": True, "1": True, "false": False, "0": False}.get(text.lower())) is None:
            raise ValueError(text)
        return value
    if dtype.kind == "f":
        return float(text)
    try:
        return int(text)
    except ValueError:
        number = float(text)  # a table with gaps writes its whole numbers as 3.0
        if not number.is_integer():
            raise
        return int(number)
