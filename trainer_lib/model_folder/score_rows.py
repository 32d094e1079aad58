"""The verb *score_rows*: new rows, read from files, to files of predictions, every row exactly once.

A part of the output holds a fixed range of the rows, whatever file they are from, and is predicted in batches of its
own. So a run that was killed and continued, and one by several workers, write the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from trainer_lib.base.restore_process import objects_set_aside
from trainer_lib.base.suggestions import counted, nearest
from trainer_lib.data.rows.given_rows import GivenRows, known_columns, longest_first, require_column
from trainer_lib.data.rows.parts import numbered_parts
from trainer_lib.data.rows.predictions import write_row_predictions
from trainer_lib.data.rows.row_files import BadRow, Row, RowReader, read_rows
from trainer_lib.data.rows.row_sources import FIELD
from trainer_lib.errors import CodeError, ConfigError, DataError, TrainflowError, is_out_of_memory
from trainer_lib.evaluation.prediction_spool import PredictionSpool
from trainer_lib.locks.shared_parts import SharedParts
from trainer_lib.model_folder.loaded import LoadedModel, load_same
from trainer_lib.protocol.requests import PartsResult, ScoreRequest
from trainer_lib.recipes.tables.cells import read_reading
from trainer_lib.recipes.tables.table_files import read_table
from trainer_lib.recipes.time_series_forecasting import Series, SeriesTable, window_columns
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainer_lib.worker.process.session import Pace, Work

BATCHES_AT_ONCE = 16
"""Batches of rows that are in memory at a time; their outputs wait on the disk until the part is whole."""
_SHARES = 1000  # what progress counts in: the number of rows is known only at the end
_ERROR_CHARACTERS = 500


def run(work: Work[ScoreRequest]) -> PartsResult:
    """Predict the rows of all files that no other worker takes; returns when every part is finished."""
    with contextlib.closing(_Scoring(work, load_same(work.request))) as scoring, objects_set_aside():
        return scoring.run()


class _Form(NamedTuple):
    """The form of all rows, from the first ones: columns, the column of the ids (None: numbers), and the ids' type."""

    names: list[str]
    id_column: str | None
    has_text_ids: bool


class _Scoring:
    """The state of one run."""

    def __init__(self, work: Work[ScoreRequest], loaded: LoadedModel) -> None:
        request = work.request
        self._request, self._events = request, work.events
        self._allows_bad = request.max_errors > 0
        self._loaded = loaded
        self._size = request.batch_size or loaded.batch_size
        self._known = known_columns(loaded.description.columns)
        self._store = Store.open(request.output, field="--to")
        self._parts = numbered_parts(self._store, request.key, request.file_format)
        info = loaded.description.info
        self._series = read_series(request, info) if "new_steps" in info else None
        self._reader = self._open()
        self._form = self._find_form()
        if loaded.form is not None:  # the first rows are read again
            loaded.form.unknown.clear()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="trainflow-rows")
        self._pace = Pace()
        self._predicted = self._num_bad = 0

    def run(self) -> PartsResult:
        """Write parts until none is left."""
        written = 0
        with SharedParts(self._store, self._parts) as shared:
            for part in shared:
                if self._go_to(part) and self._write(part, shared):
                    written += 1
                else:
                    shared.end_at(-(-self._reader.position // self._request.rows_per_file))
        for sentence in self._loaded.form.describe_unknown() if self._loaded.form is not None else ():
            self._events.emit("warning", message=sentence)
        return PartsResult(written, self._predicted)

    def close(self) -> None:
        """Close the file that is read."""
        self._ahead.shutdown()
        self._reader.close()

    def _open(self) -> RowReader:
        if self._series is not None:
            return copy.copy(self._series)  # which stays before its first row
        request = self._request
        form = self._loaded.form
        return RowReader(
            request.sources,
            self._known,
            id_column=request.id_column,
            ignored=request.ignored,
            usual_ids=() if form is None or form.id_column is None else (form.id_column,),
            may_lack=() if form is None else form.may_lack,
            read=None if form is None else form.read,
            reading=None if form is None else form.reading,
        )

    def _find_form(self) -> _Form:
        """Look at the first rows, for workers that begin with later ones. Raises DataError where there are none."""
        head, names = list[Row | BadRow](), list[str]()
        with contextlib.closing(self._open()) as reader:
            # Where bad rows are allowed, the first ones may all be bad.
            while not names and len(head) <= self._request.max_errors:
                more = list(reader.take_all(min(self._size * BATCHES_AT_ONCE, self._request.rows_per_file)))
                if not more:
                    break
                head += more
                names = self._find_names(more)
        for note in reader.notes:
            self._events.emit("warning", message=note)
        if not head:
            raise DataError("The files have no rows.", field="NEW_DATA", remedy="Give at least one row.")
        if (column := self._request.sort_by) is not None and names:
            require_column(names, column, field="--sort-by")
        ids = [row.id for kind in (Row, BadRow) for row in head if isinstance(row, kind) and row.id is not None]
        return _Form(names, reader.id_column, bool(ids) and isinstance(ids[0], str))

    def _find_names(self, rows: Sequence[Row | BadRow]) -> list[str]:
        """The columns of the rows, in their prepared order; none: no row has values that the model takes."""
        bad = next((row for row in rows if isinstance(row, BadRow)), None)
        good = [row for row in rows if isinstance(row, Row)]
        if not self._allows_bad:
            if bad is not None:
                raise bad.error
            return self._convert(good, None).column_names
        names = {name for row in good if self._find_problem(row, None) is None for name in row.values}
        return [name for name in self._known if name in names]

    def _go_to(self, part: int) -> bool:
        """Read up to the first row of a part; False if there are fewer rows."""
        first = part * self._request.rows_per_file
        if self._reader.position > first:  # a part that another worker did not finish
            self._reader.close()
            self._reader = self._open()
        if self._reader.position == 0:
            self._reader.assume_id_column(self._form.id_column)
        return self._reader.skip(left := first - self._reader.position) == left

    def _write(self, part: int, shared: SharedParts) -> bool:
        """Predict the rows of a part; False when no row is left."""
        most = self._request.rows_per_file
        order: list[int] = []  # the places of the rows whose outputs are in the spool
        ids: list[int | str | None] = []
        errors: list[str | None] = []
        with contextlib.closing(PredictionSpool(None)) as spool:
            for rows, share in self._chunks(most):
                found, places = self._predict(rows, spool)
                order += [len(errors) + place for place in places]
                errors += found
                ids += [row.id if self._has_type(row.id) else None for row in rows]
                self._predicted += len(rows)
                if self._pace.is_due():
                    counts = {"rows": self._predicted, "row": self._reader.position}
                    self._events.emit("progress", step=int(share * _SHARES), max_steps=_SHARES, **counts)
            if not ids:
                return False
            num_bad = sum(error is not None for error in errors)
            notes = {"rows": len(ids), "id_column": self._form.id_column, "errors": num_bad}
            if num_bad:
                notes["first_error"] = next(error for error in errors if error is not None)
            mixed = order if self._request.sort_by is not None else None
            columns = self._loaded.columns_of(spool, mixed) if num_bad < len(ids) else {}
            if self._series is not None and columns:
                good = [number for number, error in zip(ids, errors, strict=True) if error is None]
                columns = {"time": [self._series.times[number] for number in good]} | columns
            if shared.is_ours(part):  # else another worker took it for lost, and writes the same
                shown = errors if self._allows_bad else None
                is_text = self._form.has_text_ids
                write_row_predictions(self._parts, part, ids, columns, notes, text_ids=is_text, errors=shown)
            return True

    def _chunks(self, most: int) -> Iterator[tuple[list[Row | BadRow], float]]:
        """Yield the next rows, at most so many, some batches at a time, with the part of the files that is read.

        The next ones are read in a thread while these are predicted.
        """
        size = min(self._size * BATCHES_AT_ONCE, most)

        def read(rows: int) -> tuple[list[Row | BadRow], float]:
            return list(self._reader.take_all(rows)), self._reader.share

        waiting = self._ahead.submit(read, size)
        try:
            while (chunk := waiting.result())[0]:
                most -= len(chunk[0])
                waiting = self._ahead.submit(read, min(size, most))
                yield chunk
        finally:
            wait([waiting])  # until then the other thread uses the reader

    # -- one chunk of rows --------------------------------------------------------------------------------------------

    def _has_type(self, row_id: int | str | None) -> bool:
        return row_id is None or isinstance(row_id, str) is self._form.has_text_ids

    def _predict(self, rows: Sequence[Row | BadRow], spool: PredictionSpool) -> tuple[list[str | None], list[int]]:
        """Append the outputs of the good rows to the spool; where no row may be bad, a bad one raises.

        Returns the problems of the rows, None for none, and the places of the good ones in the order of the outputs.
        """
        problems: list[Exception | None] = [self._find_own_problem(row) for row in rows]
        good = [number for number, problem in enumerate(problems) if problem is None]
        if not self._allows_bad:
            if (first := next((problem for problem in problems if problem is not None), None)) is not None:
                raise first
        else:
            try:
                self._convert([rows[number] for number in good], self._form.names)
            except DataError:  # at least one: which ones is found out one by one
                for number in good:
                    problems[number] = self._find_problem(rows[number], self._form.names)
                good = [number for number in good if problems[number] is None]
        if (column := self._request.sort_by) is not None:
            values = [rows[number].values.get(column) for number in good]  # type: ignore[union-attr]
            good = [good[place] for place in longest_first(values)]
        self._forward([rows[number] for number in good], good, problems, spool)
        self._count_bad(rows, problems)
        found = [None if problem is None else _describe(problem) for problem in problems]
        return found, [number for number in good if problems[number] is None]

    def _forward(
        self, rows: Sequence[Any], numbers: list[int], problems: list[Exception | None], spool: PredictionSpool
    ) -> None:
        """Run the model. Where bad rows are allowed, those of a batch that fails are tried alone."""
        while rows:
            before = spool.num_batches
            try:
                self._run_model(rows, spool)
                return
            except Exception as error:
                if not self._allows_bad or not _is_of_row(error):
                    raise
            done = (spool.num_batches - before) * self._size
            for row, number in zip(rows[done : done + self._size], numbers[done : done + self._size], strict=True):
                try:
                    self._run_model([row], spool)
                except Exception as error:
                    if not _is_of_row(error):
                        raise
                    problems[number] = error
            rows, numbers = rows[done + self._size :], numbers[done + self._size :]

    def _run_model(self, rows: Sequence[Row], spool: PredictionSpool) -> None:
        given = self._convert(rows, self._form.names)
        try:
            self._loaded.add_outputs(given, spool, batch_size=self._request.batch_size)
        except (KeyError, TypeError, ConfigError, CodeError) as error:
            raise self._name_missing(error, rows[0]) or error from error
        except DataError as error:
            for number, row in enumerate(rows if self._loaded.collate is not None else ()):
                try:
                    self._loaded.collate([given[number]])  # type: ignore[misc]  # checked above
                except DataError as problem:
                    what = f"{row.place}, {problem.message}"
                    raise DataError(what, field="NEW_DATA", value=_file(row), remedy=problem.remedy) from error
            raise

    def _convert(self, rows: Sequence[Any], names: list[str] | None) -> GivenRows:
        return GivenRows(
            [row.values for row in rows],
            self._loaded.description.columns,
            names=names or None,  # none are known where the first rows are all bad
            place=lambda number: str(rows[number].place),
        )

    def _find_problem(self, row: Any, names: list[str] | None) -> DataError | None:
        try:
            self._convert([row], names)
        except DataError as error:
            return error
        return None

    def _count_bad(self, rows: Sequence[Row | BadRow], problems: Sequence[Exception | None]) -> None:
        for row, problem in zip(rows, problems, strict=True):
            self._num_bad += problem is not None
            if problem is not None and self._num_bad > (limit := self._request.max_errors):
                what = f"More than {limit:,} rows cannot be predicted. One of them: {_describe(problem)}"
                remedy = "Mend the rows, or raise the limit."
                raise DataError(what, field="--max-errors", value=row.place, remedy=remedy) from problem

    def _name_missing(self, error: Exception, row: Row) -> DataError | None:
        """The error of collate or forward as one about a column that the rows lack; None: it is about something else.

        Which columns a model needs only its code shows: the others, such as labels, may be left out.
        """
        names, cause = self._form.names, error.__cause__ if isinstance(error, CodeError) else error
        if isinstance(error, ConfigError) and error.field != "model":
            return None
        if isinstance(error, CodeError) and not isinstance(cause, KeyError):
            return None
        words = set(re.findall(r"\w+", str(cause)))
        missing = next((name for name in self._known if name not in names and name in words), None)
        if missing is None:
            return None
        near = nearest(missing, [*names, *self._request.ignored])
        hint = f"the nearest column is '{near}'" if near else f"the columns are {', '.join(names)}"
        what = f"The model needs the column '{missing}', which the rows do not have; {hint}."
        remedy = "Give rows with the columns of the prepared data; labels may be left out."
        return DataError(what, field="NEW_DATA", value=_file(row), remedy=remedy)

    def _find_own_problem(self, row: Row | BadRow) -> DataError | None:
        """The problem that a row has whatever the model; None for none."""
        if isinstance(row, BadRow):
            return row.error
        if self._has_type(row.id):
            return None
        kind = "a text" if self._form.has_text_ids else "an integer"
        what = f"{row.place}: the id {row.id!r} is not {kind} as the first one."
        remedy = "Give every row an id of one type; those of a CSV file are texts."
        return DataError(what, field="--id", value=self._form.id_column, remedy=remedy)


def _file(row: Row) -> str:
    """The file that a row is from."""
    return row.place.partition(", row ")[0]


def _is_of_row(error: Exception) -> bool:
    """Whether an error of the model's code may be one row's fault: not out of memory, nor a store's."""
    if isinstance(error, TrainflowError):
        return isinstance(error, DataError | CodeError)
    return not is_out_of_memory(error) and not isinstance(error, OSError)


def _describe(error: Exception) -> str:
    if isinstance(error, DataError):
        return error.message
    return mask(f"{type(error).__name__}: {error}")[:_ERROR_CHARACTERS]


class SeriesReader(RowReader):
    """The windows of a table's series, in the order in which the series begin there; `times`: id -> forecast times."""

    def __init__(self, request: ScoreRequest, info: Mapping[str, Any]) -> None:
        super().__init__((), {}, id_column=info["new_steps"]["series"])
        self._info, self._file = info, request.sources[0]
        table = self._read_table([file.address for file in request.sources])
        self.times: dict[int | str | None, list[str]] = {
            series.name or 0: table.times_after(series, info["horizon"]) for series in table.series
        }
        self._rows = [self._window(number, series) for number, series in enumerate(table.series)]

    @override
    def skip(self, rows: int) -> int:
        return len(list(self.take_all(rows)))

    @override
    def take_all(self, rows: int) -> Iterator[Row | BadRow]:
        for row in self._rows[self.position : self.position + rows]:
            self.position += 1
            yield row

    def _read_table(self, addresses: list[str]) -> SeriesTable:
        note, targets = self._info["new_steps"], self._info["targets"]
        try:
            table = read_table(addresses, rename=note["rename"], field=FIELD, read=note.get("read"))
            self.notes += table.notes
            for name in (columns := [*targets, *self._info["known"]]):
                table.require(name, field=FIELD)
            return SeriesTable(table, columns, note, targets=len(targets))
        except (ConfigError, DataError) as error:
            error.field = FIELD
            if isinstance(error, ConfigError) or "prepare." in str(error.remedy):
                error.remedy = "Correct the files: they are read as prepare read those of the training."
            raise

    def _window(self, number: int, series: Series) -> Row | BadRow:
        info, times, end = self._info, self.times[series.name or 0], len(series.times) - series.to_come
        of = f"The series '{series.name}'" if series.name else "The series"
        what, remedy = "", "Give more steps, or leave the series out."
        if end < info["context"]:
            what = f"{of} has {counted(end, 'step')}, and the model needs {info['context']}."
        elif info["known"] and series.to_come < len(times):
            names, span = " and ".join(f"'{name}'" for name in info["known"]), f"{times[0]} to {times[-1]}"
            what = (
                f"{of} has {series.to_come} of the next {len(times)} steps ({span}), and the model needs their {names}."
            )
            remedy = f"Append rows for {span} with an empty '{info['targets'][0]}' and these values."
        if what:
            error = DataError(what, field=FIELD, value=self._file.address, remedy=remedy)
            return BadRow(series.name or 0, self._file.address, error)
        values = series.values[end - info["context"] : end + len(times)].astype(np.float32)
        row: dict[str, Any] = {"time": times[0]} | ({"series": series.name} if series.name else {})
        row |= window_columns(values, info["context"], info["targets"], list(info["known"]))
        return Row(series.name or 0, row, f"{self._file.address}, row {number}")


def read_series(request: ScoreRequest, info: Mapping[str, Any]) -> SeriesReader | None:
    """The windows, where the files have steps as those of `prepare` had; None: the model takes the rows themselves."""
    note, row = info["new_steps"], dict[str, str]()
    with contextlib.suppress(DataError):  # the reader of rows names a bad row, or counts it
        first = next(read_rows(request.sources, None, read_reading(note.get("read") or {})), ("", None))[1]
        values = first.items() if isinstance(first, Mapping) else ()
        row = {note["rename"].get(name, name): str(value).lstrip() for name, value in values}
    texts = [row[name] for name in (note["time"], *info["targets"]) if name in row]
    if not texts or any(text.startswith("[") for text in texts):  # a history is a list, in a CSV file one of JSON
        return None
    if request.id_column not in (None, note["series"]):
        what, remedy = "The files are a table of steps.", "Leave it out: ids are the names of the series."
        raise ConfigError(what, field="--id", value=request.id_column, remedy=remedy)
    return SeriesReader(request, info)
