"""The form of a table (`Reading`): settings for what a file does not show; its first bytes show the rest.

A file may be packed (`unpack`), lie in folders that name a column (`folder_columns`), or be a sheet (`read_sheet`).
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import lzma
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any, AnyStr
from urllib.parse import unquote

import pyarrow as pa

from trainer_lib.base.suggestions import counted, require_known
from trainer_lib.data.rows.row_sources import RowFile, packing_of
from trainer_lib.errors import ConfigError, MissingExtraError

FIELD = "prepare.options.read"
MAX_LINE_BYTES = 256 << 20  # of a text, characters
MONEY = "[$€£¥]|EUR|USD|GBP|CHF|JPY|CNY|INR|CAD|AUD|SEK|NOK|DKK|PLN|CZK|HUF|BRL|MXN|ZAR|TRY|KRW"
"""Pattern of a unit of money."""
_SEPARATORS = (";", "\t", "|")
_ENCODINGS = [f"cp{number}" for number in (1252, 1250, 1251, 1253, 1254, 1255, 1256, 932, 949)] + ["gb18030", "big5"]
_HINT = re.compile(r"sep=(.)\r?\n")  # Excel's first line
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class Reading:
    """The form of tables; None: found from the file."""

    separator: str | None = None  # one character between two values
    encoding: str | None = None  # as Python names it
    quote: str | None = None  # the character around a value with separators in it; empty: there is none
    escape: str | None = None  # the character before a quote that belongs to a value; None: such a quote is doubled
    columns: Sequence[str] = ()  # the names of the columns, where no line has them
    skip_lines: int = 0  # lines before that with the names
    sheet: str | None = None  # name of the sheet of a workbook; None: its first one with rows
    partitions: bool = False  # whether folders such as year=2024 are columns
    decimal: str | None = None  # the mark before the fraction of a number
    thousands: str | None = None  # the mark between its thousands; a space is any space
    na_values: Sequence[str] = ()  # texts that mean a missing value, in addition to the usual ones
    answer: str | None = None  # the one of `columns` that files of new rows may lack

    def __post_init__(self) -> None:
        """Raise ConfigError for a mark that is not one character, or an encoding that Python does not know."""
        for name in ("separator", "quote", "escape", "decimal", "thousands"):
            mark = getattr(self, name)
            if mark is not None and len(mark) != 1 and (name, mark) != ("quote", ""):
                raise ConfigError("This is one character.", field=f"{FIELD}.{name}", value=mark)
        if self.decimal is not None and self.decimal == self.thousands:
            what = "One mark cannot stand before the fraction and between thousands."
            raise ConfigError(what, field=f"{FIELD}.thousands", value=self.thousands)
        try:
            codecs.lookup(self.encoding or "utf-8")
        except LookupError as error:
            remedy = "Use a name such as utf-8, cp1252, latin-1, utf-16 or shift_jis."
            what = "Python knows no such encoding."
            raise ConfigError(what, field=f"{FIELD}.encoding", value=self.encoding, remedy=remedy) from error

    @cached_property
    def gaps(self) -> frozenset[str]:
        """The texts of `na_values`."""
        return frozenset(map(str, self.na_values))

    @cached_property
    def _number(self) -> re.Pattern[str] | None:
        if self.decimal is None and self.thousands is None:
            return None
        # Where one of the two marks is known, the other one of point and comma is the other mark.
        point = self.decimal or ("," if self.thousands == "." else ".")
        between = self.thousands or ("." if point == "," else ",")
        mark = r"\s" if between.isspace() else re.escape(between)
        whole = rf"\d{{1,3}}(?:{mark}\d{{3}})+|\d+"
        return re.compile(rf"([-+−]?\s*(?:{MONEY})?\s*)({whole})(?:{re.escape(point)}(\d+))?(\D?\D?|\s?(?:{MONEY}))")

    def with_point(self, text: str) -> str:
        """A number as this table writes it, with a point before its fraction; any other text as it is."""
        match = self._number.fullmatch(text) if self._number is not None else None
        if match is None:
            return text
        fraction = "" if match[3] is None else f".{match[3]}"
        return f"{match[1]}{re.sub(r'[^0-9]', '', match[2])}{fraction}{match[4]}"

    def open_csv(self, stream: Any, file: RowFile, usual: str, notes: list[str]) -> Iterator[tuple[int, list[str]]]:
        """The values of lines behind their numbers, that with the names first; `usual` is the usual separator.

        The stream is one of bytes, and buffered; `notes` gets a sentence where the form is unusual.
        """
        encoding, separator, skipped, is_spaced = self._find_form(stream.peek(), usual)
        unusual = [] if encoding == "utf-8-sig" else [f"the encoding {encoding}"]
        unusual += [] if separator == usual else [f"the separator {separator!r}"]
        if unusual:
            notes.append(f"{file.address} is read with {' and '.join(unusual)}.")
        text = io.TextIOWrapper(stream, encoding, newline="")
        reader = csv.reader(
            itertools.islice(read_lines(text), skipped, None),
            delimiter=separator,
            quotechar=self.quote or '"',
            quoting=csv.QUOTE_NONE if self.quote == "" else csv.QUOTE_MINIMAL,
            escapechar=self.escape,
            doublequote=self.escape is None,
            skipinitialspace=is_spaced,
            strict=True,
        )
        # A line may be empty, and a file of new rows may begin with the names.
        lines: Iterator[tuple[int, list[str]]] = ((reader.line_num, values) for values in reader if values)
        lines = map(_refuse_swallowed, lines) if separator == "\t" and self.quote is None else lines
        lines = ((line, values) for line, values in lines if line > 1 or values not in self._names_of_lines)
        yield from self._with_names((line + skipped, values) for line, values in lines)

    @cached_property
    def _names_of_lines(self) -> tuple[list[str], list[str]]:
        """The names of columns that no line has, with and without the answer."""
        return list(self.columns), [name for name in self.columns if name != self.answer]

    def _with_names(self, lines: Iterator[tuple[int, list[Any]]]) -> Iterator[tuple[int, list[Any]]]:
        """The lines behind the names of their columns, if no line has them."""
        if self.columns and (first := next(lines, None)) is not None:
            lines = itertools.chain([first], lines)
            whole, asked = self._names_of_lines
            yield 0, asked if len(first[1]) == len(asked) else whole
        yield from lines

    def encoding_of(self, head: bytes) -> str:
        """The encoding of a text, from its first bytes; ours counts where it can be: new rows may be UTF-8."""
        found = find_encoding(head)
        return found if self.encoding is None or (found, head.isascii()) == ("utf-8-sig", False) else self.encoding

    def _find_form(self, head: bytes, usual: str) -> tuple[str, str, int, bool]:
        """The encoding, the separator, the number of lines before the names, and whether blanks follow separators."""
        encoding = self.encoding_of(head)
        text = head.decode(encoding, "replace")
        hint = _HINT.match(text.removeprefix("\ufeff"))
        skipped = self.skip_lines + (hint is not None)
        lines = text.split("\n", skipped + 1)
        line = re.sub('"[^"]*"', "", lines[skipped] if len(lines) > skipped else "")
        separator = hint[1] if hint is not None else max((usual, *_SEPARATORS), key=line.count)
        if self.separator is not None and (self.columns or self.separator in line):
            separator = self.separator
        return encoding, separator, skipped, 0 < line.count(separator) == line.count(f"{separator} ")


def _refuse_swallowed(line: tuple[int, list[str]]) -> tuple[int, list[str]]:
    """The values of a line between tabs. Raises csv.Error for a quote that has made one value of two lines."""
    if any("\t" in value and "\n" in value for value in line[1]):
        raise csv.Error("a value in quotes has a tab and the end of a line")
    return line


def find_encoding(head: bytes) -> str:
    """The encoding of a text, from its first bytes: a Unicode one, else the likeliest by charset-normalizer."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if 4 * head.count(0) > len(head):
        return "utf-16-le" if head[1::2].count(0) > head[::2].count(0) else "utf-16-be"
    try:
        codecs.getincrementaldecoder("utf-8-sig")().decode(head)
        return "utf-8-sig"
    except UnicodeDecodeError:
        faults, text = head.decode("utf-8", "replace").count("\ufffd"), head.decode("utf-8", "ignore")
        if faults <= sum(map("\x7f".__lt__, text)):
            return "utf-8-sig"  # with a fault, which the error names
    from charset_normalizer import from_bytes

    best = from_bytes(head[: 1 << 16], cp_isolation=_ENCODINGS).best()
    # Several encodings may give one text.
    return "cp1252" if best is None or "cp1252" in best.could_be_from_charset else best.encoding


def looks_like_row(header: Sequence[str]) -> bool:
    """Whether the names of columns look like values: half of them or more are numbers."""
    numbers = sum(re.fullmatch(r"[-+]?\d+([.,]\d+)?", name.strip()) is not None for name in header)
    return 0 < len(header) <= 2 * numbers


def read_lines(stream: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of a stream. Raises EOFError for one that is too long: a packed file may be small and have no end."""
    while line := stream.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise EOFError(f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
        yield line


def unpack(path: str, stream: Any) -> Any:
    """The content of a file that may be packed, by its name's ending. Raises BadZipFile for several files in one."""
    packing = packing_of(path)
    if packing == ".gz":
        return gzip.GzipFile(fileobj=stream)
    if packing == ".bz2":
        return bz2.BZ2File(stream)
    if packing == ".xz":
        return lzma.LZMAFile(stream)
    if packing == ".zst":
        return pa.CompressedInputStream(stream, "zstd")
    if packing != ".zip":
        return stream
    archive = zipfile.ZipFile(stream)
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX")]
    if len(names) != 1:
        raise zipfile.BadZipFile(f"the archive has {counted(len(names), 'file')}, and one is read; unpack it")
    return archive.open(names[0])


def folder_columns(path: str) -> dict[str, str | None]:
    """The columns that the folders of a file name: {"year": "2024"} for year=2024/data.csv."""
    pairs = [part.partition("=") for part in path.split("/")[:-1] if "=" in part]
    return {name: None if value == _NO_PARTITION else unquote(value) for name, _, value in pairs}


def read_sheet(stream: Any, file: RowFile, reading: Reading, notes: list[str]) -> Iterator[tuple[int, list[Any]]]:
    """The values of rows of a workbook's sheet behind their numbers, that with the names first.

    Raises MissingExtraError without openpyxl, and ConfigError if there is no such sheet.
    """
    try:
        import openpyxl
    except ImportError as error:
        what = f"{file.address} is a workbook, which openpyxl reads."
        raise MissingExtraError(what, extra="excel") from error
    book = openpyxl.load_workbook(stream, read_only=True, data_only=True)
    names = list(book.sheetnames)
    name = reading.sheet or next((sheet for sheet in names if _has_rows(book[sheet])), names[0])
    require_known(name, names, "The workbook has no such sheet.", field=f"{FIELD}.sheet")
    if reading.sheet is None and len(names) > 1:
        others = ", ".join(other for other in names if other != name)
        first = "first sheet" if name == names[0] else "first sheet with rows"
        notes.append(f"Of {file.address} the {first} is read, '{name}'; it has {others} as well ({FIELD}.sheet).")
    if reading.columns:
        yield 0, list(reading.columns)
    width = len(reading.columns)
    for number, values in enumerate(book[name].iter_rows(min_row=reading.skip_lines + 1, values_only=True), 1):
        cells = list(values)
        while cells and cells[-1] is None and len(cells) > width:  # formatted cells without values
            cells.pop()
        if any(cell is not None for cell in cells):
            is_header, width = not width, width or len(cells)
            filled = cells + [None] * (width - len(cells))
            names = ["" if cell is None else str(cell) for cell in filled]
            yield number + reading.skip_lines, names if is_header else filled


def _has_rows(sheet: Any) -> bool:
    """Whether a sheet has more than a line."""
    lines = (cells for cells in sheet.iter_rows(min_row=1, values_only=True) if any(cell is not None for cell in cells))
    return len(list(itertools.islice(lines, 2))) > 1
