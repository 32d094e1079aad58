"""New rows get the types of prepared ones, and the same values whether they are converted together or one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainer_lib.data.column import Column
from trainer_lib.data.given_rows import GivenRows
from trainer_lib.data.whole_columns import convert_together
from trainer_lib.errors import DataError

VALUES: dict[str, Callable[[random.Random], Any]] = {
    "int64": lambda draw: draw.choice([0, -1, True, 2**53 + 1, 2**62]),
    "int8": lambda draw: draw.randrange(-128, 128),
    "uint64": lambda draw: draw.choice([0, 2**63, 2**64 - 1]),
    "bool": lambda draw: draw.choice([True, False, 1]),
    "float32": lambda draw: draw.choice([draw.random(), 1, True, 2**60 + 1, 1e300, -math.inf, 16777217]),
    "float64": lambda draw: draw.choice([draw.random(), 3, 2**53 + 1]),
    "string": lambda draw: draw.choice(["", "a", "é"]),
    "int64[*]": lambda draw: [draw.randrange(9) for _ in range(draw.randrange(1, 5))],
    "int32[*]": lambda draw: [draw.randrange(9) for _ in range(3)],
    "float32[*]": lambda draw: [draw.random() for _ in range(draw.randrange(4))],
    "float32[2,2]": lambda draw: np.full((2, 2), draw.random()),
    "string[*]": lambda draw: ["x"] * draw.randrange(3),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # 1e300 as a float32, in both ways
@pytest.mark.parametrize("kind", VALUES)
def test_rows_together_have_the_values_of_rows_alone(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(20):
        rows = [{"v": VALUES[kind](draw)} for _ in range(draw.randrange(1, 12))]
        together, alone = GivenRows(rows, {"v": kind}), [GivenRows([row], {"v": kind})[0] for row in rows]
        assert len(together) == len(rows)
        for mine, expected in zip(together[:], alone, strict=True):
            assert type(mine["v"]) is type(expected["v"])
            assert getattr(mine["v"], "dtype", None) == getattr(expected["v"], "dtype", None)
            assert np.array_equal(mine["v"], expected["v"])
        assert str(together[-1]) == str(alone[-1])


def test_most_columns_are_converted_together() -> None:
    draw = random.Random(0)
    slow = {kind for kind in VALUES if convert_together([VALUES[kind](draw)] * 3, Column.parse(kind)) is None}
    assert slow <= {"float32", "float64", "string[*]"}  # great numbers, and texts


@pytest.mark.parametrize(
    ("kind", "good", "bad", "words"),
    [
        ("int64", 1, 1.5, "not int64 but float64"),
        ("int64", 1, "4", "not int64 but <U1"),
        ("int8", 1, 200, "does not fit into int8"),
        ("int64", 1, 2**70, "column 'v'"),
        ("float32", 1.0, None, "not float32"),
        ("float32", 1.0, [1.0], "the shape is"),
        ("string", "a", 1, "a value of type str is needed"),
        ("int64[*]", [1, 2], [[1], [2]], "an array of one dimension"),
        ("int64[*]", [1, 2], "12", "not int64"),
        ("int64[*]", [1], [], "not int64"),
        ("int64[*]", [1, 2], {1: 2}, "not int64"),
        ("float32[*]", [1.0], [1.0, "a"], "not float32"),
        ("float32[2,2]", [[1, 2], [3, 4]], [[1, 2]], "the shape is"),
    ],
)
def test_the_first_bad_row_among_good_ones_is_named(kind: str, good: Any, bad: Any, words: str) -> None:
    rows = [{"v": good}, {"v": good}, {"v": bad}, {"v": bad}]
    with pytest.raises(DataError, match=words) as refused:
        GivenRows(rows, {"v": kind}, names=["v"], place="file.jsonl, row {}".format)
    assert "file.jsonl, row 2, column 'v'" in str(refused.value)


def test_a_sample_may_be_changed_without_changing_the_row() -> None:
    rows = GivenRows(
        [{"v": [1.0, 2.0], "w": [1]}, {"v": [3.0, 4.0], "w": [2, 3]}], {"v": "float32[*]", "w": "int64[*]"}
    )
    for sample in (rows[0], *rows[:], *rows.__getitems__([1, 0])):
        sample["v"] *= 0
        sample["w"] *= 0
    assert [row["v"].tolist() for row in rows[:]] == [[1, 2], [3, 4]]
    assert [row["w"].tolist() for row in rows[:]] == [[1], [2, 3]]
