"""All that is wrong with a table at once: for each column how many rows, three of them, and what settles it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer_lib.base.suggestions import counted
from trainer_lib.errors import DataError
from trainer_lib.recipes.tables.cells import USUAL, looks_like_date, number_of
from trainer_lib.recipes.tables.table_files import Table

_EXAMPLES = 3
_OPTIONS = "prepare.options"


class Fault(NamedTuple):
    """What is wrong with a column, or with rows as a whole.

    Attributes:
        column: its name; empty for rows.
        problem: what is wrong, behind the number of rows.
        rows: how many rows are so.
        examples: places of the first of them, and what is there.
        settled_by: what settles it, such as a line of the spec.
    """

    column: str
    problem: str
    rows: int
    examples: Sequence[str]
    settled_by: str

    def lines(self) -> list[str]:
        """The fault as lines of a text."""
        name = f"column '{self.column}'" if self.column else "rows"
        return [f"{name}: {counted(self.rows, 'row')} {self.problem}", *self.examples, f"-> {self.settled_by}"]


def with_faults(error: DataError, faults: Sequence[Fault]) -> DataError:
    """An error with a list of all faults, where these say more than it says."""
    if len(faults) < 2 and sum(fault.rows for fault in faults) < 2:
        return error
    text = "\n".join(f"  {'' if at == 0 else '  '}{line}" for fault in faults for at, line in enumerate(fault.lines()))
    what = f"{error.message}\n\nAll that prepare-data found:\n{text}"
    return DataError(what, field=error.field, value=error.value, remedy=error.remedy)


def find_row_faults(bad: Sequence[DataError]) -> list[Fault]:
    """The rows that cannot be read."""
    examples = [error.message for error in bad[:_EXAMPLES]]
    return [Fault("", "cannot be read", len(bad), examples, "correct the file")] if bad else []


def find_column_faults(
    table: Table, label: str, features: Sequence[str], options: Mapping[str, Any], *, classes: bool
) -> list[Fault]:
    """What is wrong with the label, the ids and the features, as `TabularRows` would refuse them."""
    faults = [*_find_gaps(table, label, "give each row a label, or remove the row")]
    faults += [] if classes else _find_texts(table, label, "use the recipe tabular-classification")
    if (row_id := options["id"]) in table.columns:
        faults += [*_find_gaps(table, row_id, "give each row an id"), *_find_twice(table, row_id)]
    may_lack = options["missing"] != "refuse"
    allowed = f"{_OPTIONS}.missing=mean and prepare.allow_nan=true"
    for name in features:
        if name in options["hashed"]:
            continue
        if name in options["dates"]:
            faults += [] if may_lack else _find_gaps(table, name, f"{_OPTIONS}.missing=mean")
            continue
        others = [] if name in options["categorical"] else _find_texts(table, name, "")
        if name in options["categorical"] or (others and 2 * others[0].rows > table.count(name)):
            faults += _find_free_text(table, name)
            continue
        examples = others[0].examples if others else ()
        words = ", ".join(dict.fromkeys(example.partition(": ")[2] for example in examples))
        as_gap, as_text = f"{_OPTIONS}.read.na_values=[{words}]", f"{_OPTIONS}.categorical=[{name}]"
        faults += [fault._replace(settled_by=f"{as_gap}, or {as_text}") for fault in others]
        faults += [] if may_lack else _find_gaps(table, name, f"{allowed}, or {_OPTIONS}.ignore=[{name}]", usual=True)
    return faults


def _example(table: Table, row: int, value: Any = None) -> str:
    place = str(table.places[row]).rpartition("/")[2]
    return place if value is None else f"{place}: {str(value)[:40]!r}"


def _fault(table: Table, name: str, rows: Iterator[int], problem: str, settled_by: str) -> list[Fault]:
    count, first = 0, list[int]()
    for row in rows:
        count += 1
        first += [row] if len(first) < _EXAMPLES else []
    examples = [_example(table, row, table.columns[name][row]) for row in first]
    return [Fault(name, problem, count, examples, settled_by)] if count else []


def _find_gaps(table: Table, name: str, settled_by: str, *, usual: bool = False) -> list[Fault]:
    values = enumerate(table.columns[name])
    rows = (row for row, value in values if value is None or value != value or (usual and str(value) in USUAL))
    return _fault(table, name, rows, "without a value", settled_by)


def _find_texts(table: Table, name: str, settled_by: str) -> list[Fault]:
    values = enumerate(table.columns[name])
    rows = (row for row, value in values if value is not None and number_of(value) is None and value not in USUAL)
    return _fault(table, name, rows, "with a text that is not a number", settled_by)


def _find_twice(table: Table, name: str) -> list[Fault]:
    seen = set[str]()
    texts = enumerate(table.each_text(name))
    rows = (row for row, text in texts if text and (text in seen or seen.add(text)))  # type: ignore[func-returns-value]
    return _fault(table, name, rows, "with the id of another row", f"name a column of unique values: {_OPTIONS}.id")


def _find_free_text(table: Table, name: str) -> list[Fault]:
    try:
        table.refuse_free_text(name)
    except DataError:
        first = next(filter(None, table.each_text(name)), "")
        other = f"dates={{{name}: null}}" if looks_like_date(first) else f"hashed={{{name}: 64}}"
        settled_by = f"{_OPTIONS}.ignore=[{name}], or {_OPTIONS}.{other}"
        rows = (row for row, value in enumerate(table.columns[name]) if value is not None)
        return _fault(table, name, rows, "with a text, nearly all different", settled_by)
    return []
