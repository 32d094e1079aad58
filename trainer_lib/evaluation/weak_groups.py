"""The subgroups of a split's rows on which a model errs most, found among the values of all columns.

Subgroups are tested against all other rows: shares of wrong classes by Fisher's exact test, absolute errors by
Welch's. The p-values are adjusted for the number of subgroups (Holm, 1979), so the worst of many is not taken for news.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

ENOUGH, SHOWN = 30, 3
"""Rows that a subgroup and the rest must have, and how many subgroups are named."""
ROWS, COLUMNS = 20_000, 50
"""The most rows and columns that are looked at."""
_VALUES = 20  # of a column of texts; of more different ones the lengths count
_NUMBERS = 10  # of a column of numbers; more different ones are cut into four parts
_CHARS = 40  # of a value in a name
_QUARTERS = (0, 0.25, 0.5, 0.75, 1)


def find_weak_groups(
    predictions: Any, labels: Any, columns: Mapping[str, Callable[[np.ndarray], Iterable[Any]]], classes: Any = None
) -> dict[str, Any] | None:
    """The subgroups that are worse than the other rows, the most certain ones first; None where rows have no error.

    `columns`: column -> its values in some rows, by their numbers ``[some]``; `classes`: names, for subgroups by the
    predicted class.

    Returns:
        `error` ("error_rate" or "absolute_error"), the `rows` that were looked at, how many subgroups were `tested`,
        and `groups` as [name, rows, their error, that of the rest, adjusted p].
    """
    errors = _row_errors(predictions, labels)
    if errors is None or not np.isfinite(errors).all():
        return None
    rows = np.linspace(0, len(errors) - 1, min(len(errors), ROWS)).astype(np.int64)
    errors, is_share = errors[rows], errors.dtype == bool
    groups = [group for name in list(columns)[:COLUMNS] for group in _split(name, list(columns[name](rows)))]
    if is_share:
        predicted = np.asarray(predictions)[rows]
        predicted = predicted.argmax(axis=1) if predicted.ndim == 2 else predicted
        named = classes if isinstance(classes, list) else range(int(predicted.max()) + 1)
        groups += [(f"predicted: {name}", predicted == number) for number, name in enumerate(named)]
    groups = [(name, mask) for name, mask in groups if ENOUGH <= mask.sum() <= len(errors) - ENOUGH]
    if not groups:
        return None
    chances = np.array([_chance(errors[mask], errors[~mask]) for _, mask in groups])
    order = np.argsort(chances, kind="stable")
    adjusted = np.maximum.accumulate(np.minimum(chances[order] * np.arange(len(order), 0, -1), 1))
    weak = []
    for place, chance in zip(order, adjusted, strict=True):
        name, mask = groups[place]
        own, rest = float(errors[mask].mean()), float(errors[~mask].mean())
        if own > rest:
            weak.append([name, int(mask.sum()), *(float(f"{number:.6g}") for number in (own, rest, chance))])
    error = "error_rate" if is_share else "absolute_error"
    return {"error": error, "rows": len(errors), "tested": len(groups), "groups": weak[:SHOWN]}


def _row_errors(predictions: Any, labels: Any) -> np.ndarray | None:
    """Whether the rows' classes are wrong, or how far their numbers are off; None for other outputs."""
    outputs, truth = np.asarray(predictions), np.asarray(labels)
    if truth.dtype.kind in "iu" and truth.ndim == 1 and len(outputs) == len(truth):
        guessed = outputs.argmax(axis=1) if outputs.ndim == 2 else outputs
        return np.asarray(guessed != truth) if guessed.dtype.kind in "iu" else None
    if truth.dtype.kind == outputs.dtype.kind == "f" and outputs.size == truth.size == len(truth):
        return np.asarray(np.abs(outputs.reshape(-1).astype(np.float64) - truth.reshape(-1)))
    return None


def _chance(own: np.ndarray, rest: np.ndarray) -> float:
    """The probability of so great an error of some rows if they were like the rest."""
    from scipy import stats

    if own.dtype == bool:
        total = len(own) + len(rest)
        return float(stats.hypergeom.sf(own.sum() - 1, total, own.sum() + rest.sum(), len(own)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of errors that are all equal
        chance = float(stats.ttest_ind(own, rest, equal_var=False, alternative="greater").pvalue)
    return chance if np.isfinite(chance) else 1.0


def _split(column: str, values: list[Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The subgroups by a column: a name, and which rows are in it."""
    first = values[0]
    if all(isinstance(value, str) for value in values):
        different = sorted(set(values))
        if len(different) <= _VALUES:
            texts = np.array(values, object)
            for text in different:
                yield f"{column}: {text[:_CHARS] or '(empty)'}", np.asarray(texts == text)
            return
    if isinstance(first, str | list) or (isinstance(first, np.ndarray) and first.ndim == 1):
        yield from _quarters(f"length of {column}", np.array([len(value) for value in values], np.float64))
    elif isinstance(first, bool | int | float):
        numbers = np.array(values, np.float64)
        different = np.unique(numbers[np.isfinite(numbers)]).tolist()
        if len(different) > _NUMBERS:
            yield from _quarters(column, numbers)
        else:
            yield from ((f"{column}: {number:.6g}", numbers == number) for number in different)
        yield f"{column}: (missing)", np.isnan(numbers)


def _quarters(name: str, numbers: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    known = numbers[np.isfinite(numbers)]
    edges = np.unique(np.quantile(known, _QUARTERS)) if len(known) else known
    for low, high in itertools.pairwise(edges):
        is_last = high == edges[-1]
        mask = (numbers >= low) & ((numbers <= high) if is_last else (numbers < high))
        yield f"{name}: {low:.4g} to {'' if is_last else 'below '}{high:.4g}", mask
