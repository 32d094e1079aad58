"""Rows are sorted by length, and their results come back in the rows' own order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trainer_lib.data.by_length import in_order, longest_first, require_column
from trainer_lib.errors import DataError


def test_results_of_sorted_rows_come_back_in_order() -> None:
    draw = random.Random(0)
    rows = [[draw.random()] * draw.randrange(9) for _ in range(50)]
    order = longest_first(rows)
    lengths = [len(rows[place]) for place in order]
    assert lengths == sorted(lengths, reverse=True)
    results = np.array([[sum(rows[place]), place] for place in order])
    assert in_order(results, order).tolist() == [[sum(row), place] for place, row in enumerate(rows)]


def test_a_number_is_a_length_and_equal_lengths_keep_their_order() -> None:
    assert longest_first([2, 5, 2.5, 5]) == [1, 3, 2, 0]
    assert longest_first(["", "ab", np.zeros(3), "cd", None]) == [2, 1, 3, 0, 4]


def test_what_has_no_result_for_each_row_is_refused() -> None:
    with pytest.raises(DataError, match="returned 2 values for 3 rows"):
        in_order(np.zeros(2), [2, 0, 1])
    with pytest.raises(DataError, match="no column 'text'; the nearest is 'texts'"):
        require_column(["texts"], "text", field="predict.sort_by")
