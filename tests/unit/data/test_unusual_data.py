"""What the statistics of prepared splits show that their user may not expect."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_lib.data.unusual_data import MOST, describe_unusual


def _splits(counts: dict[str, dict[str, int]], column: str = "label") -> dict[str, Any]:
    return {name: {column: {"rows": sum(each.values()), "counts": each}} for name, each in counts.items()}


@pytest.mark.parametrize(
    ("counts", "texts"),
    [
        ({"train": {"0": 500, "1": 500}, "test": {"0": 52, "1": 48}}, []),
        ({"train": {"0": 500, "1": 500}, "test": {"0": 6, "1": 1}}, []),  # seven rows show little
        ({"train": {"0": 500, "1": 500}}, []),
        ({"a": {"0": 60, "1": 40}, "b": {"0": 600, "1": 400}}, []),
        (
            {"a": {"0": 5, "1": 95}, "b": {"0": 600, "1": 400}},
            [
                "Labels are distributed differently in split 'a': 'label' is 1 in 95 % of its rows, and in 40 % of "
                "those of 'b'."
            ],
        ),
        ({"train": {"0": 990, "1": 10}, "test": {"0": 20}}, []),  # a fifth of a row was to be expected
        (
            {"train": {"0": 500, "1": 300, "2": 200}, "test": {"0": 60, "1": 40}},
            ["Split 'test' has no row whose 'label' is 2, and 20 % of the rows of 'train' have."],
        ),
        (
            {"train": {"0": 50, "1": 50}, "test": {"0": 9, "1": 9, "2": 1}},
            ["Split 'train' has no row whose 'label' is 2, and another split has."],
        ),
        (
            {"train": {"0": 500, "1": 500}, "validation": {"0": 51, "1": 49}, "test": {"0": 10, "1": 90}},
            [
                "Labels are distributed differently in split 'test': 'label' is 1 in 90 % of its rows, and in 50 % of "
                "those of 'train'."
            ],
        ),
    ],
)
def test_labels(counts: dict[str, dict[str, int]], texts: list[str]) -> None:
    assert describe_unusual(_splits(counts), {}, {}) == texts


def test_columns_that_are_not_labels_may_differ() -> None:
    statistics = _splits({"train": {"2020": 500}, "test": {"2021": 500}}, "year")
    assert describe_unusual(statistics, {}, {}) == []
    many = {split: {"label": {"rows": 500, "min": 0, "max": 200}} for split in ("train", "test")}  # not counted
    assert describe_unusual(many, {}, {}) == []


@pytest.mark.parametrize("missing", [1, 12])
def test_classes_are_named_some_at_most(missing: int) -> None:
    some = {str(number): 100 for number in range(20)}
    [text] = describe_unusual(_splits({"train": some, "test": dict(list(some.items())[missing:])}), {}, {})
    words = "0, and" if missing == 1 else "0, 1, 10, 11, 2 or one of 7 more, and"
    assert text.startswith(f"Split 'test' has no row whose 'label' is {words}")


def test_rows_that_are_longer_than_the_recipe_says() -> None:
    statistics = {
        "train": {name: {"rows": 9, "shortest": 1, "longest": 700, "elements": 99} for name in ("x", "y", "z")}
    }
    columns = {"train": {"x": "int64[*]", "y": "string", "z": "float32[*]"}}
    for length in (None, 700, "700", True):
        assert describe_unusual(statistics, columns, {"max_length": length}) == []
    [text] = describe_unusual(statistics, columns, {"max_length": 512})
    assert text == "The longest row of split 'train' has 700 values in column 'x', and the recipe's max_length is 512."


def test_there_are_some_warnings_at_most() -> None:
    counts = {f"s{number}": {str(number): 1000} for number in range(100)}
    texts = describe_unusual(_splits(counts), {}, {})
    assert len(texts) == MOST + 1
    assert texts[-1] == f"{100 - MOST} more warnings of this kind are left out."
