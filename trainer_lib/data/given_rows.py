"""Rows that a user gives, as values of the columns that a split was prepared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer_lib.data.column import Column
from trainer_lib.data.columns import ROW_ID, is_list_of_texts
from trainer_lib.errors import DataError
from trainer_lib.suggestions import nearest


class GivenRows(Sequence[dict[str, Any]]):
    """Rows in memory with the types of prepared ones, so that a model gets the same values from both.

    Args:
        rows: mappings from columns to values; lists stand for arrays. Columns that no row has (labels) are left out.
        columns: column -> type, as a description of the model has them.
        names: the columns that every row has; None: found from the rows.
        places: where each row is from, for errors; empty: rows are numbered.

    Raises:
        DataError: a row lacks a column that others have, has an unknown one, or a value of another type or shape.
    """

    is_pure = True  # reading a row draws no random numbers, so loaders need not seed around it

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        columns: Mapping[str, str],
        *,
        names: Sequence[str] | None = None,
        places: Sequence[str] = (),
    ) -> None:
        known = known_columns(columns)
        given = list(rows)
        where = places or [f"Row {number}" for number in range(len(given))]
        found = _find_columns(given, known, where)
        self.column_names = found if names is None else list(names)
        for place, row in zip(where, given, strict=True) if names is not None else ():
            for name in row:
                if name not in self.column_names:
                    raise refuse_row(place, name, "the rows before this one do not have the column")
        self._rows = [
            {name: _convert(row, name, known[name], place) for name in self.column_names}
            for place, row in zip(where, given, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        found = self._rows[index]
        # Copies, as a prepared split gives them: a user's transform may change the sample.
        if isinstance(found, list):
            return [_copied(row) for row in found]
        return _copied(found)


def known_columns(columns: Mapping[str, str]) -> dict[str, Column]:
    """The columns that new rows may have, with their types: those of the prepared data without the ids."""
    return {name: Column.parse(kind) for name, kind in columns.items() if name != ROW_ID}


def _find_columns(rows: Sequence[Any], known: Mapping[str, Column], where: Sequence[str]) -> list[str]:
    """The known columns that the rows have, in their prepared order."""
    if not rows:
        raise DataError("There are no rows.", field="rows", remedy="Give at least one.")
    found: set[str] = set()
    for place, row in zip(where, rows, strict=True):
        if not isinstance(row, Mapping):
            raise refuse_row(place, None, f"it is a {type(row).__name__}, not a mapping from columns to values")
        for name in row:
            if name != ROW_ID and name not in known:
                near = nearest(str(name), known)
                hint = f"the nearest is '{near}'" if near else f"the columns are {', '.join(known)}"
                raise refuse_row(place, str(name), f"the model was trained without this column; {hint}")
        found.update(name for name in row if name != ROW_ID)
    if not found:
        raise refuse_row(where[0], None, f"it has none of the columns {', '.join(known)}")
    return [name for name in known if name in found]


def _convert(row: Mapping[str, Any], name: str, column: Column, place: str) -> Any:
    if name not in row:
        raise refuse_row(place, name, "the column is missing, and other rows have it")
    value = row[name]
    if column.kind in ("string", "bytes"):
        expected = str if column.kind == "string" else bytes
        if not isinstance(value, expected):
            raise refuse_row(place, name, f"a value of type {expected.__name__} is needed, not {type(value).__name__}")
        return value
    if column.has_texts:
        if not is_list_of_texts(value):
            raise refuse_row(place, name, f"a list of texts is needed, not a value of type {type(value).__name__}")
        return list(value)
    converted = _convert_numbers(value, name, column, place)
    shape = {"scalar": (), "array": column.shape}.get(column.kind)
    if shape is not None and converted.shape != shape:
        raise refuse_row(place, name, f"the shape is {list(converted.shape)}, not {list(shape)}")
    if column.kind == "list" and converted.ndim != 1:
        raise refuse_row(place, name, f"an array of one dimension is needed, not of {converted.ndim}")
    return converted.item() if column.kind == "scalar" else converted


def _convert_numbers(value: Any, name: str, column: Column, place: str) -> Any:
    """The value as an array of the column's dtype, which may round it but not change what it means."""
    wanted = np.dtype(column.dtype)
    try:
        array = np.asarray(value)
        converted = array.astype(wanted, casting="unsafe")
    except (TypeError, ValueError) as error:
        raise refuse_row(place, name, f"the value is not {column} ({error})") from error
    # 3.7 for a class, and "4" for a number, were meant as something else.
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and wanted.kind in "biu"):
        raise refuse_row(place, name, f"the value is not {column} but {array.dtype}")
    if wanted.kind in "iu" and not np.array_equal(array, converted):
        raise refuse_row(place, name, f"the value does not fit into {column}")
    return converted


def _copied(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, np.ndarray | list) else value for name, value in row.items()}


def refuse_row(place: str, column: str | None, what: str) -> DataError:
    """The error about one row, or one value of it; `place` says which row."""
    where = place if column is None else f"{place}, column '{column}'"
    return DataError(
        f"{where}: {what}.", field="rows", value=column, remedy="Give rows with the columns of the prepared data."
    )
