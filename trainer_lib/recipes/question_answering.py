"""The recipe question-answering: the part of a context that answers a question, with a model of transformers.

    name: reader
    recipe: question-answering
    prepare:
      sources: [questions.jsonl]  # {"question": …, "context": …, "answers": {"text": […], "answer_start": […]}}
      options: {pretrained: distilbert-base-cased}
    train:
      model: {pretrained: distilbert-base-cased}
      args: {num_train_epochs: 2, learning_rate: 3.0e-5, global_batch_size: 16}
    evaluate: {splits: [validation, test]}

Without `pretrained` or `folder` the vocabulary is learned from the training texts, and the weights begin at random:
`train.model: {config: {model_type: bert, hidden_size: 128, …}}`. A context that is longer than `max_length` is read in
windows that share `stride` tokens. Where training has questions without an answer, the model may find none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import DataError
from trainer_lib.recipes.shared.model_places import MODEL, build_with_head
from trainer_lib.recipes.shared.recipe_options import TEXTS, PathOptions, choose
from trainer_lib.recipes.tables.cells import parse_literal, read_exact_text
from trainer_lib.recipes.tables.rows import FIELD, TextRows
from trainer_lib.recipes.tables.table_files import SOURCES, TRUTH, Reader, note_form
from trainer_lib.recipes.texts.row_trainer import RowTrainer, decode_texts, encode_texts, find_usual
from trainer_lib.recipes.texts.tokenizing import find_tokenizer, kept_tokenizer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

# Scores of answers, as SQuAD has them, and of answers that need no model (Rajpurkar et al., 2016 and 2018).
#
# Texts are compared in small letters, without punctuation and without the articles a, an and the. Where nothing else
# is left of a text, it is compared as it is.


NAMES = ("exact_match", "f1", "usual_exact_match", "usual_f1", "sentence_f1", "answerable")
"""The scores of a row."""
_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")  # of ASCII
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def score_answer(predicted: str, answers: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 over words, both with the best of the answers; an empty text says that there is no answer."""
    own = _words(predicted)
    both = [(float(own == true), _f1(own, true)) for true in map(_words, answers)]
    return max(exact for exact, _ in both), max(f1 for _, f1 in both)


def _words(text: str) -> list[str]:
    plain = _ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split()
    return plain or text.split()


def _f1(own: Sequence[str], true: Sequence[str]) -> float:
    if not own or not true:
        return float(own == true)
    same = sum((Counter(own) & Counter(true)).values())
    return 2 * same / (len(own) + len(true))


def find_nearest_sentence(question: str, context: str) -> str:
    """The first sentence, or line, of the context that has most words of the question."""
    asked = set(_words(question))
    return max(_SENTENCE.split(context), key=lambda sentence: len(asked & set(_words(sentence))))


# -- questions, contexts and answers of files -------------------------------------------------------------------------
_NONE = "is_impossible"  # column of SQuAD 2 that marks questions without an answer
_FORMS = 'a text, a list of texts, or {"text": [...], "answer_start": [...]}'


class Answer(NamedTuple):
    """A text and the number of its first character in the context; None: the first place that `_find` finds."""

    text: str
    start: int | None


class QuestionRows(TextRows):
    """The questions, contexts and answers of a table by split.

    Answers are a text, a list of texts, SQuAD's ``{"text": […], "answer_start": […]}`` or a list of ``{"text": …,
    "answer_start": …}``. Without a start the first place counts; without any answer the question has none.
    """

    text_options = ("question", "context")
    label_option = "answers"
    reserved = ("labels", "row_id", "answer_span", "trivial")
    unclassed = "Answers are not classes to cut by."
    defaults: Mapping[str, Any] = {
        **TEXTS,
        "question": "question",  # column with the questions
        "context": "context",  # column with the texts that have the answers
        "answers": "answers",  # column with the answers
        "max_length": 384,  # tokens of a window, with its question
        "stride": 128,  # tokens of a context that two windows share
        "max_answer": 30,  # the most tokens of an answer
    }

    @override
    def _readers(self) -> dict[str, Reader]:
        return {self.options["context"]: read_exact_text, self.options["answers"]: _read_answers}

    def answers(self) -> list[list[Answer]]:
        """The answers of rows, with their starts; an empty list for a question without any.

        Raises:
            DataError: an answer is not in its context, or not where the row says; or no training row has an answer.
        """
        columns, places = self.table.columns, self.table.places
        given = list(columns[self.label])
        if _NONE in columns:
            has_none = [bool(TRUTH.get(str(mark).lower())) for mark in columns[_NONE]]
            if unused := sum(map(bool, compress(given, has_none))):
                what = f"The answers of {counted(unused, 'question')} with '{_NONE}' true are not used"
                self._warnings.append(f"{what} ({FIELD}.ignore=[{_NONE}] uses them).")
            given = [[] if is_none else answers for is_none, answers in zip(has_none, given, strict=True)]
        found = [
            [_placed(answer, context, place) for answer in answers]
            for place, context, answers in zip(places, columns[self.options["context"]], given, strict=True)
        ]
        if not any(found[row] for row in self.splits["train"].tolist()):
            what = "No training row has an answer, so there is nothing to learn."
            raise DataError(what, field=f"{FIELD}.answers", value=self.label, remedy="Give rows with answers.")
        return found


def _read_answers(value: Any, where: str) -> list[Answer]:
    """The answers of a row. Raises DataError for a value of another form, and for an empty answer."""
    if value is None or value == "":
        return []
    cell = parse_literal(value) if isinstance(value, str) else None
    value = cell if isinstance(cell, dict) and "text" in cell else value  # an answer may be a list of a program
    if isinstance(value, Mapping):
        texts, starts = _listed(value.get("text")), _listed(value.get("answer_start"))
        if "text" not in value or (starts and len(starts) != len(texts)):
            what = f"there are {len(texts)} texts and {len(starts)} starts" if "text" in value else "there is no 'text'"
            raise DataError(f"{where}: {what}. Answers are {_FORMS}.", field="rows")
        return [_answer(text, start, where) for text, start in zip(texts, starts or [None] * len(texts), strict=True)]
    if isinstance(value, list | tuple):
        pairs = [
            (answer.get("text"), answer.get("answer_start")) if isinstance(answer, Mapping) else (answer, None)
            for answer in value
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


def _placed(answer: Answer, context: str, place: str) -> Answer:
    start = _find(answer.text, context) if answer.start is None else answer.start
    if start >= 0 and context.startswith(answer.text, start):
        return Answer(answer.text, start)
    where, remedy = "in the context", "Correct it, or leave the row out: an answer is a part of its context."
    if answer.start is not None:
        where = f"at character {answer.start} of the context"
        remedy = "Correct the start, or leave it out: the first place then counts."
    raise DataError(f"{place}: the answer '{answer.text[:60]}' is not {where}.", field=SOURCES, remedy=remedy)


def _find(text: str, context: str) -> int:
    """The first place of a text as whole words, or else as a part of some; -1 for none."""
    whole = re.search(rf"(?<!\w){re.escape(text)}(?!\w)", context)
    return context.find(text) if whole is None else whole.start()


# -- the recipe -------------------------------------------------------------------------------------------------------
def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read questions, contexts and answers, and find a tokenizer for them.

    Returns:
        For every split its rows: question and context by the names of their columns; the answers in `labels`, one empty
        text for none; the first and the last character of the first answer in `answer_span` ``[2]``, -1 for none; the
        scores of what needs no model in `trivial` ``[3]``; `row_id`.
    """
    table = QuestionRows(options, out)
    answers, chosen = table.answers(), table.options
    questions = table.texts_of("question")
    contexts = [str(context) for context in table.table.columns[chosen["context"]]]
    train = table.splits["train"].tolist()
    texts = (text for row in train for text in (questions[row], contexts[row]))
    tokenizer = find_tokenizer(chosen, texts, out, is_fast=True)
    out.info.update(
        {name: chosen[name] for name in ("question", "context", "max_length", "stride", "max_answer")},
        label=table.label,
        has_unanswerable=not all(answers[row] for row in train),
        **note_form({chosen["question"]: "text", chosen["context"]: "exact"}, chosen),
    )
    _require_room(questions, tokenizer, chosen, table.table.places)
    texts_of = [[answer.text for answer in accepted] or [""] for accepted in answers]
    usual, most = find_usual((questions[row], texts_of[row][0]) for row in train)
    spans = [_span(accepted[0]) if accepted else (-1, -1) for accepted in answers]
    nearest = map(find_nearest_sentence, questions, contexts)
    trivial = [
        [*score_answer(usual.get(question, most), texts), score_answer(sentence, texts)[1]]
        for question, sentence, texts in zip(questions, nearest, texts_of, strict=True)
    ]
    return table.rows(
        texts_of,
        {
            chosen["question"]: questions,
            chosen["context"]: contexts,
            "answer_span": list(np.array(spans, np.int64)),
            "trivial": list(np.array(trivial, np.float32)),
        },
    )


def _span(answer: Answer) -> tuple[int, int]:
    """The first and the last character of an answer that has its start."""
    start = answer.start or 0
    return start, start + len(answer.text) - 1


def _require_room(questions: Sequence[str], tokenizer: Any, info: Mapping[str, Any], places: Sequence[str]) -> None:
    """Refuse a question that leaves a window too few tokens for its context to go on."""
    most = info["max_length"] - info["stride"] - tokenizer.num_special_tokens_to_add(pair=True) - 1
    counts = map(len, tokenizer(list(questions), add_special_tokens=False, verbose=False)["input_ids"])
    for place, question, count in zip(places, questions, counts, strict=True):
        if count > most:
            what = f"{place}: the question '{question[:40]}' has {count} tokens, and a window of {info['max_length']}"
            what += f" tokens, {info['stride']} of them of the window before, has room for {max(most, 0)}."
            remedy = "Raise prepare.options.max_length, lower stride, or shorten the question."
            raise DataError(what, field=f"{FIELD}.max_length", value=info["max_length"], remedy=remedy)


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration; with adapters on request.

    Raises:
        ConfigError: transformers cannot load it.
    """
    chosen = choose(options, MODEL, field="train.model")
    return build_with_head(chosen, data, head="ForQuestionAnswering", task="QUESTION_ANS")


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch of windows: `input_ids`, `attention_mask` ``[windows, tokens]``, and the positions ``[windows]``.

    Beside them, and not for the model: the code points of `contexts` and `answers` ``[rows, characters]``, `limits`
    ``[rows, 2]``, the most tokens of an answer and whether there may be none, `trivial` ``[rows, 3]``, `owners`
    ``[windows]``, the row of a window, `nowhere` ``[windows]``, the token that stands for no
    answer, and `characters` ``[windows, tokens, 2]``, the first character of a token and the one behind its last one,
    -1 for a token that is not of a context.
    """
    info, tokenizer = data.info, kept_tokenizer(data)
    questions = [row[info["question"]] for row in rows]
    contexts = [row[info["context"]] for row in rows]
    _require_room(questions, tokenizer, info, [f"Row {number} of a batch" for number in range(len(rows))])
    encoded = tokenizer(
        questions,
        contexts,
        padding=True,
        truncation="only_second",
        max_length=info["max_length"],
        stride=info["stride"],
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    inputs = dict(encoded)
    owners, characters = inputs.pop("overflow_to_sample_mapping"), inputs.pop("offset_mapping")
    parts = [[part == 1 for part in encoded.sequence_ids(window)] for window in range(len(owners))]
    characters = characters.masked_fill(~torch.tensor(parts)[..., None], -1)
    nowhere = (inputs["input_ids"] == tokenizer.cls_token_id).int().argmax(dim=1)  # the first token where there is none
    batch = {
        "contexts": encode_texts(contexts),
        "limits": torch.tensor([[info["max_answer"], info["has_unanswerable"]]] * len(rows)),
        "owners": owners,
        "characters": characters,
        "nowhere": nowhere,
        **inputs,
    }
    if "answer_span" in rows[0]:
        spans = torch.tensor(np.stack([row["answer_span"] for row in rows]))
        batch["start_positions"], batch["end_positions"] = _find_tokens(spans[owners], characters, nowhere)
        batch["answers"] = encode_texts(["\0".join(row["labels"]) for row in rows])
        batch["trivial"] = torch.tensor(np.stack([row["trivial"] for row in rows]))
    return batch


def _find_tokens(spans: Tensor, characters: Tensor, nowhere: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last token of the answer in windows ``[windows]``; `nowhere` in one without all of it."""
    first, last = spans[:, :1], spans[:, 1:]
    begin, behind = characters.unbind(dim=-1)
    covers = (begin <= last) & (behind > first) & (begin >= 0)
    known = begin >= 0
    is_whole = (begin.masked_fill(~known, 1 << 62).amin(dim=1) <= first[:, 0]) & (behind.amax(dim=1) > last[:, 0])
    is_there = (first[:, 0] >= 0) & is_whole & covers.any(dim=1)
    start = covers.int().argmax(dim=1)
    end = covers.shape[1] - 1 - covers.int().flip(1).argmax(dim=1)
    return torch.where(is_there, start, nowhere), torch.where(is_there, end, nowhere)


class Trainer(RowTrainer):
    """A Trainer whose predictions are answers of rows, and not positions in windows."""

    kept = ("contexts", "limits", "owners", "characters", "nowhere", "answers", "trivial")

    @override
    def predict_rows(self, outputs: Any, labels: Any, kept: Mapping[str, Tensor]) -> tuple[Any, Any]:
        texts = decode_texts(kept["contexts"])
        found = [_best_answer(outputs, kept, row) for row in range(len(texts))]
        answers = [text[begin:behind] for text, (begin, behind, _) in zip(texts, found, strict=True)]
        device = outputs[0].device
        sure = torch.tensor([confidence for _, _, confidence in found], device=device)
        predictions = encode_texts(answers).to(device), sure
        if "answers" not in kept:
            return predictions, None
        true = [text.split("\0") for text in decode_texts(kept["answers"])]
        own = torch.tensor(
            [score_answer(answer, accepted) for answer, accepted in zip(answers, true, strict=True)], device=device
        )
        answerable = torch.tensor([[float(accepted != [""])] for accepted in true], device=device)
        return predictions, (kept["answers"], torch.cat((own, kept["trivial"], answerable), dim=1))


def _best_answer(outputs: Sequence[Tensor], kept: Mapping[str, Tensor], row: int) -> tuple[int, int, float]:
    """The first character of the best answer of a row, the one behind its last one, and its probability."""
    mine = kept["owners"] == row
    longest, may_be_none = kept["limits"][row].tolist()
    characters, nowhere = kept["characters"][mine], kept["nowhere"][mine]
    windows = torch.arange(len(nowhere), device=nowhere.device)
    is_context = characters[..., 0] >= 0
    is_possible = is_context.clone()
    is_possible[windows, nowhere] |= bool(may_be_none)
    if not is_possible.any():
        return 0, 0, 0.0
    # Over all windows of the row together.
    starts, ends = (output[mine].float().masked_fill(~is_possible, -torch.inf) for output in outputs)
    starts, ends = starts - starts.logsumexp((0, 1)), ends - ends.logsumexp((0, 1))
    none = (starts + ends)[windows, nowhere].amin() if may_be_none else torch.tensor(-torch.inf)
    tokens = starts.shape[1]
    is_span = torch.ones(tokens, tokens, dtype=torch.bool, device=starts.device).triu().tril(longest - 1)
    both = is_context[:, :, None] & is_context[:, None] & is_span
    scores = (starts[:, :, None] + ends[:, None]).masked_fill(~both, -torch.inf)
    best = int(scores.argmax())
    score = scores.flatten()[best]
    if none > score or not torch.isfinite(score):
        return 0, 0, float(none.exp())
    window, start, end = best // tokens**2, best // tokens % tokens, best % tokens
    return int(characters[window, start, 0]), int(characters[window, end, 1]), float(score.exp())


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Average the scores ``[rows, 6]`` (`NAMES`), and compare them with those of answers that need no model.

    Where there are questions with an answer and without one, both have a separate metric.
    """
    scores = np.asarray(evaluation.label_ids[1], np.float64)
    means = dict(zip(NAMES, scores.mean(axis=0).tolist(), strict=True))
    measured = {
        "exact_match_over_usual": means["exact_match"] - means["usual_exact_match"],
        "f1_over_usual": means["f1"] - means["usual_f1"],
        "f1_over_sentence": means["f1"] - means["sentence_f1"],
    }
    if 0 < means.pop("answerable") < 1:
        has_answer = scores[:, NAMES.index("answerable")] > 0
        measured["answerable_f1"] = float(scores[has_answer, 1].mean())
        measured["unanswerable_f1"] = float(scores[~has_answer, 1].mean())
    return means | measured


def prediction_columns(predictions: Sequence[np.ndarray], data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn code points ``[rows, characters]`` and probabilities ``[rows]`` into texts, empty for no answer."""
    texts, confidence = predictions
    return {
        "prediction": [text.strip() for text in decode_texts(texts)],
        "confidence": np.asarray(confidence, np.float32).tolist(),
    }
