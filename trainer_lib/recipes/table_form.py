"""New rows for a model that was trained on a table, read as `prepare` read the table.

`prepare` notes the form in ``out.info["new_rows"]``::

    columns    column of the model -> how it is read: number, text, exact (a text with its spaces) or words (a list of
               texts); with "?" a value may be missing
    optional   columns that a row may have as well, as they are
    rename     name of a column in the files -> its name here
    dropped    columns that were left out; null: all others
    id         the column of the ids in the files, if there is one
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from trainer_lib.base.suggestions import nearest
from trainer_lib.data.column import Column
from trainer_lib.data.given_rows import refuse_row
from trainer_lib.data.text_values import parse_text
from trainer_lib.recipes.table_files import is_index, number_of, plain_value, read_texts, text_of

NOTE = "new_rows"


def note_form(
    columns: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    optional: Sequence[str] = (),
    dropped: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The form of new rows, for ``out.info``; `options` are those of `prepare`, which may rename columns."""
    rename = dict(options.get("rename") or {})
    left_out = None if dropped is None else list(dropped)
    row_id = next((name for name, new in rename.items() if new == options.get("id")), options.get("id"))
    note = {"columns": dict(columns), "optional": list(optional), "rename": rename, "dropped": left_out, "id": row_id}
    return {NOTE: note}


class TableForm:
    """How new rows are read.

    Attributes:
        columns: column that a row needs -> how it is read.
        id_column: the column of the training files with their ids, if there was one.
    """

    def __init__(self, note: Mapping[str, Any]) -> None:
        self.columns: dict[str, str] = dict(note["columns"])
        self.id_column: str | None = note.get("id")
        self._optional = frozenset(note["optional"])
        self._rename: dict[str, str] = dict(note["rename"])
        self._dropped = None if note["dropped"] is None else frozenset(note["dropped"])

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self | None:
        """The form that `prepare` noted; None: its rows do not come from a table."""
        return cls(info[NOTE]) if NOTE in info else None

    def drops(self, name: str) -> bool:
        """Whether training left a column out."""
        name = self._rename.get(name, name)
        if name in self.columns or name in self._optional:
            return False
        return self._dropped is None or name in self._dropped or is_index(name)

    def read(self, values: Mapping[str, Any], place: str) -> dict[str, Any]:
        """A row of the model's columns.

        Args:
            values: the row as its file has it.
            place: where the row is from, for errors.

        Raises:
            DataError: a column or a value is missing, or a value has another type.
        """
        row = {self._rename.get(name, name): value for name, value in values.items() if not self.drops(name)}
        for name, kind in self.columns.items():
            if name not in row:
                near = nearest(name, values)
                hint = f"the nearest column is '{near}'" if near else f"its columns are {', '.join(map(str, values))}"
                raise refuse_row(place, name, f"the model needs the column, which the row does not have; {hint}")
            row[name] = _read(row[name], kind, name, place)
        return row


def _read(value: Any, kind: str, name: str, place: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    value = None if value != value else value
    kind, may_lack = kind.removesuffix("?"), kind.endswith("?")
    if kind == "words":
        # A CSV has lists as JSON.
        listed = parse_text(place, name, value, Column("list", "string")) if isinstance(value, str) else value
        words, where = listed.tolist() if isinstance(listed, np.ndarray) else listed, f"{place}, column '{name}'"
        found: Any = read_texts(words, where) or None
    elif kind == "exact":
        if not isinstance(value, str | None):
            raise refuse_row(place, name, f"a {type(value).__name__} is not a text")
        found = value if value and value.strip() else None
    else:
        if isinstance(value, list | tuple | dict | bytes):
            raise refuse_row(place, name, f"a {type(value).__name__} is neither a number nor a text")
        found = plain_value(value, name, place)
    if found is None:
        if not may_lack:
            raise refuse_row(place, name, "there is no value, and the model was trained without gaps")
        return math.nan if kind == "number" else ""
    if kind == "number":
        number = number_of(found)
        if number is None:
            raise refuse_row(place, name, f"'{str(found)[:40]}' is not a number")
        return number
    return text_of(found) if kind == "text" else found
