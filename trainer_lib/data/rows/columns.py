"""Converts rows to Arrow columns. A column's type is inferred from the first rows and enforced on all others.

    Python / NumPy value                 stored as                         read as
    bool, int, float, NumPy scalar       the same width (int64, float64)   bool, int, float
    str, bytes                           large_string, large_binary        str, bytes
    1-D array, list of numbers           large_list of the dtype           1-D array, any length
    list of texts                        large_list of large_string        list of str, any length
    array of 2 or more dimensions        fixed-size list                   array of that shape

No value loses precision: a list of Python floats is float64. Every error names the split, the row and the column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from trainer_lib.data.rows.column import TEXT, Column
from trainer_lib.errors import DataError

ROW_ID = "row_id"
_MISSING = object()


def _arrow_type(column: Column) -> pa.DataType:
    # large_*: the plain types end at 2 GiB in one column.
    if column.has_texts:
        return pa.large_list(pa.large_string())
    if column.kind in ("string", "bytes"):
        return pa.large_string() if column.kind == "string" else pa.large_binary()
    # Arrow packs booleans into bits, which NumPy cannot map: arrays store a byte per boolean.
    stored = pa.from_numpy_dtype(
        np.dtype("uint8" if column.dtype == "bool" and column.kind != "scalar" else column.dtype)
    )
    if column.kind == "scalar":
        return stored
    return pa.large_list(stored) if column.kind == "list" else pa.list_(stored, int(np.prod(column.shape)))


class Schema:
    """The columns of a split by name, in order; the split's name is for errors."""

    def __init__(self, columns: Mapping[str, Column], split: str) -> None:
        self.columns = dict(columns)
        self._split = split
        fields = [pa.field(name, _arrow_type(column), nullable=False) for name, column in self.columns.items()]
        self.arrow = pa.schema(fields)

    @classmethod
    def infer(cls, rows: Sequence[Mapping[str, Any]], split: str) -> Schema:
        """The columns that can hold all of `rows` (at least one). Raises DataError when there are none."""
        first = rows[0]
        if not isinstance(first, Mapping) or not first:
            raise _refuse(split, 0, None, f"a row must be a non-empty mapping, got {type(first).__name__}")
        columns: dict[str, Column] = {}
        for name in first:
            if not isinstance(name, str):
                raise _refuse(split, 0, repr(name), "a column's name must be text")
            columns[name] = _infer_column(
                [_read_value(row, name, split, index) for index, row in enumerate(rows)], name, split
            )
        columns.setdefault(ROW_ID, Column("scalar", "int64"))
        # Predictions refer to rows by these ids.
        if columns[ROW_ID] not in (Column("scalar", "int64"), Column(TEXT)):
            raise _refuse(split, 0, ROW_ID, "row ids must be integers or texts")
        return cls(columns, split)

    @classmethod
    def parse(cls, texts: Mapping[str, str], split: str) -> Schema:
        """The schema that `to_texts` gives."""
        return cls({name: Column.parse(text) for name, text in texts.items()}, split)

    def to_texts(self) -> dict[str, str]:
        """The columns with their types as texts."""
        return {name: str(column) for name, column in self.columns.items()}

    def batch(
        self, rows: Sequence[Mapping[str, Any]], first_row: int, *, allow_nan: bool, first_id: int | None = None
    ) -> pa.RecordBatch:
        """Convert `rows`, numbered from `first_row`, to a record batch ``[rows]``. Raises DataError for other types.

        Rows without ids get ids from `first_id` on; None: from `first_row` on.
        """
        lowest = first_row if first_id is None else first_id
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise _refuse(self._split, first_row + index, None, "not a mapping")
            if not row.keys() <= self.columns.keys():
                unknown = ", ".join(sorted(map(str, row.keys() - self.columns.keys())))
                raise _refuse(self._split, first_row + index, None, f"not in the first row: {unknown}")
        own_ids = any(ROW_ID in row for row in rows)
        arrays = []
        for name, column in self.columns.items():
            if name == ROW_ID and not own_ids:
                arrays.append(pa.array(np.arange(lowest, lowest + len(rows), dtype=np.int64)))
                continue
            values = [row.get(name, _MISSING) for row in rows]
            if any(map(is_, values, repeat(_MISSING))):
                values = [_read_value(row, name, self._split, first_row + index) for index, row in enumerate(rows)]
            arrays.append(self._build_array(name, column, values, first_row, allow_nan=allow_nan))
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)

    def _build_array(
        self, name: str, column: Column, values: list[Any], first_row: int, *, allow_nan: bool
    ) -> pa.Array:
        if column.has_texts or column.kind in ("string", "bytes"):
            kinds = str if column.kind == "string" else bytes | bytearray | memoryview
            for index, value in enumerate(values):
                if not (is_list_of_texts(value) if column.has_texts else isinstance(value, kinds)):
                    self._refuse_type(first_row + index, name, column, type(value).__name__)
            return pa.array(values, type=self.arrow.field(name).type)
        dtype = np.dtype(column.dtype)
        # Numbers of Python's become an array at once, others one by one, with checks.
        items: Iterable[Any] = (flat := np.asarray(values if set(map(type, values)) in ({int}, {float}) else 0))
        if column.kind != "scalar" or not flat.ndim or flat.dtype != dtype:
            items = [self._convert_item(value, name, column, dtype, first_row + i) for i, value in enumerate(values)]
            flat = np.concatenate([item.reshape(-1) for item in items]) if items else np.empty(0, dtype)
        if dtype.kind == "f" and not allow_nan:
            self._refuse_non_finite(flat, items, name, first_row)
        if dtype.kind == "b" and column.kind != "scalar":
            flat = flat.view(np.uint8)
        if column.kind == "scalar":
            return pa.array(flat, type=self.arrow.field(name).type)
        if column.kind == "array":
            return pa.FixedSizeListArray.from_arrays(pa.array(flat), type=self.arrow.field(name).type)
        # Offset i is where list i starts among the flat values.
        offsets = np.concatenate([[0], np.cumsum([item.size for item in items])]).astype(np.int64)
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat), type=self.arrow.field(name).type)

    def _convert_item(self, value: Any, name: str, column: Column, dtype: np.dtype[Any], row: int) -> np.ndarray:
        """Convert one value to an array of the column's dtype and shape."""
        found = _as_array(value)
        # A safe cast keeps every value: int64 does not fit float32.
        fits = found is not None and (found.size == 0 or np.can_cast(found.dtype, dtype, "safe"))
        if found is None or not fits:
            self._refuse_type(row, name, column, type(value).__name__ if found is None else str(found.dtype))
        shape = {"scalar": (), "array": column.shape}.get(column.kind, found.shape[:1])
        if found.shape != shape or (column.kind == "list" and found.ndim != 1):
            self._refuse_type(row, name, column, f"an array of shape {list(found.shape)}")
        return found.astype(dtype, copy=False)

    def _refuse_type(self, row: int, name: str, column: Column, what: str) -> NoReturn:
        raise _refuse(self._split, row, name, f"{what} does not fit {column}, which the first rows gave")

    def _refuse_non_finite(self, flat: np.ndarray, items: Iterable[Any], name: str, first_row: int) -> None:
        finite = np.isfinite(flat)
        if finite.all():
            return
        place = int(np.argmin(finite))
        row = first_row + int(np.searchsorted(np.cumsum([item.size for item in items]), place, side="right"))
        what = "NaN" if np.isnan(flat[place]) else "an infinite value"
        raise DataError(
            f"There is {what} in split '{self._split}', row {row}, column '{name}'.",
            field="prepare",
            remedy="Repair or drop it in prepare(), or allow it with prepare.allow_nan=true.",
        )


def _infer_column(values: list[Any], name: str, split: str) -> Column:
    if all(isinstance(value, str) for value in values):
        return Column("string")
    if all(isinstance(value, bytes | bytearray | memoryview) for value in values):
        return Column("bytes")
    if all(is_list_of_texts(value) for value in values) and any(values):
        return Column("list", TEXT)
    arrays = []
    for row, value in enumerate(values):
        array = _as_array(value)
        if array is None:
            what = "None" if value is None else f"a value of type {type(value).__name__}"
            raise _refuse(split, row, name, f"{what} cannot be stored with the other rows' values")
        arrays.append(array)
    # NumPy gives an empty list float64, which says nothing about the column.
    dtype = np.result_type(*{array.dtype for array in arrays if array.size} or {np.dtype(np.int64)})
    kinds = {array.dtype.kind == "b" for array in arrays if array.size}
    if dtype.kind not in "biuf" or len(kinds) > 1:
        raise _refuse(split, 0, name, f"a mixture of types ({dtype}) in the first rows")
    shapes = {array.shape for array in arrays}
    dimensions = {len(shape) for shape in shapes}
    if dimensions == {0}:
        return Column("scalar", dtype.name)
    if dimensions == {1}:
        return Column("list", dtype.name)
    if len(shapes) == 1:
        return Column("array", dtype.name, arrays[0].shape)
    odd = next(row for row, array in enumerate(arrays) if array.shape != arrays[0].shape)
    what = f"shape {list(arrays[odd].shape)} next to {list(arrays[0].shape)}; only one-dimensional arrays may vary"
    raise _refuse(split, odd, name, what)


def is_list_of_texts(value: Any) -> bool:
    """Whether a value is a list or a tuple of texts, perhaps empty."""
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _as_array(value: Any) -> np.ndarray | None:
    """Numbers as an array ``[…]``; None for anything else."""
    if isinstance(value, str | bytes | bytearray | memoryview) or value is None:
        return None
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # ragged lists; tensors that NumPy cannot read
        return None
    return array if array.dtype.kind in "biuf" else None


def _read_value(row: Mapping[str, Any], name: str, split: str, index: int) -> Any:
    value = row.get(name, _MISSING) if isinstance(row, Mapping) else _MISSING
    if value is _MISSING:
        raise _refuse(split, index, name, "the column is missing")
    return value


def _refuse(split: str, row: int, column: str | None, what: str) -> DataError:
    where = f"split '{split}', row {row}" + (f", column '{column}'" if column is not None else "")
    return DataError(
        f"{where}: {what}.",
        field="prepare",
        remedy="Every row of a split must have the same columns, holding numbers, arrays of numbers, text, lists of "
        "texts or bytes.",
    )
