"""The documents of text files and tables by split, read one after the other: no more than one file is held at a time.

notes.txt, guide.md, tool.py       a document, or several between a separator
rows.csv, .jsonl, .parquet, …      rows are documents, in a column
stdlib:, stdlib:json               the Python files of the running interpreter's library, without its test suites
package:NAME, package:NAME/sub     the texts of an installed package
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from trainer_lib.base.suggestions import suggestion
from trainer_lib.data.rows.row_files import read_rows, read_utf8
from trainer_lib.data.rows.row_sources import FORMATS, RowFile, find_installed_files, find_row_files, format_of
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.shared.recipe_options import require_choice
from trainer_lib.recipes.tables.cells import read_reading, text_of
from trainer_lib.recipes.tables.splitting import cut_rows, read_split, require_train
from trainer_lib.recipes.tables.table_files import SOURCES, naming_sources, renamed_row

FIELD = "prepare.options"
TEXTS = {".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".py": "text"}
"""Ending of a text file's name -> "text"."""


class TextDocument(NamedTuple):
    """A document: where it is from, its text, and the other columns of its row (the address of a text file).

    `source`: the name of its source in a mixture; None: there is none.
    """

    place: str
    text: str
    values: Mapping[str, Any]
    source: str | None = None


class DocumentSplits:
    """Documents by split. All are read once to count them; then splits are read as they are needed.

    Args:
        options: `text` (a column), `rename`, `read`, `separator`, `files`, `split` and `pack`.
        sources: the spec's `prepare.sources`.
        mixture: their names in a mixture; empty: there is none.
    """

    def __init__(self, options: Mapping[str, Any], sources: Sequence[str], mixture: Sequence[str] = ()) -> None:
        self._options = options
        self._mixture = mixture
        self._files = {name: [str(path)] for name, path in options["files"].items()}
        self._sources = list(sources)
        self._chosen: dict[str, np.ndarray] = {}
        if self._files and mixture:
            what, remedy = "A mixture is split by itself, so splits cannot have files.", "Set split in place of files."
            raise ConfigError(what, field=f"{FIELD}.files", value=list(self._files), remedy=remedy)
        if self._files:
            require_train(self._files)
        else:
            self._chosen = self._cut()
        names = self._files or self._chosen
        self.names = sorted(names, key=lambda name: name != "train")  # the splits, train first
        for name in options.get("pack", ()):
            require_choice(name, tuple(self.names), field=f"{FIELD}.pack")

    def read(self, name: str) -> Iterator[Any]:
        """The documents of a split, or its conversations, in the order of the files."""
        if self._files:
            yield from self._read(self._files[name], f"{FIELD}.files.{name}")
            return
        wanted = iter(self._chosen[name].tolist())
        following = next(wanted, None)
        for number, document in enumerate(self._read_sources()):
            if number == following:
                yield document
                following = next(wanted, None)
                if following is None:
                    return

    def _read_sources(self) -> Iterator[Any]:
        """The documents of all sources, in their order; of a mixture with the name of their source."""
        if not self._mixture:
            yield from self._read(self._sources, SOURCES)
        for name, source in zip(self._mixture, self._sources, strict=False):
            for document in self._read([source], SOURCES):
                yield document._replace(source=name)

    def _read(self, sources: Sequence[str], field: str) -> Iterator[Any]:
        names = self._options.keys() & {"text", "rename", "separator", "read", "ignore"}
        return read_documents(sources, field=field, **{name: self._options[name] for name in names})

    def _cut(self) -> dict[str, np.ndarray]:
        way = read_split(self._options["split"], by="random", unclassed="Texts have no classes to cut by.")
        keys: list[str] = []
        rows = 0
        for document in self._read_sources():
            rows += 1
            if way["column"] is not None:
                keys.append(_key(document, way["column"]))
        if not rows:
            raise DataError("The sources have no texts.", field=SOURCES, remedy="Check the files.")
        return cut_rows(way, rows, keys=keys, place=lambda row: next(islice(self._read_sources(), row, None)).place)


def read_documents(
    sources: Sequence[str],
    *,
    text: str = "text",
    rename: Mapping[str, str],
    separator: str | None,
    field: str,
    read: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = (),
) -> Iterator[TextDocument]:
    """The documents of all sources, in their order. Text files without a text are passed over.

    The arguments are options of causal-language-modeling, and `field`: the setting that names the sources, for errors.

    Raises:
        ConfigError: there are no such files. DataError: a file or a row cannot be read, or a row has no text.
    """
    reading = read_reading(read or {})
    if not sources:
        remedy = "Name files or folders, as in prepare.sources=[texts/]."
        raise DataError("There is nothing to read.", field=field, remedy=remedy)
    with naming_sources(field):
        for file in _find(sources, field):
            if format_of(file.path, TEXTS):
                yield from _of_text_file(file, separator)
            else:
                for place, values in read_rows([file], None, reading):
                    row = renamed_row(values, rename, place)
                    yield _of_row(place, {name: row[name] for name in row if name not in ignore}, text)


def _find(sources: Sequence[str], field: str) -> Iterator[RowFile]:
    for source in sources:
        kind, separator, rest = source.partition(":")
        if separator and kind in ("stdlib", "package") and not rest.startswith("//"):
            found = find_installed_files(kind, rest.strip("/"), TEXTS, field=field)
            if not found:
                remedy = f"A text's name ends in {', '.join(TEXTS)}."
                raise ConfigError("There are no texts here.", field=field, value=source, remedy=remedy)
            yield from found
        else:
            yield from find_row_files([source], {**FORMATS, **TEXTS})


def _of_text_file(file: RowFile, separator: str | None) -> Iterator[TextDocument]:
    whole = read_utf8(file)
    # A line may end in \r\n, in the file as in the separator.
    form = None if separator is None else re.escape(separator.replace("\r\n", "\n")).replace("\\\n", "\r?\n")
    parts = [whole] if form is None else re.split(form, whole)
    for number, part in enumerate(parts):
        if part.strip():
            place = file.address if separator is None else f"{file.address}, document {number}"
            yield TextDocument(place, part, {"file": file.address})


def _of_row(place: str, row: dict[str, Any], text: str) -> TextDocument:
    if text not in row:
        remedy = suggestion(text, row)
        raise DataError(f"{place}: the row has no such column.", field=f"{FIELD}.text", value=text, remedy=remedy)
    value = row.pop(text)
    if not isinstance(value, str):
        kind = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
        what = "there is no text" if value is None else f"{kind} is not a text"
        raise DataError(f"{place}, column '{text}': {what}.", field="rows")
    if not value.strip():
        raise DataError(f"{place}, column '{text}': the text is empty.", field="rows")
    return TextDocument(place, str(value), row)


def _key(document: TextDocument, column: str) -> str:
    if column not in document.values:
        remedy = suggestion(column, document.values)
        what = f"{document.place}: the row has no such column."
        raise DataError(what, field=f"{FIELD}.split.column", value=column, remedy=remedy)
    value = document.values[column]
    if value is None or value == "" or value != value:
        remedy = "Fill it in: without it the row belongs to no split."
        raise DataError(f"{document.place}, column '{column}': there is no value.", field=SOURCES, remedy=remedy)
    return value.isoformat() if isinstance(value, date) else text_of(value)
