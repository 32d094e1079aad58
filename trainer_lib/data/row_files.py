"""Reads new rows from files of several formats (`row_formats`) as one sequence: `RowReader`.

Each row knows its file, its number in that file from 0 on and, in a text, its line: errors name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from trainer_lib.data.column import Column
from trainer_lib.data.columns import ROW_ID
from trainer_lib.data.given_rows import refuse_row
from trainer_lib.data.row_formats import OpenFile, Raw, name_place
from trainer_lib.data.row_sources import RowFile
from trainer_lib.data.text_values import parse_text
from trainer_lib.errors import DataError
from trainer_lib.suggestions import nearest

_AT_ONCE = 64  # rows of a file that are in memory both as they are there and as values


class Row(NamedTuple):
    """One row: its id, the values of the model's columns, and where it is from."""

    id: int | str
    values: Mapping[str, Any]
    file: RowFile
    number: int
    line: int | None

    @property
    def place(self) -> str:
        """Where it is from, for errors."""
        return name_place(self.file, self.number, self.line)


class BadRow(NamedTuple):
    """One row that cannot be read: its id if that is known, where it is from, and why."""

    id: int | str | None
    place: str
    error: DataError


class RowReader:
    """The rows of several files as one sequence, read once from the first to the last.

    Args:
        files: the files, in order.
        columns: the model's columns: those that a row may have.
        id_column: column with the ids of the rows; None: `row_id`, or `id`, where the first row has it; else rows are
            numbered from 0 over all files.
        ignored: columns that are left out.
        constants: columns that every row gets, with their values; no file has them.
        usual_ids: columns that are looked for before `row_id` and `id`.
        read: makes the columns of a row of what its file has, given the place for errors; None: they are the file's.

    Attributes:
        position: rows read so far.
        notes: sentences about the files.
    """

    def __init__(
        self,
        files: Sequence[RowFile],
        columns: Mapping[str, Column],
        *,
        id_column: str | None = None,
        ignored: Sequence[str] = (),
        constants: Mapping[str, Any] | None = None,
        usual_ids: Sequence[str] = (),
        read: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None,
    ) -> None:
        self.position = 0
        self.notes: list[str] = []
        self._constants = dict(constants or {})
        self._usual_ids = usual_ids
        self._read_columns = read or (lambda values, place: dict(values))
        self._columns = columns
        self._arrays = [name for name, column in columns.items() if column.kind == "array"]
        self._ignored = frozenset(ignored)
        self._id_column: str | None = None
        self._is_id_known = False
        self._left_out = self._ignored | {ROW_ID}
        if id_column is not None:
            self.assume_id_column(id_column)
        self._total_bytes = max(1, sum(file.size for file in files))
        self._done_bytes = 0
        self._waiting = list(reversed(files))
        self._current: OpenFile | None = None

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
        # An id may be a feature as well, where the model was trained with it.
        self._left_out = self._ignored | {ROW_ID} | ({name} - self._columns.keys() if name is not None else set())

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
            first, found = opened.rows(min(_AT_ONCE, wanted - self.position))
            self.notes += opened.describe() if first == 0 else []
            for number, raw in enumerate(found, start=first):
                row = self._read_any(opened, number, raw)
                self.position += 1
                yield row

    def _open(self) -> OpenFile | None:
        """The file that the next row may be in; None at the end."""
        while self._current is None or self._current.is_at_end:
            if self._current is not None:
                self._done_bytes += self._current.file.size
                self._current.close()
                self._current = None
            if not self._waiting:
                return None
            self._current = OpenFile(self._waiting.pop())
        return self._current

    def _read_any(self, opened: OpenFile, number: int, raw: Raw) -> Row | BadRow:
        line, content = raw
        values: Any = None
        try:
            try:
                values = opened.parse(content)
            except ValueError as error:
                raise refuse_row(name_place(opened.file, number, line), None, str(error)) from error
            return self._read(opened, number, line, values)
        except DataError as error:
            return BadRow(self._id_of(values), name_place(opened.file, number, line), error)

    def _id_of(self, values: Any) -> int | str | None:
        if self._id_column is None:
            return self.position if self._is_id_known else None
        found = values.get(self._id_column) if isinstance(values, Mapping) else None
        return read_id(found)

    def _read(self, opened: OpenFile, number: int, line: int | None, values: Any) -> Row:
        place = name_place(opened.file, number, line)
        if not isinstance(values, dict):
            what = f"it is a {type(values).__name__}, not a mapping from columns to values"
            raise refuse_row(place, None, what)
        if not self._is_id_known:
            self.assume_id_column(next((name for name in (*self._usual_ids, ROW_ID, "id") if name in values), None))
        row_id = self.position if self._id_column is None else self._find_id(opened, number, line, values)
        # A copy: the id of a bad row is looked for in its values.
        row = {name: value for name, value in values.items() if name not in self._left_out}
        for name, value in self._constants.items():
            if name in row:
                raise refuse_row(place, name, "the row has a value of its own")
            row[name] = value
        row = self._read_columns(row, place)
        if opened.has_texts:
            self._parse_texts(place, row)
        for name in self._arrays:
            if isinstance(value := row.get(name), list):
                row[name] = _in_shape(value, self._columns[name].shape)
        return Row(row_id, row, opened.file, number, line)

    def _find_id(self, opened: OpenFile, number: int, line: int | None, values: Mapping[str, Any]) -> int | str:
        name = str(self._id_column)
        found: Any = values.get(name)
        if (row_id := read_id(found)) is not None:
            return row_id
        place = name_place(opened.file, number, line)
        if name in values:
            raise refuse_row(place, name, f"a row's id is an integer or a text, not {type(found).__name__}")
        near = nearest(name, values)
        hint = f"; the nearest is '{near}'" if near else f"; its columns are {', '.join(values)}"
        raise refuse_row(place, name, f"the column of the row's id is missing{hint}")

    def _parse_texts(self, place: str, values: dict[str, Any]) -> None:
        for name, text in values.items():
            # Another column is refused later, with the nearest name.
            if isinstance(text, str) and (column := self._columns.get(name)) is not None:
                values[name] = parse_text(place, name, text, column)


def read_id(value: Any) -> int | str | None:
    """An id as its file has it: a text, or an integer, which is a text where 64 bits do not hold it; None: neither."""
    if isinstance(value, Decimal) and value == value.to_integral_value():
        value = int(value)
    if type(value) is int:
        return value if -(1 << 63) <= value < 1 << 63 else str(value)
    return value if isinstance(value, str) else None


def _in_shape(value: list[Any], shape: tuple[int, ...]) -> Any:
    """The elements in a column's shape, if they lie in a row: tables of files have no shapes."""
    try:
        array = np.asarray(value)
    except ValueError:  # of unequal lengths: refused with its column
        return value
    return array.reshape(shape) if array.ndim == 1 and array.size == int(np.prod(shape)) else value


def read_rows(files: Sequence[RowFile], notes: list[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Every row of several files as its file has it, behind the place that it is at; the values of a CSV are texts.

    Args:
        notes: gets a sentence about each CSV file of an unusual form.

    Raises:
        DataError: a row or a file cannot be read; the error names it.
    """
    for file in files:
        opened = OpenFile(file)
        try:
            while not opened.is_at_end:
                first, rows = opened.rows(_AT_ONCE)
                for number, (line, raw) in enumerate(rows, start=first):
                    place = name_place(file, number, line)
                    try:
                        yield place, opened.parse(raw)
                    except ValueError as error:
                        raise refuse_row(place, None, str(error)) from error
            if notes is not None:
                notes += opened.describe()
        finally:
            opened.close()
