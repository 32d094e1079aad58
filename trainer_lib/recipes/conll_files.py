"""Sentences in CoNLL's columns: a word in each line, its tag in the last column, an empty line after each sentence.

EU      NNP  B-ORG
rejects VBZ  O
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainer_lib.data.row_sources import RowFile
from trainer_lib.errors import DataError, first_line
from trainer_lib.storage import Store

SENTENCES = {".conll": "sentences", ".iob": "sentences", ".iob2": "sentences", ".bio": "sentences"}
"""Ending of a file's name -> "sentences"."""
_DOCUMENT = "-DOCSTART-"


def read_sentences(file: RowFile, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sentences of a file behind their places, each as two lists of texts: words and tags.

    Args:
        names: of the columns of words and of tags.

    Raises:
        DataError: the file is not UTF-8, or a line has no tag.
    """
    content = Store.open(file.url, field="prepare.sources").read_bytes(file.path)
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        what = f"{file.address}: the file is not UTF-8 ({first_line(error)})."
        raise DataError(what, field="NEW_DATA", remedy="Write it as UTF-8.") from error
    words: list[str] = []
    tags: list[str] = []
    number = 0
    for line, text in enumerate([*lines, ""], 1):
        parts = text.split("\t") if "\t" in text else text.split()
        if not text.strip() or parts[0] == _DOCUMENT:
            if words:
                place = f"{file.address}, sentence {number} (line {line - len(words)})"
                yield place, dict(zip(names, (words, tags), strict=True))
                number, words, tags = number + 1, [], []
            continue
        if len(parts) < 2 or not parts[-1].strip():
            raise DataError(f"{file.address}, line {line}: the word '{parts[0][:40]}' has no tag.", field="rows")
        words.append(parts[0])
        tags.append(parts[-1].strip())
