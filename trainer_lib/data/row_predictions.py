"""Writes the predictions of new rows as files of a fixed number of rows, each exactly once.

``predictions/part-00007.parquet`` (or ``.jsonl``) holds rows [7n, 8n) and is written as a whole; a record beside
(`trainer_lib.data.parts`) tells the next run that it is finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa

from trainer_lib.data.columns import ROW_ID
from trainer_lib.data.predictions import Values, build_table, to_parquet
from trainer_lib.data.row_parts import ERROR, numbered_parts
from trainer_lib.errors import DataError
from trainer_lib.storage import FileEntry, Store


class RowPredictionWriter:
    """Writes numbered parts.

    Args:
        store: the folder; parts lie in its `predictions`.
        key: digest of all that decides the predictions: a part of another key is written again.
        format: "parquet" or "jsonl".
    """

    def __init__(self, store: Store, key: str, format: str) -> None:
        self.parts = numbered_parts(store, key, format)
        self._format = format

    def write(
        self,
        part: int,
        row_ids: Sequence[int | str | None],
        columns: Mapping[str, Values],
        notes: Mapping[str, Any],
        *,
        text_ids: bool,
        errors: Sequence[str | None] | None = None,
    ) -> FileEntry:
        """Write a part.

        Args:
            row_ids: ``[rows]``, all of one type; None: the id of a bad row is not known.
            columns: name -> one value per good row, such as an array ``[rows, …]``.
            notes: what the process that commits the parts has to know.
            text_ids: the ids are texts, not integers.
            errors: ``[rows]``, a text for each bad row and None for a good one, as a column; None: no such column.

        Raises:
            DataError: a column is called row_id or error, cannot be stored, or has another number of rows.
        """
        try:
            ids = pa.array(row_ids, type=pa.string() if text_ids else pa.int64())
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise DataError(
                f"The ids of the rows are not all texts, or all integers of 64 bits ({error}).",
                field="--id",
                remedy="Give every row an id of one type.",
            ) from error
        if errors is None:
            table = build_table(ids, columns, rows=len(row_ids), of="new rows")
        else:
            table = _build_with_errors(ids, columns, errors)
        data = to_parquet(table) if self._format == "parquet" else _to_json_lines(table)
        return self.parts.write(part, data, notes)


def _build_with_errors(ids: pa.Array, columns: Mapping[str, Values], errors: Sequence[str | None]) -> pa.Table:
    """The rows with a column `error`; a bad row has no value in the others."""
    if ERROR in columns:
        raise DataError(
            "A column of the predictions is called 'error', as the column with what is wrong with a row.",
            field="prediction_columns",
            value=ERROR,
            remedy="Give it another name, or leave out --max-errors.",
        )
    good = [number for number, error in enumerate(errors) if error is None]
    table = build_table(ids.take(pa.array(good, pa.int64())), columns, rows=len(good), of="new rows")
    where = {number: place for place, number in enumerate(good)}
    # A missing index makes a row without values, in the columns' own types.
    table = table.take(pa.array([where.get(number) for number in range(len(errors))], pa.int64()))
    table = table.set_column(0, ROW_ID, ids)
    return table.append_column(ERROR, pa.array(errors, pa.string()))


def _to_json_lines(table: pa.Table) -> bytes:
    # null stands for what JSON has no number for: NaN and the infinities.
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in table.to_pylist())
