"""Rows by their lengths, so that those of a batch need little padding, and their results in the rows' own order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer_lib.base.suggestions import counted, nearest
from trainer_lib.errors import DataError


def require_column(names: Sequence[str], column: str, *, field: str) -> None:
    """Raise DataError for a column that rows do not have."""
    if column not in names:
        near = nearest(column, names)
        raise DataError(
            f"The rows have no column '{column}'" + (f"; the nearest is '{near}'." if near else "."),
            field=field,
            value=column,
            remedy=f"Give one of {', '.join(names)}.",
        )


def longest_first(values: Sequence[Any]) -> list[int]:
    """The places of values, those of the longest first; a number is a length itself. Equal ones keep their order."""
    lengths = [_length(value) for value in values]
    return sorted(range(len(lengths)), key=lambda place: -lengths[place])


def _length(value: Any) -> float:
    # What a column cannot hold is refused later, when the row is converted.
    return len(value) if hasattr(value, "__len__") else value if isinstance(value, int | float) else 0


class Reordered:
    """Some rows of a dataset in another order.

    Args:
        dataset: map-style, with rows that are mappings.
        order: places in the dataset.
    """

    is_pure = True  # as what `predict` reads

    def __init__(self, dataset: Any, order: Sequence[int]) -> None:
        self._dataset = dataset
        self._order = order
        self.column_names = list(dataset.column_names)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._order[index]]


def in_order(array: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Results ``[rows, …]`` by the rows' own order.

    Args:
        order: the place that each of them has among the rows.

    Raises:
        DataError: there is not one for each row.
    """
    if len(array) != len(order):
        values, rows = counted(len(array), "value"), counted(len(order), "row")
        raise DataError(
            f"The model returned {values} for {rows}: whose they are is not known.",
            field="sort_by",
            remedy="Return a value for each row, or leave sort_by out.",
        )
    return np.asarray(array)[np.argsort(np.asarray(order), kind="stable")]
