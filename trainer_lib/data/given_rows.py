"""Rows that a user gives, as values of the columns that a split was prepared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer_lib.data.columns import ROW_ID, Column
from trainer_lib.errors import DataError
from trainer_lib.suggestions import nearest


class GivenRows(Sequence[dict[str, Any]]):
    """Rows in memory with the types of prepared ones, so that a model gets the same values from both.

    Args:
        rows: mappings from columns to values; lists stand for arrays. Columns that no row has (labels) are left out.
        columns: column -> type, as a description of the model has them.

    Raises:
        DataError: a row lacks a column that others have, has an unknown one, or a value of another type or shape.
    """

    is_pure = True  # reading a row draws no random numbers, so loaders need not seed around it

    def __init__(self, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
        known = {name: Column.parse(kind) for name, kind in columns.items() if name != ROW_ID}
        given = list(rows)
        names = _find_columns(given, known)
        self.column_names = names
        self._rows = [
            {name: _convert(row, name, known[name], number) for name in names} for number, row in enumerate(given)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        found = self._rows[index]
        # Copies, as a prepared split gives them: a user's transform may change the sample.
        if isinstance(found, list):
            return [_copied(row) for row in found]
        return _copied(found)


def _find_columns(rows: Sequence[Any], known: Mapping[str, Column]) -> list[str]:
    """The known columns that the rows have, in their prepared order."""
    if not rows:
        raise DataError("There are no rows.", field="rows", remedy="Give at least one.")
    found: set[str] = set()
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise _refuse(number, None, f"it is a {type(row).__name__}, not a mapping from columns to values")
        for name in row:
            if name != ROW_ID and name not in known:
                near = nearest(str(name), known)
                hint = f"the nearest is '{near}'" if near else f"the columns are {', '.join(known)}"
                raise _refuse(number, str(name), f"the model was trained without this column; {hint}")
        found.update(name for name in row if name != ROW_ID)
    if not found:
        raise _refuse(0, None, f"it has none of the columns {', '.join(known)}")
    return [name for name in known if name in found]


def _convert(row: Mapping[str, Any], name: str, column: Column, number: int) -> Any:
    if name not in row:
        raise _refuse(number, name, "the column is missing, and other rows have it")
    value = row[name]
    if column.kind in ("string", "bytes"):
        expected = str if column.kind == "string" else bytes
        if not isinstance(value, expected):
            raise _refuse(number, name, f"a value of type {expected.__name__} is needed, not {type(value).__name__}")
        return value
    converted = _convert_numbers(value, name, column, number)
    shape = {"scalar": (), "array": column.shape}.get(column.kind)
    if shape is not None and converted.shape != shape:
        raise _refuse(number, name, f"the shape is {list(converted.shape)}, not {list(shape)}")
    if column.kind == "list" and converted.ndim != 1:
        raise _refuse(number, name, f"an array of one dimension is needed, not of {converted.ndim}")
    return converted.item() if column.kind == "scalar" else converted


def _convert_numbers(value: Any, name: str, column: Column, number: int) -> Any:
    """The value as an array of the column's dtype, which may round it but not change what it means."""
    wanted = np.dtype(column.dtype)
    try:
        array = np.asarray(value)
        converted = array.astype(wanted, casting="unsafe")
    except (TypeError, ValueError) as error:
        raise _refuse(number, name, f"the value is not {column} ({error})") from error
    # 3.7 for a class, and "4" for a number, were meant as something else.
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and wanted.kind in "biu"):
        raise _refuse(number, name, f"the value is not {column} but {array.dtype}")
    if wanted.kind in "iu" and not np.array_equal(array, converted):
        raise _refuse(number, name, f"the value does not fit into {column}")
    return converted


def _copied(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in row.items()}


def _refuse(row: int, column: str | None, what: str) -> DataError:
    where = f"Row {row}" if column is None else f"Row {row}, column '{column}'"
    return DataError(
        f"{where}: {what}.", field="rows", value=column, remedy="Give rows with the columns of the prepared data."
    )
