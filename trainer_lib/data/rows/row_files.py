"""Reads new rows from files of several formats as one sequence (`RowReader`), in order and in bounded memory.

    name.csv, .tsv, .jsonl, .json, .xlsx   row after row, when it is needed; all but the last may be packed
    name.parquet, .arrow                   a batch of rows at a time

Rows know their file, their number in that file from 0 on and, in a text, their line: errors name them. A row is first
what its file has for it, such as a line. Values cost far more: rows that are left out get none.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import itertools
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from statistics import mode
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import counted, nearest
from trainer_lib.data.rows.column import Column
from trainer_lib.data.rows.columns import ROW_ID
from trainer_lib.data.rows.given_rows import parse_text, refuse_row
from trainer_lib.data.rows.reading import FIELD as READ
from trainer_lib.data.rows.reading import (
    MAX_LINE_BYTES,
    Reading,
    folder_columns,
    looks_like_row,
    read_lines,
    read_sheet,
    unpack,
)
from trainer_lib.data.rows.row_sources import RowFile, format_of, packing_of
from trainer_lib.errors import DataError, first_line
from trainer_lib.storage import Store

_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20
_AT_ONCE = 64  # rows of a file that are in memory both as they are there and as values
_MOST_BAD = 1000  # rows that are passed over, to name them together
_CONTENTS = {
    b"PAR1": "Parquet (.parquet)",
    b"ARROW1": "Arrow (.arrow)",
    b"PK\x03\x04": "a workbook or a zip archive (.xlsx, .zip)",
    b"\xd0\xcf\x11\xe0": "an old workbook (.xls), which Excel saves as .xlsx",
    b"\x1f\x8b": "packed by gzip (.gz)",
}
"""First bytes of a file that is not a text -> what it is."""
_LONG_NUMBER = re.compile(rb"\d{19}")
_BOM = b"\xef\xbb\xbf"
_SQUAD = (b'"data"', b'"paragraphs"', b'"qas"')
_WRAPPERS = ("data", "rows", "records", "items", "results", "examples")  # keys of objects that hold all rows
_HEADER = re.compile(r"(words?|tokens?)\s(.*\s)?(tags?|labels?|ner|ner_tags?|pos)\s*", re.IGNORECASE)
_PACKING = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
_UNREADABLE = (csv.Error, UnicodeDecodeError, pa.ArrowException, *_PACKING, OSError)

Raw = tuple[int | None, Callable[[], Any]]
"""A row of a file: its line from 1 on (None: there are no lines), and what makes its values or raises ValueError."""


class OpenFile:
    """One file while it is read; `notes` gets a sentence where the form of a CSV file is unusual, and its first row."""

    def __init__(self, file: RowFile, notes: list[str], reading: Reading) -> None:
        self.file = file
        self.is_at_end = False  # every row was read
        self._number = 0
        self._stream = Store.open(file.url, field="NEW_DATA").open_read(file.path)
        kind = format_of(file.path)
        self.has_texts = kind in ("csv", "tsv")  # all values are texts, whatever they stand for
        self.is_json = kind == "json lines"  # rows are objects
        self._rows = self._open(kind, notes, reading)
        if (columns := folder_columns(file.path)) and reading.partitions:
            self._rows = ((line, partial(_add_columns, parse, columns)) for line, parse in self._rows)
        elif columns and not any(READ in note and "folders" in note for note in notes):
            example = next(f"{name}={value}" for name, value in columns.items())
            notes.append(f"The folders such as {example} name columns that are not read ({READ}.partitions=true).")

    def _open(self, kind: str | None, notes: list[str], reading: Reading) -> Iterator[Raw]:
        """The rows; an error in the packing is met with the first of them."""
        content = unpack(self.file.path, self._stream)
        if kind == "csv" or kind == "tsv":
            csv.field_size_limit(MAX_LINE_BYTES)
            text, usual = _buffer_text(content, self.file), "\t" if kind == "tsv" else ","
            yield from _name_rows(reading.open_csv(text, self.file, usual, notes), self.file, notes)
        elif kind == "sheet":
            yield from _name_rows(read_sheet(content, self.file, reading, notes), self.file, notes)
        else:
            is_json = kind == "json lines"
            yield from _read_json(content, self.file, notes, reading) if is_json else _read_table(content, kind)

    @property
    def read_bytes(self) -> int:
        """Bytes of the file that are read."""
        # A reader that has come to the end may have closed it.
        return self.file.size if self._stream.closed else min(self.file.size, self._stream.tell())

    def skip(self, rows: int) -> int:
        """Leave out rows; return how many, fewer at the end. Raises DataError: the file cannot be read."""
        before = self._number
        while self._number - before < rows and not self.is_at_end:
            self.rows(min(_BATCH_ROWS, rows - (self._number - before)))
        return self._number - before

    def rows(self, most: int) -> list[tuple[str, Callable[[], Any]]]:
        """The next rows behind their places, at most so many; fewer at the end. Raises DataError."""
        found, address = [], self.file.address
        try:
            for line, parse in itertools.islice(self._rows, most):
                place = f"{address}, row {self._number}"
                found.append((place if line is None else f"{place} (line {line})", parse))
                self._number += 1
        except _UNREADABLE as error:
            what, value = f"The file cannot be read at this place: {error}.", f"{address}, row {self._number}"
            raise DataError(what, field="NEW_DATA", value=value, remedy=_remedy(error)) from error
        self.is_at_end = len(found) < most
        return found

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _remedy(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"Name its encoding ({READ}.encoding=cp1252), or write it as UTF-8."
    if isinstance(error, csv.Error):
        quote = f'{READ}.quote ("" if quotes are parts of values)'
        return f"Repair it, or say how it is written: {quote}, {READ}.escape, {READ}.separator."
    return "Repair it, or write it again."


# -- formats ----------------------------------------------------------------------------------------------------------
def _buffer_text(stream: Any, file: RowFile) -> io.BufferedReader:
    """The stream of a text, buffered. Raises DataError where its first bytes are those of another format."""
    buffered = io.BufferedReader(stream, _BUFFER_BYTES)
    head = buffered.peek()
    if kind := next((kind for mark, kind in _CONTENTS.items() if head.startswith(mark)), None):
        remedy = "Let the ending of its name say what it is, or write it as text."
        raise DataError(f"{file.address}: the content is {kind}, not text.", field="NEW_DATA", remedy=remedy)
    return buffered


def _name_rows(lines: Iterator[tuple[int, list[Any]]], file: RowFile, notes: list[str]) -> Iterator[Raw]:
    """Rows by the names of their columns, which stand in the first line."""
    number, written = next(lines, (1, []))
    first, header = next(lines, (number, [])), [name.strip() for name in written]
    width = max((place for place, name in enumerate(header, 1) if name), default=0)
    # Excel writes columns that were once in use.
    if header.count("") > 1 and any(first[1][:width]) and not any(first[1][width:]):
        header = header[:width]
    if twice := {name for name in header if header.count(name) > 1}:
        hint = f"; the names of the columns may be below it ({READ}.skip_lines)"
        hint = f" (other names: {READ}.columns=[…], with {READ}.skip_lines=1)" if min(twice) else hint
        raise refuse_row(f"{file.address}, line {max(number, 1)}", min(twice), f"the column is there twice{hint}")
    if number and looks_like_row(header):
        notes.append(f"The first line of {file.address} names the columns, and looks like a row ({READ}.columns).")
    for line, values in itertools.chain([first] if first[1] else [], lines):
        yield line, partial(_name_cells, header, values, written)


def _add_columns(parse: Callable[[], Any], columns: Mapping[str, str | None]) -> Any:
    row = parse()
    return {**row, **columns} if isinstance(row, dict) else row


def _name_cells(header: list[str], values: list[Any], written: list[str]) -> dict[str, Any]:
    if len(header) > 1 and values == written:
        raise ValueError("it repeats the names of the columns")
    if len(values) > len(header) and not any(values[len(header) :]):
        values = values[: len(header)]
    if len(values) != len(header):
        hint = "" if len(written) == len(header) else f" (more names: {READ}.columns=[…], with {READ}.skip_lines=1)"
        has = counted(len(header), "name" if hint else "column")
        raise ValueError(f"it has {counted(len(values), 'value')}, and the header has {has}{hint}")
    return dict(zip(header, values, strict=True))


def _read_json(stream: Any, file: RowFile, notes: list[str], reading: Reading) -> Iterator[Raw]:
    """The rows of lines of JSON, or of a file that is one JSON array, or an object with an array under a usual key."""
    buffered = _buffer_text(stream, file)
    head = buffered.peek()
    encoding = reading.encoding_of(head)
    lines: Iterator[bytes] = read_lines(buffered)
    if encoding != "utf-8-sig":
        notes.append(f"{file.address} is read with the encoding {encoding}.")
        lines = map(str.encode, read_lines(io.TextIOWrapper(buffered, encoding, newline="\n")))
    may_be_whole = file.path.lower().removesuffix(packing_of(file.path)).endswith(".json")
    start = head.decode(encoding, "replace").lstrip("\ufeff \t\r\n") if may_be_whole else ""
    first = list(itertools.islice(lines, 2)) if start.startswith("{") else []
    lines = itertools.chain(first, lines)
    if start.startswith("[") or _is_whole(*first):
        rows = _parse_whole(lines, file)
        yield from ((None, partial(rows.__getitem__, number)) for number in range(len(rows)))
    for number, text in enumerate(lines, start=1):
        line = text.removeprefix(_BOM) if number == 1 else text
        if not line.isspace():
            yield number, partial(_parse_json, line)


def _is_whole(first: bytes = b"", second: bytes = b"") -> bool:
    """Whether an object continues on a second line, or is the only one and has all rows under a usual key."""
    if not first.rstrip().endswith(b"}"):
        return bool(first.strip())
    try:
        whole = {} if second.strip() else _parse_json(first.removeprefix(_BOM))
    except ValueError:
        return False
    return any(isinstance(whole.get(name), list) for name in _WRAPPERS)


def _parse_whole(lines: Iterator[bytes], file: RowFile) -> list[Any]:
    """The rows of an array, or the questions of articles as SQuAD's files nest them."""
    content = bytearray()
    try:
        for line in lines:
            content += line
            if len(content) >= MAX_LINE_BYTES:
                raise ValueError(f"it has more than {MAX_LINE_BYTES >> 20} MiB")
        whole = _parse_json(bytes(content.removeprefix(_BOM)))
        if isinstance(whole, list):
            return whole
        lists = [whole[name] for name in _WRAPPERS if isinstance(whole.get(name), list)]
        if len(lists) != 1:
            keys = ", ".join(map(repr, itertools.islice(whole, 10)))
            raise ValueError(f"its keys are {keys}; of an object, 'data' or 'rows' has all rows")
        if not all(name in content for name in _SQUAD):
            return list(lists[0])
        names = ("id", "question", "answers", "is_impossible")
        return [
            {"title": article.get("title"), "context": part["context"], **{name: asked.get(name) for name in names}}
            for article in lists[0]
            for part in article["paragraphs"]
            for asked in part["qas"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        kind = "one of SQuAD" if all(name in content for name in _SQUAD) else "one JSON object"
        kind = "a JSON array" if content.lstrip().startswith(b"[") else kind
        what = f"the file begins as {kind}, which cannot be read ({error}); give one object a line"
        raise refuse_row(file.address, None, what) from error


def _parse_json(line: bytes) -> Any:
    try:
        if not _LONG_NUMBER.search(line):  # orjson rounds them
            return orjson.loads(line)
    except ValueError:  # it refuses NaN and the infinities, which Python writes and reads
        pass
    try:
        value = parse_json(line)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise ValueError("a text has half of a surrogate pair, such as \\ud83d, without the other") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 ({error}); name its encoding ({READ}.encoding=cp1252)") from error
    except ValueError as error:
        raise ValueError(f"the line is not JSON ({error}); give one object a line") from error


def _read_table(stream: Any, kind: str | None) -> Iterator[Raw]:
    for batch in _read_batches(stream, kind):
        # In small pieces: rows of Python objects take more memory than their table. They are made when the first of
        # a piece is asked for, so rows that are left out never are.
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            piece = batch.slice(start, _BATCH_ROWS)
            rows = functools.cache(piece.to_pylist)
            for number in range(piece.num_rows):
                yield None, partial(_pick, rows, number)


def _pick(rows: Callable[[], list[Any]], number: int) -> Any:
    return rows()[number]


def _read_batches(stream: Any, kind: str | None) -> Iterator[pa.RecordBatch]:
    if kind == "parquet":
        yield from pq.ParquetFile(stream).iter_batches(_BATCH_ROWS)
        return
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not is_file:
        yield from pa.ipc.open_stream(stream)
        return
    opened = pa.ipc.open_file(stream)
    yield from map(opened.get_batch, range(opened.num_record_batches))


class Row(NamedTuple):
    """One row: its id, the values of the model's columns, and where it is from."""

    id: int | str
    values: Mapping[str, Any]
    place: str


class BadRow(NamedTuple):
    """One row that cannot be read: its id if that is known, where it is from, and why."""

    id: int | str | None
    place: str
    error: DataError


class RowReader:
    """The rows of several files as one sequence, read once from the first to the last."""

    def __init__(
        self,
        files: Sequence[RowFile],
        columns: Mapping[str, Column],  # of the model: those that a row may have
        *,
        # With the ids of the rows; None: `row_id`, or `id`, where the first row has it; else rows are numbered from 0
        # over all files.
        id_column: str | None = None,
        ignored: Sequence[str] = (),  # columns that are left out
        usual_ids: Sequence[str] = (),  # columns that are looked for before `row_id` and `id`
        may_lack: Sequence[str] = (),  # columns that objects of JSON may leave out, which means null
        # Makes the columns of a row of what its file has, given the place for errors; None: they are the file's.
        read: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None,
        reading: Reading | None = None,
    ) -> None:
        self.position = 0  # rows read so far
        self._reading = reading or Reading()
        self.notes: list[str] = []  # sentences about the files
        self._usual_ids, self._may_lack = usual_ids, may_lack
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
        """Leave out rows, without converting them; return how many, fewer at the end. Raises DataError."""
        first, wanted = self.position, self.position + rows
        while self.position < wanted and (opened := self._open()) is not None:
            self.position += opened.skip(wanted - self.position)
        return self.position - first

    def take_all(self, rows: int) -> Iterator[Row | BadRow]:
        """Read the next rows, fewer at the end, with those that cannot be read. Raises DataError."""
        wanted = self.position + rows
        while self.position < wanted and (opened := self._open()) is not None:
            for place, parse in opened.rows(min(_AT_ONCE, wanted - self.position)):
                values: Any = None
                try:
                    values = _parse(place, parse)
                    row: Row | BadRow = self._read(opened, place, values)
                except DataError as error:
                    row = BadRow(self._id_of(values), place, error)
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
            self._current = OpenFile(self._waiting.pop(), self.notes, self._reading)
        return self._current

    def _id_of(self, values: Any) -> int | str | None:
        if self._id_column is None:
            return self.position if self._is_id_known else None
        return read_id(values.get(self._id_column)) if isinstance(values, Mapping) else None

    def _read(self, opened: OpenFile, place: str, values: Any) -> Row:
        if not isinstance(values, dict):
            what = f"it is a {type(values).__name__}, not a mapping from columns to values"
            raise refuse_row(place, None, what)
        if not self._is_id_known:
            self.assume_id_column(next((name for name in (*self._usual_ids, ROW_ID, "id") if name in values), None))
        row_id = self.position if self._id_column is None else self._find_id(place, values)
        # A copy: the id of a bad row is looked for in its values.
        row = dict.fromkeys(self._may_lack) if opened.is_json else {}
        row |= {name: value for name, value in values.items() if name not in self._left_out}
        row = self._read_columns(row, place)
        for name, text in row.items() if opened.has_texts else ():
            # Another column is refused later, with the nearest name.
            if isinstance(text, str) and (column := self._columns.get(name)) is not None:
                row[name] = parse_text(place, name, text, column)
        for name in self._arrays:
            if isinstance(value := row.get(name), list):
                row[name] = _in_shape(value, self._columns[name].shape)
        return Row(row_id, row, place)

    def _find_id(self, place: str, values: Mapping[str, Any]) -> int | str:
        name = str(self._id_column)
        found: Any = values.get(name)
        if (row_id := read_id(found)) is not None:
            return row_id
        if name in values:
            raise refuse_row(place, name, f"a row's id is an integer or a text, not {type(found).__name__}")
        near = nearest(name, values)
        hint = f"; the nearest is '{near}'" if near else f"; its columns are {', '.join(values)}"
        raise refuse_row(place, name, f"the column of the row's id is missing{hint}")


def _parse(place: str, parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except ValueError as error:
        raise refuse_row(place, None, str(error)) from error


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


def read_rows(
    files: Sequence[RowFile],
    notes: list[str] | None = None,  # gets sentences about CSV files of an unusual form
    reading: Reading | None = None,
    # Gets the errors of rows that cannot be read, which are passed over; None: the first one is raised.
    bad: list[DataError] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Every row of several files as its file has it, behind the place that it is at; the values of a CSV are texts.

    Raises DataError for a row or a file that cannot be read; the error names it.
    """
    for file in files:
        opened = OpenFile(file, [] if notes is None else notes, reading or Reading())
        try:
            while not opened.is_at_end:
                for place, parse in opened.rows(_AT_ONCE):
                    try:
                        row = _parse(place, parse)
                    except DataError as error:
                        if bad is None or len(bad) >= _MOST_BAD:
                            raise
                        bad.append(error)
                    else:
                        yield place, row
        finally:
            opened.close()


# -- texts -------------------------------------------------------------------------------------------------------------
def read_utf8(file: RowFile) -> str:
    """The text of a file. Raises DataError for one that is not UTF-8."""
    content = Store.open(file.url, field="NEW_DATA").read_bytes(file.path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"{file.address}: the file is not UTF-8 ({first_line(error)})."
        raise DataError(what, field="NEW_DATA", remedy="Write it as UTF-8.") from error


def read_sentences(file: RowFile, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sentences of a file in CoNLL's columns behind their places, as two lists: words and tags.

    A line has a word and, in its last column, the tag; an empty line ends a sentence, and comments (# sent_id = 1) may
    precede one. `names` are those of the columns. Raises DataError if the file is not UTF-8, a line has no tag, or the
    first column has numbers in place of words.
    """
    lines = list(map(_split_line, io.StringIO(f"{read_utf8(file)}\n\n", newline=None)))
    width = mode(map(len, filter(None, lines)) if any(lines) else [0])
    words: list[str] = []
    tags: list[str] = []
    number, are_numbered = 0, width > 2
    for line, parts in enumerate(lines, 1):
        if not words and (_is_comment(parts, width) or (not number and _HEADER.fullmatch(" ".join(parts)))):
            continue
        if not parts or parts[0] == "-DOCSTART-":
            if words:
                are_numbered = are_numbered and words == [str(place) for place in range(1, len(words) + 1)]
                place = f"{file.address}, sentence {number} (line {line - len(words)})"
                yield place, dict(zip(names, (words, tags), strict=True))
                number, words, tags = number + 1, [], []
            continue
        if len(parts) < 2 or not parts[-1].strip():
            raise DataError(f"{file.address}, line {line}: the word '{parts[0][:40]}' has no tag.", field="rows")
        words.append(parts[0])
        tags.append(parts[-1])
    if number and are_numbered:
        what = f"{file.address}: the first column counts the words of a sentence (1, 2, …), and has to be the word."
        raise DataError(what, field="rows", remedy="Remove the column of numbers.")


def _split_line(line: str) -> list[str]:
    """The columns of a line: between tabs, or else between spaces; other blanks are parts of words."""
    if not line.strip():
        return []
    return line.strip("\n").split("\t") if "\t" in line else [part for part in line.strip("\n").split(" ") if part]


def _is_comment(parts: Sequence[str], width: int) -> bool:
    """Return whether a line before a sentence is a comment; # may also be a word."""
    first = parts[0] if parts else ""
    return first.startswith("# ") or (first == "#" and (len(parts) != width or "=" in parts[1:-1]))
