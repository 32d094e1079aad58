"""Scores of answers, as SQuAD has them, and of answers that need no model (Rajpurkar et al., 2016 and 2018).

Texts are compared in small letters, without punctuation and without the articles a, an and the. Where nothing else is
left of a text, it is compared as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

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
