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

To replace a function, import the others into a file of your own, and define yours behind them::

    from trainer_lib.recipes.question_answering import *
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import DataError
from trainer_lib.recipes.answered_questions import QuestionRows
from trainer_lib.recipes.classifier_models import MODEL, build_with_head
from trainer_lib.recipes.model_places import PlacedModel, TokenizerOptions, one_of
from trainer_lib.recipes.option_names import choose
from trainer_lib.recipes.row_trainer import RowTrainer
from trainer_lib.recipes.table_form import note_form
from trainer_lib.recipes.tabular_rows import FIELD
from trainer_lib.recipes.text_tensors import decode_texts, encode_texts
from trainer_lib.recipes.tokenizing import (
    keep_tokenizer,
    kept_tokenizer,
    learn_tokenizer,
    load_tokenizer,
    require_fast,
)

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

# Scores of answers, as SQuAD has them, and of answers that need no model (Rajpurkar et al., 2016 and 2018).
#
# Texts are compared in small letters, without punctuation and without the articles a, an and the. Where nothing else
# is left of a text, it is compared as it is.


NAMES = ("exact_match", "f1", "usual_exact_match", "usual_f1", "sentence_f1", "answerable")
"""What `measure_answers` takes of each row."""
_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")  # of ASCII
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def score_answer(predicted: str, answers: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 over words, each with the best of the answers; an empty text says that there is no answer."""
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


def find_usual_answers(rows: Iterable[tuple[str, str]]) -> tuple[dict[str, str], str]:
    """Question -> its most frequent answer in training, and the most frequent one of all; of equal ones the first."""
    each: dict[str, Counter[str]] = {}
    every: Counter[str] = Counter()
    for question, answer in rows:
        each.setdefault(question, Counter())[answer] += 1
        every[answer] += 1
    return {question: _most_frequent(counts) for question, counts in each.items()}, _most_frequent(every)


def _most_frequent(counts: Counter[str]) -> str:
    return min(counts, key=lambda answer: (-counts[answer], answer))


def find_nearest_sentence(question: str, context: str) -> str:
    """The first sentence, or line, of the context that has most words of the question."""
    asked = set(_words(question))
    return max(_SENTENCE.split(context), key=lambda sentence: len(asked & set(_words(sentence))))


def score_trivial(question: str, context: str, answers: Sequence[str], usual: str) -> list[float]:
    """Exact match and F1 of the usual answer, and F1 of the nearest sentence."""
    return [*score_answer(usual, answers), score_answer(find_nearest_sentence(question, context), answers)[1]]


def measure_answers(scores: np.ndarray) -> dict[str, float]:
    """Means of the scores ``[rows, 6]`` (`NAMES`), and what the model is better by than what needs no model.

    Where there are questions with an answer and without one, both have a metric of their own.
    """
    means = dict(zip(NAMES, scores.astype(np.float64).mean(axis=0).tolist(), strict=True))
    has_answer = scores[:, NAMES.index("answerable")] > 0
    share = means.pop("answerable")
    more: dict[str, float] = {}
    if 0 < share < 1:
        more = {
            "answerable_f1": float(scores[has_answer, 1].mean()),
            "unanswerable_f1": float(scores[~has_answer, 1].mean()),
        }
    return {
        **means,
        **more,
        "exact_match_over_usual": means["exact_match"] - means["usual_exact_match"],
        "f1_over_usual": means["f1"] - means["usual_f1"],
        "f1_over_sentence": means["f1"] - means["sentence_f1"],
    }


class Options(TokenizerOptions):
    """The options of `prepare`; `rename`, `id`, `files` and `split` are as of a table."""

    question: NotRequired[str]
    """Column with the questions."""
    context: NotRequired[str]
    """Column with the texts that have the answers."""
    answers: NotRequired[str]
    """Column with the answers."""
    max_length: NotRequired[int]
    """Tokens of a window, with its question."""
    stride: NotRequired[int]
    """Tokens of a context that two windows share."""
    max_answer: NotRequired[int]
    """The most tokens of an answer."""


def prepare(options: Options, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read questions, contexts and answers, and find a tokenizer for them.

    Returns:
        For every split its rows: question and context by the names of their columns; the answers in `labels`, one empty
        text for none; the first and the last character of the first answer in `answer_span` ``[2]``, -1 for none; the
        scores of what needs no model in `trivial` ``[3]``; `row_id`.
    """
    table = QuestionRows(options, out, classes=False)
    answers, chosen = table.answers(), table.options
    questions = table.table.texts(chosen["question"])
    contexts = [str(each) for each in table.table.columns[chosen["context"]]]
    train = table.splits["train"].tolist()
    place = one_of(chosen, field=FIELD)
    if place is None:
        texts = [text for row in train for text in (questions[row], contexts[row])]
        tokenizer = learn_tokenizer(texts, vocabulary=chosen["vocabulary"], max_length=chosen["max_length"])
    else:
        tokenizer = load_tokenizer(place, pad_token=chosen["pad_token"], field=FIELD)
        require_fast(tokenizer, place, field=FIELD)
    out.info.update(
        {name: chosen[name] for name in ("question", "context", "max_length", "stride", "max_answer")},
        label=table.label,
        has_unanswerable=not all(answers[row] for row in train),
        vocabulary=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=keep_tokenizer(tokenizer, out),
        **note_form({chosen["question"]: "text", chosen["context"]: "exact"}, chosen),
    )
    _require_room(questions, tokenizer, chosen, table.table.places)
    texts_of = [[answer.text for answer in each] or [""] for each in answers]
    usual, most = find_usual_answers((questions[row], texts_of[row][0]) for row in train)
    firsts = [each[0] if each else None for each in answers]
    spans = [(-1, -1) if first is None else (first.start, first.start + len(first.text) - 1) for first in firsts]
    trivial = [
        score_trivial(question, context, texts, usual.get(question, most))
        for question, context, texts in zip(questions, contexts, texts_of, strict=True)
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


def _require_room(questions: Sequence[str], tokenizer: Any, info: Mapping[str, Any], places: Sequence[str]) -> None:
    """Refuse a question that leaves a window too few tokens for its context to go on."""
    most = info["max_length"] - info["stride"] - tokenizer.num_special_tokens_to_add(pair=True) - 1
    counts = map(len, tokenizer(list(questions), add_special_tokens=False, verbose=False)["input_ids"])
    for place, question, count in zip(places, questions, counts, strict=True):
        if count > most:
            raise DataError(
                f"{place}: the question '{question[:40]}' has {count} tokens, and a window of "
                f"{info['max_length']} tokens, {info['stride']} of them of the window before, has room for "
                f"{max(most, 0)}.",
                field=f"{FIELD}.max_length",
                value=info["max_length"],
                remedy="Raise prepare.options.max_length, lower stride, or shorten the question.",
            )


def build_model(options: PlacedModel, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration; with adapters if `lora` is given.

    Raises:
        ConfigError: transformers cannot load it.
    """
    defaults = {name: MODEL[name] for name in ("pretrained", "folder", "config", "lora")}
    chosen = choose(options, defaults, field="train.model")
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
    """The first and the last token of the answer in each window ``[windows]``; `nowhere` where it has not all of it."""
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
            [score_answer(answer, each) for answer, each in zip(answers, true, strict=True)], device=device
        )
        answerable = torch.tensor([[float(each != [""])] for each in true], device=device)
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
    starts, ends = (each[mine].float().masked_fill(~is_possible, -torch.inf) for each in outputs)
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
    """Measure the scores ``[rows, 6]`` of answers, beside those of answers that need no model."""
    return measure_answers(np.asarray(evaluation.label_ids[1]))


def prediction_columns(predictions: Sequence[np.ndarray], data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn code points ``[rows, characters]`` and probabilities ``[rows]`` into texts, empty for no answer."""
    texts, confidence = predictions
    return {
        "prediction": [text.strip() for text in decode_texts(texts)],
        "confidence": np.asarray(confidence, np.float32).tolist(),
    }
