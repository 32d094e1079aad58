"""Questions, their contexts and their answers, read from files: where each answer is has to be right.

Answers are a text, a list of texts, SQuAD's ``{"text": […], "answer_start": […]}`` or a list of ``{"text": …,
"answer_start": …}``. Without a start the first place counts; without any answer the question has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.tabular_rows import COMMON, FIELD, TabularRows

SOURCES = "prepare.sources"
_OWN = ("labels", "row_id", "answer_span", "trivial")
_FORMS = 'a text, a list of texts, or {"text": [...], "answer_start": [...]}'


class Answer(NamedTuple):
    """A text and the number of its first character in the context; None: the first place that has it."""

    text: str
    start: int | None


class PlacedAnswer(NamedTuple):
    """A text and the number of its first character in the context."""

    text: str
    start: int


class QuestionRows(TabularRows):
    """The questions, contexts and answers of a table by split; no other column is read."""

    label_option = "answers"
    defaults: Mapping[str, Any] = {
        **COMMON,
        "question": "question",
        "context": "context",
        "answers": "answers",
        "max_length": 384,
        "stride": 128,
        "max_answer": 30,
    }

    @override
    def _readers(self) -> Mapping[str, Callable[[Any, str], Any]]:
        return {self.options["context"]: read_context, self.options["answers"]: read_answers}

    @override
    def _features(self) -> list[str]:
        if self.options["split"].get("by") == "stratified":
            remedy = "Set prepare.options.split.by to random, group, time or column."
            raise ConfigError("Answers are not classes to cut by.", field=f"{FIELD}.split.by", remedy=remedy)
        for option in ("question", "context"):
            name = self.table.require(self.options[option], field=f"{FIELD}.{option}")
            if name in _OWN:
                remedy = f"Give it another name: prepare.options.rename.{name}=NAME."
                raise DataError(f"The recipe uses the name '{name}' itself.", field=f"{FIELD}.{option}", remedy=remedy)
            self.table.refuse_gaps(name, "Remove the row, or give it a text.")
        return []

    def answers(self) -> list[list[PlacedAnswer]]:
        """The answers of each row, each where its context has it; an empty list for a question without any.

        Raises:
            DataError: an answer is not in its context, or not where the row says; or no training row has an answer.
        """
        contexts = self.table.columns[self.options["context"]]
        found = [
            [_placed(answer, context, place) for answer in answers]
            for place, context, answers in zip(self.table.places, contexts, self.table.columns[self.label], strict=True)
        ]
        if not any(found[row] for row in self.splits["train"].tolist()):
            what = "No training row has an answer, so there is nothing to learn."
            raise DataError(what, field=f"{FIELD}.answers", value=self.label, remedy="Give rows with answers.")
        return found


def read_context(value: Any, where: str) -> str | None:
    """A text as it is: answers count its characters. Raises DataError for another value."""
    if value is None or isinstance(value, str):
        return value if value and value.strip() else None
    raise DataError(f"{where}: a {type(value).__name__} is not a text.", field="rows")


def read_answers(value: Any, where: str) -> list[Answer]:
    """The answers of a row. Raises DataError for a value of another form, and for an empty answer."""
    if value is None or value == "":
        return []
    if isinstance(value, Mapping):
        texts, starts = _listed(value.get("text")), _listed(value.get("answer_start"))
        if "text" not in value or (starts and len(starts) != len(texts)):
            what = f"there are {len(texts)} texts and {len(starts)} starts" if "text" in value else "there is no 'text'"
            raise DataError(f"{where}: {what}. Answers are {_FORMS}.", field="rows")
        return [_answer(text, start, where) for text, start in zip(texts, starts or [None] * len(texts), strict=True)]
    if isinstance(value, list | tuple):
        pairs = [
            (each.get("text"), each.get("answer_start")) if isinstance(each, Mapping) else (each, None)
            for each in value
        ]
        return [_answer(text, start, where) for text, start in pairs]
    return [_answer(value, None, where)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _answer(text: Any, start: Any, where: str) -> Answer:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise DataError(f"{where}: a {type(text).__name__} is not an answer. Answers are {_FORMS}.", field="rows")
    if not str(text).strip():
        raise DataError(f"{where}: an answer is empty. A question without an answer has an empty list.", field="rows")
    if start is not None and (isinstance(start, bool) or not isinstance(start, int) or start < 0):
        raise DataError(f"{where}: the start {start!r} is not the number of a character.", field="rows")
    return Answer(str(text), start)


def _placed(answer: Answer, context: str, place: str) -> PlacedAnswer:
    start = context.find(answer.text) if answer.start is None else answer.start
    if start >= 0 and context.startswith(answer.text, start):
        return PlacedAnswer(answer.text, start)
    where = "in the context" if answer.start is None else f"at character {answer.start} of the context"
    raise DataError(
        f"{place}: the answer '{answer.text[:60]}' is not {where}.",
        field=SOURCES,
        remedy="Correct it, or leave the row out: an answer is a part of its context."
        if answer.start is None
        else "Correct the start, or leave it out: the first place then counts.",
    )
