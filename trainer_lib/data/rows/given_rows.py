"""Rows that a user gives, as values of the columns that a split was prepared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import counted, nearest
from trainer_lib.data.rows.column import Column
from trainer_lib.data.rows.columns import ROW_ID, is_list_of_texts
from trainer_lib.errors import DataError

OF_NEW_ROWS = "Give rows with the columns of the prepared data."
_EXACT = 2.0**53  # up to it a float64 holds every integer


def convert_together(values: Sequence[Any], column: Column) -> Sequence[Any] | np.ndarray | None:
    """The values of rows in their column's type, in a tenth of the time that they take one by one.

    Returns:
        An array ``[rows, …]``, or a list of the rows' values; None where it is not certain that these are the
        values which conversion one by one gives, or a value may be bad.
    """
    if column.kind in ("string", "bytes"):
        kind = str if column.kind == "string" else bytes
        return list(values) if all(isinstance(value, kind) for value in values) else None
    if column.has_texts:
        return None
    wanted = np.dtype(column.dtype)
    array = _as_array(values)
    if array is None:
        return _convert_lists(values, wanted) if column.kind == "list" else None
    if array.ndim != 2 if column.kind == "list" else array.shape[1:] != column.shape:
        return None
    converted = _cast(array, wanted)
    return converted.tolist() if converted is not None and column.kind == "scalar" else converted


def _convert_lists(values: Sequence[Any], wanted: np.dtype[Any]) -> list[np.ndarray] | None:
    """Lists of unequal lengths as arrays."""
    # An empty one is refused for whole numbers, and alone it is known which one it is.
    if not all(type(value) is list and value for value in values):
        return None
    array = _as_array(list(itertools.chain.from_iterable(values)))
    if array is None or array.ndim != 1 or (converted := _cast(array, wanted)) is None:
        return None
    ends = np.cumsum([len(value) for value in values])
    return np.split(converted, ends[:-1])


def _as_array(values: Sequence[Any]) -> np.ndarray | None:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, OverflowError):  # of unequal lengths, or no numbers
        return None


def _cast(array: np.ndarray, wanted: np.dtype[Any]) -> np.ndarray | None:
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and wanted.kind in "biu"):
        return None
    # A great integer that became a float64 among other numbers would be rounded twice.
    if array.dtype == np.float64 and (np.abs(array) > _EXACT).any():
        return None
    converted = array.astype(wanted, casting="unsafe")
    return None if wanted.kind in "iu" and not np.array_equal(array, converted) else converted


class GivenRows(Sequence[dict[str, Any]]):
    """Rows in memory with the types of prepared ones, so that a model gets the same values from both.

    Args:
        rows: mappings from columns to values; lists stand for arrays. Columns that no row has (labels) are left out.
        columns: column -> type, as a description of the model has them.
        names: the columns that every row has; None: found from the rows.
        place: says where a row is from, by its number, for errors.

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
        place: Callable[[int], str] = "Row {}".format,
    ) -> None:
        known = known_columns(columns)
        given = list(rows)
        are_alike = names is not None and _have_exactly(given, names)
        found = list(names or ()) if are_alike else _find_columns(given, known, place)
        self.column_names = found if names is None else list(names)
        for number, row in enumerate(given) if names is not None and not are_alike else ():
            for name in row:
                if name not in self.column_names:
                    raise _refuse_uneven(place(number), name, "the rows before this one do not have the column")
        self._length = len(given)
        self._columns: dict[str, Sequence[Any] | np.ndarray] = {}
        # All at once: arrays for the values cost more than reading it from its file.
        for name in self.column_names if are_alike or _have_exactly(given, self.column_names) else ():
            if (values := convert_together([row[name] for row in given], known[name])) is not None:
                self._columns[name] = values
        # One by one, row after row: the first bad one is named.
        if left := [name for name in self.column_names if name not in self._columns]:
            ones = [[_convert(row, name, known[name], place(at)) for name in left] for at, row in enumerate(given)]
            self._columns.update(zip(left, zip(*ones, strict=True), strict=True))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(self._length)))
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows."""
        # Copies, as a prepared split gives them: a user's transform may change the sample.
        columns = [
            values[indices] if isinstance(values, np.ndarray) else [_copied(values[index]) for index in indices]
            for values in (self._columns[name] for name in self.column_names)
        ]
        return [dict(zip(self.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def known_columns(columns: Mapping[str, str]) -> dict[str, Column]:
    """The columns that new rows may have, with their types: those of the prepared data without the ids."""
    return {name: Column.parse(kind) for name, kind in columns.items() if name != ROW_ID}


def _have_exactly(rows: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether every row has these columns and no other one."""
    wanted = set(names)
    return bool(rows) and all(type(row) is dict and row.keys() == wanted for row in rows)


def _find_columns(rows: Sequence[Any], known: Mapping[str, Column], place: Callable[[int], str]) -> list[str]:
    """The known columns that the rows have, in their prepared order."""
    if not rows:
        raise DataError("There are no rows.", field="rows", remedy="Give at least one.")
    found: set[str] = set()
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise refuse_row(place(number), None, f"it is a {type(row).__name__}, not a mapping from columns to values")
        for name in row:
            if name != ROW_ID and name not in known:
                near = nearest(str(name), known)
                hint = f"the nearest is '{near}'" if near else f"the columns are {', '.join(known)}"
                error = refuse_row(place(number), str(name), f"the model was trained without this column; {hint}")
                error.remedy = f"Correct its name, or leave it out: trainflow predict … --ignore {name}."
                raise error
        found.update(name for name in row if name != ROW_ID)
    if not found:
        raise refuse_row(place(0), None, f"it has none of the columns {', '.join(known)}")
    return [name for name in known if name in found]


def _convert(row: Mapping[str, Any], name: str, column: Column, place: str) -> Any:
    if name not in row:
        raise _refuse_uneven(place, name, "the column is missing, and other rows have it")
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
    except (TypeError, ValueError, OverflowError) as error:
        raise refuse_row(place, name, f"the value is not {column} ({error})") from error
    # 3.7 for a class, and "4" for a number, were meant as something else.
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and wanted.kind in "biu"):
        raise refuse_row(place, name, f"the value is not {column} but {array.dtype}")
    if wanted.kind in "iu" and not np.array_equal(array, converted):
        raise refuse_row(place, name, f"the value does not fit into {column}")
    return converted


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray | list) else value


def refuse_row(place: str, column: str | None, what: str) -> DataError:
    """The error about one row, or one value of it; `place` says which row."""
    where = place if column is None else f"{place}, column '{column}'"
    return DataError(f"{where}: {what}.", field="rows", value=column, remedy=OF_NEW_ROWS)


def _refuse_uneven(place: str, column: str, what: str) -> DataError:
    error = refuse_row(place, column, what)
    error.remedy = f"Give '{column}' to all rows, or to none."
    return error


def parse_text(place: str, name: str, text: str, column: Column) -> Any:
    """The value that a text stands for in a column. Raises DataError if there is none."""
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


# -- rows sorted by their lengths, so that those of a batch need little padding -------------------------------------


def require_column(names: Sequence[str], column: str, *, field: str) -> None:
    """Raise DataError for a column that rows do not have."""
    if column not in names:
        near = nearest(column, names)
        what = f"The rows have no column '{column}'" + (f"; the nearest is '{near}'." if near else ".")
        raise DataError(what, field=field, value=column, remedy=f"Give one of {', '.join(names)}.")


def longest_first(values: Sequence[Any]) -> list[int]:
    """The places of values, those of the longest first; a number is a length itself. Equal ones keep their order."""
    lengths = [_length(value) for value in values]
    return sorted(range(len(lengths)), key=lambda place: -lengths[place])


def _length(value: Any) -> float:
    # What a column cannot hold is refused later, when the row is converted.
    return len(value) if hasattr(value, "__len__") else value if isinstance(value, int | float) else 0


def in_order(array: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Results ``[rows, …]`` by the rows' own order. Raises DataError if there is not one for each row.

    `order`: the places that they have among the rows.
    """
    if len(array) != len(order):
        values, rows = counted(len(array), "value"), counted(len(order), "row")
        what = f"The model returned {values} for {rows}: whose they are is not known."
        raise DataError(what, field="sort_by", remedy="Return a value for each row, or leave sort_by out.")
    return np.asarray(array)[np.argsort(np.asarray(order), kind="stable")]
