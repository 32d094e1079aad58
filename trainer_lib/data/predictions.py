"""Predictions as Parquet parts of a fixed row range each: exactly once, whatever crashed in between.

``predictions/<split>/part-00007.parquet`` always holds rows 7n … 8n - 1 and is written whole. A repeated run keeps the
parts that are finished (see `trainer_lib.data.parts`); ranks share parts out by number, so the number of processes may
change between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer_lib.data.columns import ROW_ID
from trainer_lib.data.parts import finished_part, record_part
from trainer_lib.errors import DataError
from trainer_lib.storage import FileEntry, Store

Values = Sequence[Any] | np.ndarray  # one per row


class PredictionWriter:
    """Writes the predictions for one split.

    Args:
        store: the stage's folder.
        split: name of the split.
        rows: how many there are.
        rows_per_file: rows of each part; the last one may have fewer.
    """

    def __init__(self, store: Store, split: str, *, rows: int, rows_per_file: int = 10_000) -> None:
        self._store = store
        self._split = split
        self._rows = rows
        self._rows_per_file = rows_per_file

    @property
    def num_parts(self) -> int:
        """How many files there will be."""
        return -(-self._rows // self._rows_per_file)

    def parts(self, rank: int = 0, world_size: int = 1) -> Iterator[int]:
        """The parts that `rank` takes: every `world_size`-th, so that all ranks end at about the same time."""
        return iter(range(rank, self.num_parts, world_size))

    def row_range(self, part: int) -> tuple[int, int]:
        """First row of a part, and the one after its last."""
        start = part * self._rows_per_file
        return start, min(start + self._rows_per_file, self._rows)

    def finished(self, part: int) -> FileEntry | None:
        """The part's file if an earlier run completed it."""
        found = finished_part(self._store, self._path(part), self._settings(part))
        return None if found is None else found.entry

    def write(self, part: int, row_ids: np.ndarray, columns: Mapping[str, Values]) -> FileEntry:
        """Write a part: its row ids, int64 [rows], and the columns of its predictions.

        Raises:
            DataError: a column that is called row_id, cannot be stored, or has another number of rows.
        """
        start, stop = self.row_range(part)
        arrays = {ROW_ID: pa.array(row_ids, type=pa.int64())}
        for name, values in columns.items():
            arrays[name] = self._array(name, values)
        for name, array in arrays.items():
            if len(array) != stop - start:
                raise self._refuse(name, f"{len(array)} values for {stop - start} rows")
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(arrays), sink, compression="zstd")
        entry = self._store.write_bytes(self._path(part), sink.getvalue().to_pybytes())
        record_part(self._store, entry, self._settings(part), {})
        return entry

    def _array(self, name: str, values: Values) -> pa.Array:
        if name == ROW_ID:
            raise self._refuse(name, "the name is taken by the row's own id")
        nested = any(np.ndim(value) > 1 for value in values[:1])
        try:
            return pa.array([np.asarray(value).tolist() for value in values] if nested else list(values))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise self._refuse(name, str(error)) from error

    def _refuse(self, name: str, what: str) -> DataError:
        return DataError(
            f"column '{name}' of the predictions for split '{self._split}': {what}.",
            field="prediction_columns",
            remedy="Return one value (number, text, or array) per row under names of your own.",
        )

    def _settings(self, part: int) -> dict[str, Any]:
        return {"rows": list(self.row_range(part))}

    def _path(self, part: int) -> str:
        return f"predictions/{self._split}/part-{part:05d}.parquet"
