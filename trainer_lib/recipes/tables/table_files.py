"""Tables of CSV, JSON lines, Parquet and Arrow files, read as a whole: every problem names the file and the row.

Where columns hold lists, sentences in CoNLL's columns are rows as well. New rows for a model that was trained on a
table are read as `prepare` read the table (`TableForm`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import islice, repeat
from operator import is_
from typing import Any, Self

import numpy as np

from trainer_lib.base.suggestions import counted, nearest, suggestion
from trainer_lib.data.rows.given_rows import OF_NEW_ROWS, refuse_row
from trainer_lib.data.rows.reading import FIELD as READ
from trainer_lib.data.rows.reading import Reading
from trainer_lib.data.rows.row_files import read_rows, read_sentences
from trainer_lib.data.rows.row_sources import TABLES, find_row_files, format_of
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.recipes.tables import cells
from trainer_lib.recipes.tables.spooled_values import Spool, SpooledValues

SOURCES = "prepare.sources"
_DECLARED_ONLY = ("package:", "stdlib:")
SENTENCES = {".conll": "sentences", ".iob": "sentences", ".iob2": "sentences", ".bio": "sentences"}
"""Ending of a file's name -> "sentences"."""
JOINED = "(labels)"
"""The column that several columns of labels are joined to."""
SAME = "all rows have the same columns, with null, or an empty cell, where there is no value"
_AT_ONCE = 10_000  # values that become numbers together
TRUTH = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
"""Text of a truth value, in lower case -> its number."""
_FEW = 50  # a text column with more different values than this, and than half of its rows, is not a category


# -- files ------------------------------------------------------------------------------------------------------------
@contextmanager
def naming_sources(field: str) -> Iterator[None]:
    """Give errors about a file or a row the setting that names the files."""
    try:
        yield
    except TrainflowError as error:
        if error.field in ("NEW_DATA", "rows"):
            error.field, error.remedy = field, remedy_of(error)
        raise


def remedy_of(error: TrainflowError) -> str:
    """The remedy of an error about a row of a file."""
    return "Correct the file." if error.remedy in (None, "", OF_NEW_ROWS) else str(error.remedy)


def renamed_row(values: Any, rename: Mapping[str, str], place: str) -> dict[str, Any]:
    """The columns of a row by their names here. Raises DataError for what is not a mapping."""
    if not isinstance(values, Mapping):
        what = f"{place}: it is a {type(values).__name__}, not a mapping from columns to values."
        raise DataError(what, field="rows")
    return {rename.get(name, name): value for name, value in values.items()}


def unnest(row: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """A row with parts of its objects as columns: `translation.en` of ``{"translation": {"en": …}}``."""
    ends = {name: name.partition(".")[::2] for name in names if "." in name and name not in row}
    objects = {name: row[outer] for name, (outer, _) in ends.items() if isinstance(row.get(outer), Mapping)}
    found = {name: parts[ends[name][1]] for name, parts in objects.items() if ends[name][1] in parts}
    taken = {ends[name][0] for name in found}
    return {**{name: value for name, value in row.items() if name not in taken}, **found} if found else row


def join_marks(row: Mapping[str, Any], columns: Sequence[str], place: str) -> Mapping[str, Any]:
    """A row whose columns of 0 and 1 are one, `JOINED`: the list of those that have 1.

    Raises:
        ConfigError: there is no such column. DataError: another value stands there.
    """
    if not columns:
        return row
    names = []
    for name in columns:
        if name not in row:
            what, remedy = f"{place}: the row has no such column.", suggestion(str(name), row)
            raise ConfigError(what, field="prepare.options.label", value=name, remedy=remedy)
        if (mark := TRUTH.get(str(row[name]).strip().lower())) is None:
            remedy = "Write 0 or 1, or remove the row."
            raise DataError(f"{place}, column '{name}': '{row[name]}' is not 0 or 1.", field="rows", remedy=remedy)
        names += [name] if mark else []
    return {**{name: value for name, value in row.items() if name not in columns}, JOINED: names}


# -- tables -----------------------------------------------------------------------------------------------------------
Values = list[Any] | SpooledValues
Reader = Callable[[Any, str], Any]
"""Makes the value of a column, of a value in a file and the place for errors."""


class Table:
    """The rows of some files, by column.

    Attributes:
        places: files and numbers of the rows, and in a text their lines.
        columns: column -> its values: numbers, texts, lists of texts, or None where there is none.
        notes: sentences about the files.
        unread: column that is left out because it has lists, objects or bytes -> the error about the first such value.
        gaps: text that stands for no value -> how many values it was.
        marks: column of numbers, once looked for -> a comma where their fractions have one, and their unit.
    """

    def __init__(self, places: Values, columns: dict[str, Values]) -> None:
        self.places, self.columns = places, columns
        self.notes: list[str] = []
        self.unread: dict[str, str] = {}
        self.gaps: Counter[str] = Counter()
        self.marks: dict[str, str] = {}
        self._marked: set[str] = set()  # columns with texts that Python reads as no number
        self._with_words: set[str] = set()  # columns of numbers with texts such as NA

    def __len__(self) -> int:
        return len(self.places)

    def gap_notes(self) -> list[str]:
        """A sentence about the texts that were read as no value; none without any."""
        told = ", ".join(f"'{text}' ({count:,})" for text, count in self.gaps.most_common(5) if count)
        return [f"Read as no value: {told}."] if told else []

    def append(self, other: Self, *, field: str) -> None:
        """Put the rows of another table behind these; `field` names its files. Raises DataError for other columns."""
        self.unread |= other.unread
        self.gaps += other.gaps
        self.notes += other.notes
        for name in self.unread:
            self.columns.pop(name, None)
            other.columns.pop(name, None)
        if not self.places:
            self.places, self.columns = other.places, other.columns
            return
        if other.columns.keys() != self.columns.keys():
            odd = sorted(other.columns.keys() ^ self.columns.keys())
            what = f"The files of the data differ in the column '{odd[0]}'."
            raise DataError(what, field=field, remedy="Give all files the same columns.")
        self.places.extend(other.places)
        for column, values in other.columns.items():
            self.columns[column].extend(values)

    def require(self, name: Any, *, field: str) -> str:
        """The name of a column. Raises DataError where there is none; the remedy names the nearest."""
        if isinstance(name, list | dict):
            what = "This option takes the name of one column."
            raise ConfigError(what, field=field, value=name, remedy="Join the columns in the file.")
        if name in self.columns:
            return str(name)
        # A name in brackets is not of the files.
        remedy = suggestion(str(name), [known for known in (*self.columns, *self.unread) if known[:1] != "("])
        if name in self.unread:
            several = " Lists of classes need target: several." if field.endswith(".label") else ""
            remedy = f"Name another column or a part of its objects ({name}.KEY), or write numbers or texts.{several}"
        if self.unread and len(self) == 1:
            remedy = "Give one object a line (pandas: to_json(orient='records', lines=True)): the file has only one."
        what = self.unread.get(name, "The data has no such column.")
        raise DataError(what, field=field, value=name, remedy=remedy)

    def find_numbers(self, name: str) -> np.ndarray | None:
        """Return the `numbers` of a column that holds numbers; None for another.

        Raises:
            DataError: most of its values are numbers and some are not, or some can be read in two ways; the error names
                the first of those.
        """
        numbers, values = self.numbers(name), self.count(name)
        others = values - np.count_nonzero(np.isfinite(numbers))
        if not values or not others or 2 * others > values:
            if not others or (name in self._marked and all(map(_may_be_number, self.columns[name]))):
                self._find_marks(name)
            return numbers if values and not others else None
        texts = ((row, value) for row, value in enumerate(self.columns[name]) if value is not None)
        wrong = ((row, value) for row, value in texts if cells.number_of(value) is None)
        first = next((row for row, value in wrong if value not in cells.USUAL), None)
        if first is None:
            self._find_marks(name)
            self._with_words.add(name)
            self.notes.append(f"The column '{name}' is read as numbers, and {others:,} texts such as 'NA' as no value.")
            return numbers
        raise DataError(
            f"{self.places[first]}, column '{name}': '{str(self.columns[name][first])[:40]}' is not a number, and "
            f"{values - others} of the {values} values of this column are.",
            field=SOURCES,
            remedy=f"Correct the value, leave it empty, say what stands for none or between thousands "
            f"({READ}.na_values=[…], {READ}.thousands=…), or declare texts: prepare.options.categorical=[{name}].",
        )

    def _find_marks(self, name: str) -> None:
        """Note the marks of a column of numbers. Raises DataError for numbers of two meanings, or in several units."""
        if name not in self._marked and not self._has_commas:
            return
        values = self.columns[name]
        rows: dict[tuple[str, str], int] = {}
        for row, value in enumerate(values):
            if value is not None and value not in cells.USUAL:
                rows.setdefault(cells.number_form(value), row)
        marks, units = {mark for mark, _ in rows}, {unit for _, unit in rows}
        comma = "," if "," in marks or (self._has_commas and "." not in marks) else ""
        for (mark, _), row in rows.items():
            if mark == "?," or (mark == "?." and comma):
                what = f"{self.places[row]}, column '{name}': '{values[row]}' can be read in two ways."
                remedy = f'Say what the marks are: {READ}.decimal="," or {READ}.thousands=",".'
                raise DataError(what, field=SOURCES, remedy=remedy)
        others = units - {""}
        if len(others) > 1 or ("%" in others and len(units) > 1):
            one, other, *_ = (str(values[row]) for row in {unit: row for (_, unit), row in rows.items()}.values())
            what = f"The column '{name}' has numbers in several units, such as '{one}' and '{other}'."
            raise DataError(what, field=SOURCES, remedy="Write them in one unit.")
        self.marks[name] = comma + "".join(others)

    def kind_of_numbers(self, name: str) -> str:
        """The kind of a column of numbers, as `note_form` names it."""
        is_bool = all(value is None or isinstance(value, bool) for value in self.columns[name])
        return "bool" if is_bool else f"number{self.marks.get(name, '')}"

    @cached_property
    def _has_commas(self) -> bool:
        """True if the first values of a column are numbers with a decimal comma."""
        heads = (list(islice(values, _AT_ONCE)) for values in self.columns.values())
        return any(
            any(cells.number_form(value)[0] == "," for value in head) and all(map(_may_be_number, head))
            for head in heads
        )

    def count(self, name: str) -> int:
        """Count the values that a column has."""
        return len(self) - sum(map(is_, self.columns[name], repeat(None)))

    def numbers(self, name: str) -> np.ndarray:
        """The values of a column of numbers, float64 ``[rows]``; NaN where there is none."""
        numbers, values = np.empty(len(self)), iter(self.columns[name])
        for start in range(0, len(self), _AT_ONCE):
            some = list(islice(values, _AT_ONCE))
            try:
                numbers[start : start + len(some)] = list(map(cells.as_float, some))
            except (TypeError, ValueError, OverflowError):
                numbers[start : start + len(some)] = list(map(cells.as_number, some))
                self._marked.add(name)
        numbers[~np.isfinite(numbers)] = math.nan
        return numbers

    def each_text(self, name: str) -> Iterator[str]:
        """The values of a column as texts; empty where there is none. A whole number has no point."""
        return map(cells.as_text, self.columns[name])

    def texts(self, name: str) -> list[str]:
        """The texts of `each_text` as a list ``[rows]``."""
        return list(self.each_text(name))

    def codes(self, name: str) -> tuple[np.ndarray, list[str]]:
        """The texts of a column, sorted, and the numbers of those of the rows, of the smallest integers ``[rows]``."""
        number: dict[str, int] = {}
        found = (number.setdefault(text, len(number)) for text in self.each_text(name))
        codes = np.fromiter(found, np.int32, len(self))
        names = sorted(number)
        order = np.empty(len(names), np.min_scalar_type(len(names)))
        order[[number[text] for text in names]] = np.arange(len(names))
        return order[codes], names

    def refuse_gaps(self, name: str, remedy: str, *, but: Container[int] = ()) -> None:
        """Raise DataError when a value is missing in a column, in other rows than those of `but`."""
        words = cells.USUAL if name in self._with_words else ()
        values = enumerate(self.columns[name])
        gaps = (row for row, value in values if (value is None or value != value or value in words) and row not in but)
        if (first := next(gaps, None)) is not None:
            lacking = f"{1 + sum(1 for _ in gaps):,} of {counted(len(self), 'row')}"
            what = f"{self.places[first]}, column '{name}': there is no value, as in {lacking}."
            raise DataError(" ".join([what, *self.gap_notes()]), field=SOURCES, remedy=remedy)

    def refuse_free_text(self, name: str) -> None:
        """Raise DataError for a column of texts that are nearly all different."""
        different = count_different(np.fromiter(map(hash, self.columns[name]), np.int64, len(self)))
        if different > max(_FEW, len(self) / 2):
            what = f"The column '{name}' has {different} different texts in {len(self)} rows"
            what += f", such as '{str(self.columns[name][0])[:40]}': it is not a category."
            first = str(self.columns[name][0])
            other = f"read its words: prepare.options.hashed={{{name}: 64}}"
            other = f"read dates: prepare.options.dates={{{name}: null}}" if cells.looks_like_date(first) else other
            raise DataError(what, field=SOURCES, remedy=f"Leave it out: prepare.options.ignore=[{name}]; or {other}.")


def _may_be_number(value: Any) -> bool:
    return value is None or cells.number_of(value) is not None or cells.number_form(value)[0] == "?,"


def count_different(values: np.ndarray) -> int:
    """Count the different values ``[rows]``, in their own memory: sorts them."""
    values.sort()
    return int(np.count_nonzero(values[1:] != values[:-1])) + (len(values) > 0)


def read_table(
    sources: Sequence[str],
    *,
    rename: Mapping[str, str],
    field: str = SOURCES,
    readers: Mapping[str, Reader] | None = None,
    read: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = (),
    nested: Sequence[str] = (),
    marks: Sequence[str] = (),
    bad: list[DataError] | None = None,
) -> Table:
    """The rows of all files that the sources stand for, in their order.

    Args:
        sources: paths, URLs, folders and patterns; installed packages among them are passed over.
        rename: name of a column in the files -> its name in the table.
        readers: column -> its reader; with `read_texts`, sentences in CoNLL's columns are rows as well. Other columns
            with lists, objects or bytes are left out.
        read: how the files are written (`data.rows.reading.Reading`).
        nested: columns that may be parts of objects (`unnest`).
        marks: columns of 0 and 1 that become one (`join_marks`).
        bad: gets the errors of rows that cannot be read, which are not in the table; None: the first one is raised.

    Raises:
        ConfigError: there are no such files. DataError: a file or a row cannot be read, or files differ in columns.
    """
    addresses, table = _find_addresses(sources, field), Table([], {})
    own, reading = dict(readers or {}), cells.read_reading(read or {})
    with naming_sources(field):
        for place, values in _read_files(addresses, own, table.notes, reading, bad):
            try:
                row = join_marks(unnest(renamed_row(values, rename, place), nested), marks, place)
                row = {name: value for name, value in row.items() if name not in ignore} if ignore else row
                _require_same_columns(table.columns or row, row, place)
            except DataError as error:
                if bad is None:
                    raise
                bad.append(error)
                continue
            _add_row(table, row, place, own, reading)
    if not table.places:
        raise DataError("The files have no rows.", field=field, value=", ".join(addresses), remedy="Check the files.")
    for old, name in rename.items():
        if name not in table.columns:
            what, remedy = "The data has no such column.", suggestion(old, table.columns)
            raise DataError(what, field="prepare.options.rename", value=old, remedy=remedy)
    for name in table.unread:
        del table.columns[name]
    return table


def _find_addresses(sources: Sequence[str], field: str) -> list[str]:
    addresses = [source for source in sources if not source.startswith(_DECLARED_ONLY)]
    if not addresses:
        remedy = "Name the files of the table, as in prepare.sources=[data.csv]."
        raise DataError("There is nothing to read.", field=field, remedy=remedy)
    return addresses


def _add_row(table: Table, row: Mapping[str, Any], place: str, readers: Mapping[str, Reader], reading: Reading) -> None:
    if not table.places:
        spool = Spool()
        table.columns = {name: SpooledValues(spool, len(row)) for name in row}
        table.places = SpooledValues(spool, 1)
    table.places.append(place)
    for name, value in row.items():
        try:
            own = readers.get(name)
            plain = own(value, f"{place}, column '{name}'") if own else cells.plain_value(value, name, place, reading)
        except DataError as error:
            if own:
                raise
            table.unread.setdefault(name, error.message)
            plain = None
        table.columns[name].append(plain)
        if plain is None and isinstance(value, str) and value:
            table.gaps[value.strip()] += 1


def _read_files(
    addresses: Sequence[str], own: Mapping[str, Reader], notes: list[str], reading: Reading, bad: list[DataError] | None
) -> Iterator[tuple[str, Any]]:
    """The rows of the files, behind their places."""
    lists = [name for name, reader in own.items() if reader is cells.read_texts]
    if not lists:
        yield from read_rows(find_row_files(addresses), notes, reading, bad)
        return
    for file in find_row_files(addresses, {**TABLES, **SENTENCES}):
        yield from (
            read_sentences(file, lists) if format_of(file.path, SENTENCES) else read_rows([file], notes, reading, bad)
        )


def _require_same_columns(columns: Mapping[str, Any], row: Mapping[str, Any], place: str) -> None:
    if columns.keys() == row.keys():
        return
    if extra := sorted(set(row) - set(columns)):
        raise DataError(f"{place}: it has a column '{extra[0]}' more than the rows before; {SAME}.", field="rows")
    lacking = min(set(columns) - set(row))
    raise DataError(f"{place}: the column '{lacking}' is missing; {SAME}.", field="rows")


# -- new rows ---------------------------------------------------------------------------------------------------------
NOTE = "new_rows"


def note_form(
    columns: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    optional: Sequence[str] = (),
    dropped: Sequence[str] | None = None,
    gathered: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The form of new rows, for ``out.info``.

    Args:
        columns: column of the model -> how it is read: number, with a comma where training had decimal commas and with
            its unit (`number,%`), bool, text, name (a text; 3.0 is 3), folded (a text without case), date: with its
            form, exact (a text with its spaces) or words (a list of texts); with "?" a value may be missing.
        options: those of `prepare`, which may rename columns and name one with ids.
        optional: columns that a row may have as well, as they are.
        dropped: columns that were left out; None: all others.
        gathered: the columns `names`, and those with turns, become one of JSON, `into`, `unless` a row is prepared.
    """
    rename = dict(options.get("rename") or {})
    left_out = None if dropped is None else list(dropped)
    row_id = next((name for name, new in rename.items() if new == options.get("id")), options.get("id"))
    note = {"columns": dict(columns), "optional": list(optional), "rename": rename, "dropped": left_out, "id": row_id}
    note |= {"gathered": dict(gathered)} if gathered else {}
    return {NOTE: note | ({"read": dict(options["read"])} if options.get("read") else {})}


class TableForm:
    """The form of new rows, as `note_form` notes it: `columns` that a row needs, and perhaps an `id_column`.

    Their files are written as those of the training (`reading`). `unknown` has, by column, the number of texts that
    no training row has, and the first of them.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        note, texts, label = info[NOTE], info.get("texts"), info.get("label")
        self.columns: dict[str, str] = dict(note["columns"])
        self.id_column: str | None = note.get("id")
        self._optional, self._has_turns = frozenset(note["optional"]), bool(note.get("turns"))
        self.gathered: dict[str, Any] = note.get("gathered") or {}
        self._answer: str = note.get("answer", "number")
        self._marks: Sequence[str] = info.get("label_columns", ())
        known = texts if isinstance(texts, Mapping) else {}
        self._texts = {name: frozenset(known[name]) for name in self.columns.keys() & known.keys()}
        self.unknown: dict[str, tuple[int, str]] = {}
        self._rename: dict[str, str] = dict(note["rename"])
        answer = next((name for name, new in self._rename.items() if new == label), label)
        self.reading = replace(cells.read_reading(note.get("read") or {}), answer=answer)
        self._dropped = None if note["dropped"] is None else frozenset(note["dropped"])

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self | None:
        """The form that `prepare` noted; None: its rows do not come from a table."""
        return cls(info) if NOTE in info else None

    @property
    def may_lack(self) -> list[str]:
        """The columns, as files name them, that objects of JSON may leave out for a missing value."""
        names = {new: old for old, new in self._rename.items()}
        return [names.get(name, name) for name, kind in self.columns.items() if kind.endswith("?")]

    def describe_unknown(self) -> list[str]:
        """Sentences about the texts that no training row has."""
        return [
            f"The column '{name}' has a text that no training row has in {counted(count, 'row')}, such as "
            f"'{first[:40]}': such texts are all alike for the model."
            for name, (count, first) in self.unknown.items()
        ]

    def drops(self, name: str) -> bool:
        """Whether training left a column out."""
        name = self._rename.get(name, name)
        if name in self.columns or name in self._optional or any(part.startswith(f"{name}.") for part in self.columns):
            return False
        return self._dropped is None or name in self._dropped or cells.is_index(name)

    def read(self, values: Mapping[str, Any], place: str) -> dict[str, Any]:
        """A row of the model's columns, of the values that its file has.

        Raises:
            DataError: a column or a value is missing, or a value has another type.
        """
        values = unnest(values, self.columns)
        row = {self._rename.get(name, name): value for name, value in values.items() if not self.drops(name)}
        if self._has_turns:  # a list of them is read as JSON
            row |= {name: json.dumps(value) for name, value in row.items() if isinstance(value, list)}
        if self.gathered and self.gathered["unless"] not in row:
            row = self._gather(row)
        for name, kind in self.columns.items():
            if name not in row:
                what = "the model needs the column, which the row does not have"
                raise refuse_row(place, name, f"{what}; {_describe_columns(values, name)}")
            row[name] = _read(row[name], kind, name, place, self.reading)
        for name, known in self._texts.items():
            if row[name] not in known:
                count, first = self.unknown.get(name, (0, ""))
                self.unknown[name] = count + 1, first or row[name]
        return row

    def _gather(self, row: Mapping[str, Any]) -> dict[str, Any]:
        names = {name for name, value in row.items() if isinstance(value, list) or name in self.gathered["names"]}
        gaps = {name for name in names if row[name] is None or row[name] != row[name]}
        gathered = {name: value for name, value in row.items() if name in names - gaps}
        others = {name: value for name, value in row.items() if name not in names}
        return {**others, self.gathered["into"]: json.dumps(gathered, default=str)}

    def read_answer(self, values: Mapping[str, Any], name: str, place: str, *, kind: str | None) -> Any:
        """The label of a row of the values that its file has: a text, a number, or without a kind what stands there.

        Raises:
            DataError: the row has none.
        """
        named = {self._rename.get(column, column): value for column, value in values.items()}
        renamed = join_marks(unnest(named, [name, *self._marks]), self._marks, place)
        if name not in renamed:
            what = "there is no such column, and it has the labels"
            raise refuse_row(place, name, f"{what}; {_describe_columns(renamed, name)}")
        kind = self._answer if kind == "number" else kind
        return renamed[name] if kind is None else _read(renamed[name], kind, name, place, self.reading)


def _describe_columns(values: Mapping[str, Any], name: str) -> str:
    near = nearest(name, values)
    return f"the nearest column is '{near}'" if near else f"its columns are {', '.join(map(str, values))}"


def _read(value: Any, kind: str, name: str, place: str, reading: Reading) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    value = None if value != value else value
    kind, may_lack = kind.removesuffix("?"), kind.endswith("?")
    is_number = kind.startswith("number")
    if kind == "words":
        words = value.tolist() if isinstance(value, np.ndarray) else value
        found: Any = cells.read_texts(words, f"{place}, column '{name}'") or None
    elif kind == "exact":
        if not isinstance(value, str | None):
            raise refuse_row(place, name, f"a {type(value).__name__} is not a text")
        found = value if value and value.strip() else None
    else:
        found = cells.plain_value(value, name, place, reading)
        found = None if is_number and str(found) in cells.USUAL else found
    if found is None:
        if not may_lack:
            raise refuse_row(place, name, "there is no value, and the model was trained without gaps")
        return math.nan if is_number or kind == "bool" else ""
    return _as_number(found, kind, name, place) if is_number else _as_kind(found, kind, name, place)


def _as_number(found: Any, kind: str, name: str, place: str) -> float:
    (mark, unit), marks = cells.number_form(found), kind.removeprefix("number")
    if mark in ("?,", "?.") and "," in marks:
        what = f"'{found}' can be read in two ways: the training had decimal commas ({READ}.decimal)"
        raise refuse_row(place, name, what)
    known = marks.removeprefix(",")
    if (isinstance(found, str) and unit != known and "%" in unit + known) or (unit and known and unit != known):
        ours, theirs = (f"in {one}" if one else "without a unit" for one in (unit, known))
        raise refuse_row(place, name, f"'{found[:40]}' is a number {ours}, and those of the training are {theirs}")
    if (number := cells.number_of(found)) is None:
        raise refuse_row(place, name, f"'{str(found)[:40]}' is not a number")
    return number


def _as_kind(found: Any, kind: str, name: str, place: str) -> Any:
    if kind == "bool":
        if (number := TRUTH.get(str(found).lower())) is None:
            raise refuse_row(place, name, f"'{str(found)[:40]}' is neither true nor false, as in the training")
        return number
    if kind.startswith("date:"):
        return cells.read_date(str(found), kind.removeprefix("date:"), name, place)
    if kind == "name":
        return cells.name_of(found)
    text = cells.text_of(found) if kind in ("text", "folded") else found
    return cells.fold(text) if kind == "folded" else text
