"""Reads new rows from files of several formats, in order and in bounded memory: `RowReader`.

    name.csv, .tsv, .jsonl (also packed: .gz)    row after row; a line is read when it is needed
    name.parquet, .arrow                         a batch of rows at a time

Each row knows its file, its number in that file from 0 on and, in a text, its line: errors name them.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer_lib.data.column import Column
from trainer_lib.data.columns import ROW_ID
from trainer_lib.data.given_rows import refuse_row
from trainer_lib.data.row_sources import PACKED, RowFile, format_of
from trainer_lib.data.text_values import parse_text
from trainer_lib.errors import DataError
from trainer_lib.storage import Store
from trainer_lib.suggestions import nearest

MAX_LINE_BYTES = 256 << 20
_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20
_UNREADABLE = (csv.Error, UnicodeDecodeError, pa.ArrowException, gzip.BadGzipFile, EOFError, zlib.error, OSError)


class Row(NamedTuple):
    """One row: its id, where it is from, and the values of the model's columns."""

    id: int | str
    place: str
    values: Mapping[str, Any]


class BadRow(NamedTuple):
    """One row that cannot be read: its id if that is known, where it is from, and why."""

    id: int | str | None
    place: str
    error: DataError


class _Found(NamedTuple):
    """One row as its file has it; `parse` gives its columns."""

    line: int | None
    parse: Callable[[], Any]


class RowReader:
    """The rows of several files as one sequence, read once from the first to the last.

    Args:
        files: the files, in order.
        columns: the model's columns: those that a row may have.
        id_column: column with the ids of the rows; None: `row_id`, or `id`, where the first row has it; else rows are
            numbered from 0 over all files.
        ignored: columns that are left out.

    Attributes:
        position: rows read so far.
    """

    def __init__(
        self,
        files: Sequence[RowFile],
        columns: Mapping[str, Column],
        *,
        id_column: str | None = None,
        ignored: Sequence[str] = (),
    ) -> None:
        self.position = 0
        self._columns = columns
        self._ignored = frozenset(ignored)
        self._id_column = id_column
        self._is_id_known = id_column is not None
        self._total_bytes = max(1, sum(file.size for file in files))
        self._done_bytes = 0
        self._waiting = list(reversed(files))
        self._current: _OpenFile | None = None

    def close(self) -> None:
        """Close the file that is read."""
        if self._current is not None:
            self._current.close()

    @property
    def id_column(self) -> str | None:
        """The column with the ids; None: rows are numbered. Known once a row was read."""
        return self._id_column

    def assume_id_column(self, name: str | None) -> None:
        """Take the ids from where an earlier run took them: its rows are skipped."""
        self._id_column, self._is_id_known = name, True

    @property
    def share(self) -> float:
        """The part of the bytes that is read, from 0 to 1."""
        now = self._current.read_bytes if self._current is not None else 0
        return min(1.0, (self._done_bytes + now) / self._total_bytes)

    def skip(self, rows: int) -> int:
        """Leave out rows, without converting them; return how many, fewer at the end.

        Raises:
            DataError: a file cannot be read.
        """
        first, wanted = self.position, self.position + rows
        while self.position < wanted and (opened := self._open()) is not None:
            self.position += opened.skip(wanted - self.position)
        return self.position - first

    def take(self, rows: int) -> list[Row]:
        """Read the next rows, fewer at the end.

        Raises:
            DataError: a row or a file cannot be read; the error names it.
        """
        taken = []
        for row in self.take_all(rows):
            if isinstance(row, BadRow):
                raise row.error
            taken.append(row)
        return taken

    def take_all(self, rows: int) -> Iterator[Row | BadRow]:
        """Read the next rows, fewer at the end, with those that cannot be read.

        Raises:
            DataError: a file cannot be read.
        """
        wanted = self.position + rows
        while self.position < wanted and (opened := self._open()) is not None:
            for place, found in opened.rows(wanted - self.position):
                row = self._read_any(place, found)
                self.position += 1
                yield row

    def _open(self) -> _OpenFile | None:
        """The file that the next row is in; None at the end."""
        while self._current is None or self._current.is_at_end():
            if self._current is not None:
                self._done_bytes += self._current.file.size
                self._current.close()
                self._current = None
            if not self._waiting:
                return None
            self._current = _OpenFile(self._waiting.pop())
        return self._current

    def _read_any(self, place: str, found: _Found) -> Row | BadRow:
        values: Any = None
        try:
            values = _parsed(place, found)
            return self._read(place, values)
        except DataError as error:
            return BadRow(self._id_of(values), place, error)

    def _id_of(self, values: Any) -> int | str | None:
        if self._id_column is None:
            return self.position if self._is_id_known else None
        found = values.get(self._id_column) if isinstance(values, Mapping) else None
        return found if isinstance(found, int | str) and not isinstance(found, bool) else None

    def _read(self, place: str, values: Any) -> Row:
        if not isinstance(values, Mapping):
            raise refuse_row(place, None, f"it is a {type(values).__name__}, not a mapping from columns to values")
        if not self._is_id_known:
            self.assume_id_column(next((name for name in (ROW_ID, "id") if name in values), None))
        row_id: Any = self.position
        name = self._id_column
        if name is not None:
            if name not in values:
                near = nearest(name, values)
                hint = f"; the nearest is '{near}'" if near else f"; its columns are {', '.join(values)}"
                raise refuse_row(place, name, f"the column of the row's id is missing{hint}")
            row_id = values[name]
            if isinstance(row_id, bool) or not isinstance(row_id, int | str):
                raise refuse_row(place, name, f"a row's id is an integer or a text, not {type(row_id).__name__}")
        # An id may be a feature as well, where the model was trained with it.
        left_out = self._ignored if name is None or name in self._columns else self._ignored | {name}
        mine = {key: value for key, value in values.items() if key not in left_out and key != ROW_ID}
        return Row(row_id, place, {key: self._convert(place, key, value) for key, value in mine.items()})

    def _convert(self, place: str, name: str, value: Any) -> Any:
        column = self._columns.get(name)
        if column is None:
            return value  # refused later, with the nearest name
        if isinstance(value, _Text):
            value = parse_text(place, name, str(value), column)
        if column.kind == "array" and isinstance(value, list):
            array = np.asarray(value)
            # Tables of files have no shapes, so they hold the elements in a row.
            if array.ndim == 1 and array.size == int(np.prod(column.shape)):
                return array.reshape(column.shape)
        return value


def read_rows(files: Sequence[RowFile]) -> Iterator[tuple[str, Any]]:
    """Every row of several files as its file has it, behind the place that it is at; the values of a CSV are texts.

    Raises:
        DataError: a row or a file cannot be read; the error names it.
    """
    for file in files:
        opened = _OpenFile(file)
        try:
            while not opened.is_at_end():
                for place, found in opened.rows(_BATCH_ROWS):
                    yield place, _parsed(place, found)
        finally:
            opened.close()


def _parsed(place: str, found: _Found) -> Any:
    try:
        return found.parse()
    except ValueError as error:
        raise refuse_row(place, None, str(error)) from error


class _OpenFile:
    """One file while it is read."""

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self._number = 0
        self._next: _Found | None = None
        self._stream = Store.open(file.url, field="NEW_DATA").open_read(file.path)
        packed = file.path.lower().endswith(PACKED)
        reader = _READERS[str(format_of(file.path))]
        self._rows = reader(gzip.GzipFile(fileobj=self._stream) if packed else self._stream, file)
        try:
            self._look()
        except BaseException:
            self.close()
            raise

    @property
    def read_bytes(self) -> int:
        """How much of the file is read, in bytes."""
        # A reader that has come to the end may have closed it.
        return self.file.size if self._stream.closed else min(self.file.size, self._stream.tell())

    def is_at_end(self) -> bool:
        """Whether every row was read."""
        return self._next is None

    def skip(self, rows: int) -> int:
        """Leave out rows; return how many, fewer at the end."""
        before = self._number
        while self._next is not None and self._number - before < rows:
            self._number += 1
            self._look()
        return self._number - before

    def rows(self, most: int) -> Iterator[tuple[str, _Found]]:
        """The next rows with their places, at most so many."""
        for _ in range(most):
            if (found := self._next) is None:
                return
            line = "" if found.line is None else f" (line {found.line})"
            place = f"{self.file.address}, row {self._number}{line}"
            self._number += 1
            self._look()
            yield place, found

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _look(self) -> None:
        with _readable(f"{self.file.address}, row {self._number}"):
            self._next = next(self._rows, None)


@contextmanager
def _readable(place: str) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise DataError(
            f"The file cannot be read at this place: {error}.",
            field="NEW_DATA",
            value=place,
            remedy="Repair it, or write it again.",
        ) from error


# -- formats ----------------------------------------------------------------------------------------------------------


class _Text(str):
    """A value of a file that has texts only."""

    __slots__ = ()


def _read_csv(stream: Any, file: RowFile) -> Iterator[_Found]:
    delimiter = "\t" if format_of(file.path) == "tsv" else ","
    text = io.TextIOWrapper(io.BufferedReader(stream, _BUFFER_BYTES), "utf-8-sig", newline="")
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header = next(reader, [])
    if twice := {name for name in header if header.count(name) > 1}:
        raise refuse_row(f"{file.address}, line 1", min(twice), "the column is there twice")

    def parse(values: list[str]) -> dict[str, Any]:
        if len(values) != len(header):
            raise ValueError(f"it has {len(values)} values, and the header has {len(header)} columns")
        return {name: _Text(value) for name, value in zip(header, values, strict=True)}

    for values in reader:
        if values:  # a line may be empty
            yield _Found(reader.line_num, lambda values=values: parse(values))  # type: ignore[misc]


def _read_json_lines(stream: Any, file: RowFile) -> Iterator[_Found]:
    number, buffered = 0, io.BufferedReader(stream, _BUFFER_BYTES)

    def parse(line: bytes) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise ValueError(f"the line is not JSON ({error})") from error

    while line := buffered.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES:
            raise EOFError(f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield _Found(number, lambda line=line: parse(line))  # type: ignore[misc]


def _read_parquet(stream: Any, file: RowFile) -> Iterator[_Found]:
    for batch in pq.ParquetFile(stream).iter_batches(_BATCH_ROWS):
        yield from _of_batch(batch)


def _read_arrow(stream: Any, file: RowFile) -> Iterator[_Found]:
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not is_file:
        for batch in pa.ipc.open_stream(stream):
            yield from _of_batch(batch)
        return
    opened = pa.ipc.open_file(stream)
    for number in range(opened.num_record_batches):
        yield from _of_batch(opened.get_batch(number))


def _of_batch(batch: pa.RecordBatch) -> Iterator[_Found]:
    # In small pieces: rows of Python objects take more memory than their table.
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        piece = _Piece(batch.slice(start, _BATCH_ROWS))
        for number in range(piece.table.num_rows):
            yield _Found(None, partial(piece.row, number))


class _Piece:
    """Rows of a table, made Python objects when the first of them is asked for: rows that are left out never are."""

    def __init__(self, table: pa.RecordBatch) -> None:
        self.table = table
        self._rows: list[dict[str, Any]] | None = None

    def row(self, number: int) -> dict[str, Any]:
        """One row, by its number."""
        if self._rows is None:
            self._rows = self.table.to_pylist()
        return self._rows[number]


_READERS: dict[str, Callable[[Any, RowFile], Iterator[_Found]]] = {
    "csv": _read_csv,
    "tsv": _read_csv,
    "json lines": _read_json_lines,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
