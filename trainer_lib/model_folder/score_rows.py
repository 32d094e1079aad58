"""The verb *score_rows*: new rows, read from files, to files of predictions, each row exactly once.

A part of the output holds a fixed range of the rows, whatever file they are from, and is predicted in batches of its
own. So a run that was killed and continued writes the same bytes as one that was not.
"""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

from trainer_lib.data.given_rows import GivenRows, known_columns
from trainer_lib.data.parts import Part
from trainer_lib.data.row_files import Row, RowReader
from trainer_lib.data.row_predictions import RowPredictionWriter
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.evaluation.prediction_spool import PredictionSpool
from trainer_lib.model_folder.loaded import LoadedModel, load_model
from trainer_lib.requests import ScoreRequest, ScoreResult
from trainer_lib.storage import FileEntry, Store
from trainer_lib.suggestions import nearest
from trainer_lib.worker.events import QUIET_S
from trainer_lib.worker.session import Work

BATCHES_AT_ONCE = 16
"""Batches of rows that are in memory at a time; their outputs wait on the disk until the part is whole."""
_SHARES = 1000  # what progress counts in: the number of rows is known only at the end


def run(work: Work[ScoreRequest]) -> ScoreResult:
    """Predict the rows of all files."""
    request = work.request
    loaded = load_model(request.model, trust_code=request.code)
    if loaded.digest != request.digest:
        raise ConfigError(
            "The model was replaced while the command began.",
            field="MODEL",
            value=request.model,
            remedy="Run it again.",
        )
    scoring = _Scoring(work, loaded)
    try:
        return scoring.run()
    finally:
        scoring.close()


class _Scoring:
    """The state of one run."""

    def __init__(self, work: Work[ScoreRequest], loaded: LoadedModel) -> None:
        request = work.request
        self._request = request
        self._events = work.events
        self._loaded = loaded
        self._known = known_columns(loaded.description.columns)
        self._reader = RowReader(request.sources, self._known, id_column=request.id_column, ignored=request.ignored)
        self._writer = RowPredictionWriter(Store.open(request.output, field="--to"), request.key, request.file_format)
        self._names: list[str] | None = None
        self._has_text_ids: bool | None = None
        self._began = time.monotonic()
        self._reported = 0.0
        self._first_row, self._first_share = 0, 0.0

    def run(self) -> ScoreResult:
        """Write the parts that are not there yet."""
        files: list[FileEntry] = []
        for part in itertools.count():
            finished = self._writer.finished(part)
            entry = self._write(part) if finished is None else self._keep(finished)
            if entry is None:
                break
            files.append(entry)
        if not files:
            raise DataError("The files have no rows.", field="NEW_DATA", remedy="Give at least one row.")
        return ScoreResult(tuple(files), self._reader.position, self._reader.id_column)

    def close(self) -> None:
        """Close the file that is read."""
        self._reader.close()

    def _keep(self, part: Part) -> FileEntry:
        notes = part.notes
        self._names, self._has_text_ids = list(notes["columns"]), bool(notes["text_ids"])
        self._reader.assume_id_column(notes["id_column"])
        self._reader.skip(int(notes["rows"]))
        self._first_row, self._first_share, self._began = self._reader.position, self._reader.share, time.monotonic()
        return part.entry

    def _write(self, part: int) -> FileEntry | None:
        """Predict the rows of a part; None when no row is left."""
        size = self._request.batch_size or self._loaded.batch_size
        most = self._request.rows_per_file
        ids: list[int | str] = []
        spool = PredictionSpool(None)
        try:
            while rows := self._reader.take(min(size * BATCHES_AT_ONCE, most - len(ids))):
                self._predict(rows, spool)
                self._check_ids(rows)
                ids += [row.id for row in rows]
                self._report()
            if not ids:
                return None
            notes = {
                "rows": len(ids),
                "columns": self._names,
                "id_column": self._reader.id_column,
                "text_ids": self._has_text_ids,
            }
            return self._writer.write(part, ids, self._loaded.columns_of(spool), notes)
        finally:
            spool.close()

    def _predict(self, rows: list[Row], spool: PredictionSpool) -> None:
        given = GivenRows(
            [row.values for row in rows],
            self._loaded.description.columns,
            names=self._names,
            places=[row.place for row in rows],
        )
        self._names = given.column_names
        try:
            self._loaded.add_outputs(given, spool, batch_size=self._request.batch_size)
        except (KeyError, TypeError, ConfigError) as error:
            raise self._name_missing(error, rows[0]) or error from error

    def _name_missing(self, error: Exception, row: Row) -> DataError | None:
        """The error of collate or forward as one about a column that the rows lack; None: it is about something else.

        Which columns a model needs only its code shows: the others, such as labels, may be left out.
        """
        given = self._names or []
        if isinstance(error, ConfigError) and error.field != "model":
            return None
        words = set(re.findall(r"\w+", str(error)))
        missing = next((name for name in self._known if name not in given and name in words), None)
        if missing is None:
            return None
        near = nearest(missing, [*given, *self._request.ignored])
        hint = f"the nearest column is '{near}'" if near else f"the columns are {', '.join(given)}"
        return DataError(
            f"The model needs the column '{missing}', which the rows do not have; {hint}.",
            field="NEW_DATA",
            value=row.place.partition(", row ")[0],
            remedy="Give rows with the columns of the prepared data; labels may be left out.",
        )

    def _check_ids(self, rows: list[Row]) -> None:
        for row in rows:
            is_text = isinstance(row.id, str)
            if self._has_text_ids is None:
                self._has_text_ids = is_text
            if is_text is not self._has_text_ids:
                raise DataError(
                    f"{row.place}: the id {row.id!r} is not {'a text' if self._has_text_ids else 'an integer'} "
                    "as those before it.",
                    field="--id",
                    value=self._reader.id_column,
                    remedy="Give every row an id of one type; those of a CSV file are texts.",
                )

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported < QUIET_S:
            return
        self._reported = now
        rows, share, seconds = self._reader.position, self._reader.share, now - self._began
        fields: dict[str, Any] = {"message": f"row {rows:,}", "step": int(share * _SHARES), "max_steps": _SHARES}
        if share > self._first_share and seconds > 0:
            speed = (rows - self._first_row) / seconds
            left_s = (1 - share) * seconds / (share - self._first_share)
            fields |= {"message": f"row {rows:,}, {speed:,.0f} rows/s, {left_s:,.0f} s left", "eta_s": left_s}
        self._events.emit("progress", **fields)
