"""Metrics of tagged words, each beside the tag that the word has had most often in training.

A word that training has not seen gets the most frequent tag of all. Entities are those of the tags B-NAME, I-NAME and
O: an entity counts where its name and both of its ends are right (Tjong Kim Sang and De Meulder, CoNLL-2003).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

_OUTSIDE = "O"


def has_entities(classes: Sequence[str]) -> bool:
    """Whether the tags are O, B-NAME and I-NAME."""
    return _OUTSIDE in classes and all(name == _OUTSIDE or name[:2] in ("B-", "I-") for name in classes)


def find_usual_tags(rows: Iterable[tuple[Sequence[str], Sequence[int]]]) -> tuple[dict[str, int], int]:
    """Word -> its most frequent tag, and the most frequent tag of all; of equally frequent ones the first by number."""
    words: dict[str, Counter[int]] = {}
    every: Counter[int] = Counter()
    for texts, tags in rows:
        for word, tag in zip(texts, tags, strict=True):
            words.setdefault(word, Counter())[tag] += 1
            every[tag] += 1
    return {word: _most_frequent(counts) for word, counts in words.items()}, _most_frequent(every)


def _most_frequent(counts: Counter[int]) -> int:
    return min(counts, key=lambda tag: (-counts[tag], tag))


def measure_tags(
    predicted: np.ndarray, truth: np.ndarray, usual: np.ndarray, classes: Sequence[str]
) -> dict[str, float]:
    """Accuracy and macro F1 over words, those of the usual tags, and F1 of entities where the tags have some.

    `accuracy_over_usual` and `entity_f1_over_usual` are what the model is better by. Tags that neither occur nor are
    predicted do not count in the macro F1.

    Args:
        predicted, truth, usual: numbers of tags ``[rows, words]``, negative where a row has no word.
    """
    words = truth >= 0
    right, own, expected = (predicted == truth)[words], predicted[words], truth[words]
    both = np.bincount(own, minlength=len(classes)) + np.bincount(expected, minlength=len(classes))
    hits = np.bincount(expected[right], minlength=len(classes))
    accuracy, of_usual = float(right.mean()), float((usual == truth)[words].mean())
    found = {
        "accuracy": accuracy,
        "macro_f1": float((2 * hits[both > 0] / both[both > 0]).mean()),
        "usual_accuracy": of_usual,
        "accuracy_over_usual": accuracy - of_usual,
        "words": float(words.sum()),
    }
    if not has_entities(classes):
        return found
    precision, recall, f1 = _score_entities(predicted, truth, tuple(classes))
    usual_f1 = _score_entities(usual, truth, tuple(classes))[2]
    return {
        **found,
        "entity_precision": precision,
        "entity_recall": recall,
        "entity_f1": f1,
        "usual_entity_f1": usual_f1,
        "entity_f1_over_usual": f1 - usual_f1,
    }


def _score_entities(predicted: np.ndarray, truth: np.ndarray, classes: tuple[str, ...]) -> tuple[float, float, float]:
    rows = zip(predicted, truth, strict=True)
    counts = np.array([_count_entities(own.tobytes(), other.tobytes(), own.dtype.str, other.dtype.str, classes)
                       for own, other in rows]).sum(axis=0)  # fmt: skip
    right, guessed, real = (int(each) for each in counts)
    precision, recall = right / max(guessed, 1), right / max(real, 1)
    return precision, recall, 2 * right / max(guessed + real, 1)


@lru_cache(1 << 16)  # a bootstrap measures each row many times
def _count_entities(
    predicted: bytes, truth: bytes, kind: str, other: str, classes: tuple[str, ...]
) -> tuple[int, int, int]:
    """Entities of a row that are right, predicted and real."""
    real = np.frombuffer(truth, other)
    own = np.frombuffer(predicted, kind)[real >= 0]
    found, wanted = _entities(own.tolist(), classes), _entities(real[real >= 0].tolist(), classes)
    return len(found & wanted), len(found), len(wanted)


def _entities(tags: Sequence[int], classes: Sequence[str]) -> set[tuple[int, int, str]]:
    """First word, word behind the last and name of each entity; an I- behind another name begins one."""
    found: set[tuple[int, int, str]] = set()
    start, name = 0, ""
    for place, tag in enumerate([*(classes[tag] for tag in tags), _OUTSIDE]):
        if name and (tag == _OUTSIDE or tag[:2] == "B-" or tag[2:] != name):
            found.add((start, place, name))
            name = ""
        if tag != _OUTSIDE and not name:
            start, name = place, tag[2:]
    return found
