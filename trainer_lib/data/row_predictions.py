"""Writes the predictions of new rows as files of a fixed number of rows, each exactly once.

``predictions/part-00007.parquet`` (or ``.jsonl``) holds rows [7n, 8n) and is written as a whole; a record beside
(`trainer_lib.data.parts`) tells the next run that it is finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from trainer_lib.data.parts import Part, find_finished_part, record_part
from trainer_lib.data.predictions import Values, build_table, to_parquet
from trainer_lib.errors import DataError
from trainer_lib.storage import FileEntry, Store

FORMATS = ("parquet", "jsonl")
FOLDER = "predictions"


class RowPredictionWriter:
    """Writes numbered parts.

    Args:
        store: the folder; parts lie in its `predictions`.
        key: digest of all that decides the predictions: a part of another key is written again.
        format: "parquet" or "jsonl".
    """

    def __init__(self, store: Store, key: str, format: str) -> None:
        self._store = store
        self._key = key
        self._format = format

    def finished(self, part: int) -> Part | None:
        """The file of a part that an earlier run finished, with its notes; otherwise None."""
        return find_finished_part(self._store, self._path(part), self._settings(part))

    def write(
        self, part: int, row_ids: Sequence[int | str], columns: Mapping[str, Values], notes: Mapping[str, Any]
    ) -> FileEntry:
        """Write a part.

        Args:
            row_ids: ``[rows]``, all of one type.
            columns: name -> one value per row, such as an array ``[rows, …]``.
            notes: what the next run has to know if it keeps the part.

        Raises:
            DataError: a column is called row_id, cannot be stored, or has another number of rows.
        """
        try:
            ids = pa.array(row_ids, type=pa.string() if isinstance(row_ids[0], str) else pa.int64())
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise DataError(
                f"The ids of the rows are not all texts, or all integers of 64 bits ({error}).",
                field="--id",
                remedy="Give every row an id of one type.",
            ) from error
        table = build_table(ids, columns, rows=len(row_ids), of="new rows")
        data = to_parquet(table) if self._format == "parquet" else _to_json_lines(table)
        # One write: a part is whole or absent.
        entry = self._store.write_bytes(self._path(part), data)
        record_part(self._store, entry, self._settings(part), notes)
        return entry

    def _settings(self, part: int) -> dict[str, Any]:
        return {"key": self._key, "part": part}

    def _path(self, part: int) -> str:
        return f"{FOLDER}/part-{part:05d}.{self._format}"


def _to_json_lines(table: pa.Table) -> bytes:
    lines = (json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) for row in table.to_pylist())
    return "".join(f"{line}\n" for line in lines).encode()


def _finite(value: Any) -> Any:
    """The value with null for what JSON has no number for: NaN and the infinities."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
