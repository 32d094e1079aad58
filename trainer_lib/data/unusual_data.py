"""What the statistics of prepared splits show that their user may not expect: over-long rows, classes, distributions.

Statistics are those of `data.statistics`: they hold at most 100 counts for each column, however many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

LABELS = ("label", "labels", "class", "target")
"""Columns whose values are compared between splits."""
MOST = 10
"""Warnings that are given."""
_CLASSES = 5  # that one warning names
_ROWS = 5.0  # that a split would have of a class if its rows were drawn like the others': fewer may be chance
_APART = 0.2  # share of rows that have another label, beyond what chance makes
_INTEGERS = ("int", "uint")


def describe_unusual(
    statistics: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Mapping[str, str]], info: Mapping[str, Any]
) -> list[str]:
    """Sentences about what may be a mistake in the data, at most `MOST` and one that counts the others.

    Args:
        statistics: split -> column -> statistics.
        columns: split -> column -> type.
        info: what the recipe notes; its `max_length` is the number of tokens that the model reads of a row.
    """
    texts = [*_list_long_rows(statistics, columns, info.get("max_length"))]
    for column in LABELS:
        counts = {
            name: split[column]["counts"] for name, split in statistics.items() if "counts" in split.get(column, {})
        }
        texts += _compare_labels(column, counts)
    left = len(texts) - MOST
    return texts if left <= 0 else [*texts[:MOST], f"{left:,} more warnings of this kind are left out."]


def _list_long_rows(
    statistics: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Mapping[str, str]], most: object
) -> Iterator[str]:
    if not isinstance(most, int) or isinstance(most, bool):
        return
    for split, found in statistics.items():
        for name, one in found.items():
            # Of integers only: texts are counted in characters, and lists of other numbers are no tokens.
            is_tokens = columns.get(split, {}).get(name, "").startswith(_INTEGERS)
            if is_tokens and one.get("longest", 0) > most:
                yield (
                    f"The longest row of split '{split}' has {one['longest']:,} values in column '{name}', and the "
                    f"recipe's max_length is {most:,}."
                )


def _compare_labels(column: str, counts: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Compare each split with `train`, or with the largest one where none has that name."""
    first = "train" if "train" in counts else max(counts, key=lambda name: sum(counts[name].values()), default=None)
    if first is None:
        return
    most = sum(counts[first].values())
    shares = {value: rows / most for value, rows in counts[first].items()}
    if unknown := {value for own in counts.values() for value in own} - shares.keys():
        yield f"Split '{first}' has no row whose '{column}' is {_name_some(unknown)}, and another split has."
    for name, own in counts.items():
        rows = sum(own.values())
        absent = {value: share for value, share in shares.items() if value not in own and share * rows >= _ROWS}
        if absent:
            yield (
                f"Split '{name}' has no row whose '{column}' is {_name_some(absent)}, and "
                f"{_percent(sum(absent.values()))} of the rows of '{first}' have."
            )
            continue
        apart = {value: own.get(value, 0) / rows - shares.get(value, 0.0) for value in {**shares, **own}}
        chance = 0.8 * math.sqrt(len(apart) / min(rows, most))  # twice what is to be expected of equal splits
        if sum(map(abs, apart.values())) / 2 > _APART + chance:
            value = max(apart, key=lambda each: (abs(apart[each]), each))
            yield (
                f"Labels are distributed differently in split '{name}': '{column}' is {value} in "
                f"{_percent(own.get(value, 0) / rows)} of its rows, and in {_percent(shares.get(value, 0.0))} of "
                f"those of '{first}'."
            )


def _name_some(found: Iterable[str]) -> str:
    values = sorted(found)
    more = len(values) - _CLASSES
    if more > 0:
        return f"{', '.join(values[:_CLASSES])} or one of {more:,} more"
    return " or ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else values)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
