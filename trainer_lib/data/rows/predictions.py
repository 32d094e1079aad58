"""Predictions as files of fixed row ranges, all written exactly once, whatever crashes in between.

``predictions/<split>/part-00007.parquet``, and of new rows ``predictions/part-00007.parquet`` (or ``.jsonl``), always
holds rows [7n, 8n) and is written as a whole. A repeated run keeps finished parts (`trainer_lib.data.rows.parts`).
Processes pull parts, so their number may change between the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from trainer_lib.base.suggestions import counted
from trainer_lib.data.rows.columns import ROW_ID
from trainer_lib.data.rows.parts import ERROR, NumberedParts, SplitParts
from trainer_lib.errors import DataError
from trainer_lib.storage import FileEntry, Store

Values = Sequence[Any] | np.ndarray  # one per row


def write_split_predictions(
    parts: SplitParts, part: int, row_ids: np.ndarray, columns: Mapping[str, Values], *, split: str
) -> FileEntry:
    """Write a part of a split's predictions.

    `row_ids` are int64 or texts ``[rows]``, and columns have one value per row, such as an array ``[rows, …]``. Raises
    DataError for a column that is called row_id, cannot be stored, or has another number of rows.
    """
    start, stop = parts.row_range(part)
    ids = pa.array(row_ids, type=pa.string() if row_ids.dtype == object else pa.int64())
    table = build_table(ids, columns, rows=stop - start, of=f"split '{split}'")
    return parts.write(part, to_parquet(table), {})


def write_row_predictions(
    parts: NumberedParts,
    part: int,
    row_ids: Sequence[int | str | None],  # [rows], all of one type; None: the id of a bad row is not known
    columns: Mapping[str, Values],  # name -> one value per good row, such as an array [rows, …]
    notes: Mapping[str, Any],  # what the process that commits the parts has to know
    *,
    text_ids: bool,  # the ids are texts, not integers
    # [rows], a text for a bad row and None for a good one, as a column; None: no such column.
    errors: Sequence[str | None] | None = None,
) -> FileEntry:
    """Write a part of the predictions of new rows, as Parquet or lines of JSON by the ending of its name.

    Raises DataError for a column that is called row_id or error, cannot be stored, or has another number of rows.
    """
    try:
        ids = pa.array(row_ids, type=pa.string() if text_ids else pa.int64())
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        what = f"The ids of the rows are not all texts, or all integers of 64 bits ({error})."
        raise DataError(what, field="--id", remedy="Give every row an id of one type.") from error
    if errors is None:
        table = build_table(ids, columns, rows=len(row_ids), of="new rows")
    else:
        table = _build_with_errors(ids, columns, errors)
    if parts.path(part).endswith(".parquet"):
        return parts.write(part, to_parquet(table), notes)
    # null stands for what JSON has no number for: NaN and the infinities.
    lines = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in table.to_pylist())
    return parts.write(part, lines, notes)


def _build_with_errors(ids: pa.Array, columns: Mapping[str, Values], errors: Sequence[str | None]) -> pa.Table:
    """The rows with a column `error`; a bad row has no value in the others."""
    if ERROR in columns:
        what = "A column of the predictions is called 'error', as the column with what is wrong with a row."
        remedy = "Give it another name, or leave out --max-errors."
        raise DataError(what, field="prediction_columns", value=ERROR, remedy=remedy)
    good = [number for number, error in enumerate(errors) if error is None]
    table = build_table(ids.take(pa.array(good, pa.int64())), columns, rows=len(good), of="new rows")
    where = {number: place for place, number in enumerate(good)}
    # A missing index makes a row without values, in the columns' own types.
    table = table.take(pa.array([where.get(number) for number in range(len(errors))], pa.int64()))
    table = table.set_column(0, ROW_ID, ids)
    return table.append_column(ERROR, pa.array(errors, pa.string()))


def read_predictions(store: Store, paths: Sequence[str]) -> pa.Table:
    """The rows of Parquet files, in the order of the files. Raises StorageError or DataError."""
    tables = [_read(store, path) for path in paths]
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})


def _read(store: Store, path: str) -> pa.Table:
    with store.open_read(path) as stream:
        try:
            return pq.read_table(stream)
        except pa.ArrowInvalid as error:
            raise DataError("This is not a Parquet file.", field="predictions", value=path) from error


def build_table(row_ids: pa.Array, columns: Mapping[str, Values], *, rows: int, of: str) -> pa.Table:
    """Build the table of so many predicted rows, of columns with one value per row, such as an array ``[rows, …]``.

    `of` is what is predicted, for errors. Raises DataError for a column that is called row_id, cannot be stored, or has
    another number of rows.
    """
    arrays = {ROW_ID: row_ids, **{name: _build_array(name, values, of) for name, values in columns.items()}}
    for name, array in arrays.items():
        if len(array) != rows:
            raise _refuse(name, f"{counted(len(array), 'value')} for {counted(rows, 'row')}", of)
    return pa.table(arrays)


def to_parquet(table: pa.Table) -> bytes:
    """The bytes of a Parquet file; equal tables have equal bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())


def _build_array(name: str, values: Values, of: str) -> pa.Array:
    if name == ROW_ID:
        raise _refuse(name, "the name is reserved for the row's own id", of)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.size and values.ndim <= 2:
        return _wrap_array(values)
    # The first value stands for all: a column has one kind of value.
    nested = any(getattr(value, "ndim", 0) > 1 for value in values[:1])
    try:
        return pa.array([np.asarray(value).tolist() for value in values] if nested else list(values))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise _refuse(name, str(error), of) from error


def _wrap_array(values: np.ndarray) -> pa.Array:
    """Numbers ``[rows]`` or ``[rows, n]`` as the array that Arrow makes of a list of them, but much faster."""
    flat = pa.array(values.reshape(-1))
    if values.ndim == 1:
        return flat
    ends = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), flat)


def _refuse(name: str, what: str, of: str) -> DataError:
    return DataError(
        f"Column '{name}' of the predictions for {of} cannot be written: {what}.",
        field="prediction_columns",
        remedy="Return one value (number, text, or array) per row under names of your own.",
    )
