"""Files with rows of several formats, read in order and in bounded memory: `OpenFile`.

    name.csv, .tsv, .jsonl (also packed: .gz)    row after row; a line is read when it is needed
    name.parquet, .arrow                         a batch of rows at a time

A row is first what its file has for it, such as a line. Values cost far more: rows that are left out get none.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from trainer_lib.data.given_rows import refuse_row
from trainer_lib.data.row_sources import PACKED, RowFile, format_of
from trainer_lib.errors import DataError
from trainer_lib.json_text import parse_json
from trainer_lib.storage import Store

MAX_LINE_BYTES = 256 << 20
_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20
_LONG_NUMBER = re.compile(rb"\d{19}")
_UNREADABLE = (csv.Error, UnicodeDecodeError, pa.ArrowException, gzip.BadGzipFile, EOFError, zlib.error, OSError)

Raw = tuple[int | None, Any]
"""One row as its file has it: its line from 1 on (None: the file has no lines), and what its values are made of."""


class _Opened(NamedTuple):
    rows: Iterator[Raw]
    parse: Callable[[Any], Any]
    unusual: Sequence[str] = ()


class OpenFile:
    """One file while it is read.

    Attributes:
        file: the file.
        is_at_end: whether every row was read.
        parse: makes the values of a row from the second element of its `Raw`; raises ValueError.
        has_texts: whether all values are texts, whatever they stand for.
    """

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.is_at_end = False
        self._number = 0
        self._stream = Store.open(file.url, field="NEW_DATA").open_read(file.path)
        packed = file.path.lower().endswith(PACKED)
        reader = _READERS[kind := str(format_of(file.path))]
        self.has_texts = reader is _read_csv
        opened = reader(gzip.GzipFile(fileobj=self._stream) if packed else self._stream, file, kind)
        self._rows, self.parse, self._unusual = opened

    def describe(self) -> list[str]:
        """A sentence where the form of a CSV file is unusual; known once its first row was read."""
        return [f"{self.file.address} is read with {' and '.join(self._unusual)}."] if self._unusual else []

    @property
    def read_bytes(self) -> int:
        """How much of the file is read, in bytes."""
        # A reader that has come to the end may have closed it.
        return self.file.size if self._stream.closed else min(self.file.size, self._stream.tell())

    def skip(self, rows: int) -> int:
        """Leave out rows; return how many, fewer at the end.

        Raises:
            DataError: the file cannot be read.
        """
        before = self._number
        while self._number - before < rows and not self.is_at_end:
            self.rows(min(_BATCH_ROWS, rows - (self._number - before)))
        return self._number - before

    def rows(self, most: int) -> tuple[int, list[Raw]]:
        """The number of the next row, and the next rows, at most so many; fewer at the end.

        Raises:
            DataError: the file cannot be read.
        """
        first, found = self._number, list[Raw]()
        try:
            # Appended one by one: where reading fails, those before are known, and the error names the next one.
            for row in itertools.islice(self._rows, most):
                found.append(row)
        except _UNREADABLE as error:
            raise DataError(
                f"The file cannot be read at this place: {error}.",
                field="NEW_DATA",
                value=f"{self.file.address}, row {first + len(found)}",
                remedy="Repair it, or write it again.",
            ) from error
        self._number += len(found)
        self.is_at_end = len(found) < most
        return first, found

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def name_place(file: RowFile, number: int, line: int | None) -> str:
    """Where a row is: its file, its number in it from 0 on and, in a text, its line."""
    return f"{file.address}, row {number}" + ("" if line is None else f" (line {line})")


# -- formats ----------------------------------------------------------------------------------------------------------


def _read_csv(stream: Any, file: RowFile, kind: str) -> _Opened:
    header: list[str] = []
    notes: list[str] = []

    def rows() -> Iterator[Raw]:
        buffered = io.BufferedReader(stream, _BUFFER_BYTES)
        encoding, separator = _find_csv_form(buffered.peek(), kind, notes)
        text = io.TextIOWrapper(buffered, encoding, newline="")
        csv.field_size_limit(MAX_LINE_BYTES)
        reader = csv.reader(text, delimiter=separator, strict=True)
        header.extend(next(reader, []))
        if twice := {name for name in header if header.count(name) > 1}:
            raise refuse_row(f"{file.address}, line 1", min(twice), "the column is there twice")
        for values in reader:
            if values:  # a line may be empty
                yield reader.line_num, values

    def parse(values: list[str]) -> dict[str, str]:
        if len(values) != len(header):
            raise ValueError(f"it has {len(values)} values, and the header has {len(header)} columns")
        return dict(zip(header, values, strict=True))

    return _Opened(rows(), parse, notes)


def _find_csv_form(head: bytes, kind: str, notes: list[str]) -> tuple[str, str]:
    """The encoding and the separator; `notes` get what is not UTF-8, and neither a comma nor the tab of a .tsv."""
    encoding = "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        text = head.decode("utf-8", "ignore")
        if text.isascii():  # else it is UTF-8 with a fault, which the error names
            encoding = "cp1252"
            text = head.decode(encoding, "replace")
    line = re.sub('"[^"]*"', "", text.partition("\n")[0])
    usual = "\t" if kind == "tsv" else ","
    separator = max((usual, ";", "\t", "|"), key=line.count)
    notes += [] if encoding == "utf-8-sig" else [f"the encoding {encoding}"]
    notes += [] if separator == usual else [f"the separator {separator!r}"]
    return encoding, separator


def _read_json_lines(stream: Any, file: RowFile, kind: str) -> _Opened:
    def rows() -> Iterator[Raw]:
        number, buffered = 0, io.BufferedReader(stream, _BUFFER_BYTES)
        is_array = file.path.lower().removesuffix(PACKED).endswith(".json")
        if is_array and buffered.peek().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from ((None, row) for row in _parse_array(buffered, file))
        while line := buffered.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES:
                raise EOFError(f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.isspace():
                yield number, line

    return _Opened(rows(), _parse_json)


def _parse_array(stream: io.BufferedReader, file: RowFile) -> list[Any]:
    """The rows of a file that is one JSON array."""
    content = stream.read(MAX_LINE_BYTES)
    try:
        if len(content) == MAX_LINE_BYTES:
            raise ValueError(f"it has more than {MAX_LINE_BYTES >> 20} MiB")
        rows: list[Any] = _parse_json(content.removeprefix(b"\xef\xbb\xbf"))
        return rows
    except ValueError as error:
        what = f"the file begins as a JSON array, which cannot be read ({error}); give one object a line"
        raise refuse_row(file.address, None, what) from error


def _parse_json(line: Any) -> Any:
    if not isinstance(line, bytes):
        return line  # a row of an array
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
    except ValueError as error:
        raise ValueError(f"the line is not JSON ({error}); give one object a line") from error


def _read_parquet(stream: Any, file: RowFile, kind: str) -> _Opened:
    def rows() -> Iterator[Raw]:
        for batch in pq.ParquetFile(stream).iter_batches(_BATCH_ROWS):
            yield from _of_batch(batch)

    return _Opened(rows(), _parse_piece)


def _read_arrow(stream: Any, file: RowFile, kind: str) -> _Opened:
    def rows() -> Iterator[Raw]:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        if not is_file:
            for batch in pa.ipc.open_stream(stream):
                yield from _of_batch(batch)
            return
        opened = pa.ipc.open_file(stream)
        for number in range(opened.num_record_batches):
            yield from _of_batch(opened.get_batch(number))

    return _Opened(rows(), _parse_piece)


def _of_batch(batch: pa.RecordBatch) -> Iterator[Raw]:
    # In small pieces: rows of Python objects take more memory than their table.
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        piece = _Piece(batch.slice(start, _BATCH_ROWS))
        for number in range(piece.table.num_rows):
            yield None, (piece, number)


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


def _parse_piece(place: tuple[_Piece, int]) -> dict[str, Any]:
    piece, number = place
    return piece.row(number)


_READERS: dict[str, Callable[[Any, RowFile, str], _Opened]] = {
    "csv": _read_csv,
    "tsv": _read_csv,
    "json lines": _read_json_lines,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
