"""Prepared data and predictions on disk: what goes in comes out, what cannot is named, a crash costs one file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_lib.data.rows.column import Column
from trainer_lib.data.rows.given_rows import GivenRows, parse_text
from trainer_lib.data.rows.parts import SplitParts
from trainer_lib.data.rows.predictions import write_split_predictions
from trainer_lib.data.rows.shards import ArrowSplit, FileCache, write_split
from trainer_lib.data.rows.source_parts import MOST, describe_unusual
from trainer_lib.errors import ConfigError, DamagedError, DataError, InfrastructureError
from trainer_lib.storage import Store

Row = Mapping[str, Any]


def write(folder: str | Path, rows: Any, **options: Any) -> dict[str, Any]:
    """Write a split called "train" and describe it as a request does."""
    store = Store.open(folder)
    split, files = write_split(store, "train", rows, **options)
    return {"url": store.url, "splits": {"train": split}, "info": {}, "files": list(map(asdict, files))}


def equal(left: Any, right: Any) -> bool:
    if isinstance(right, np.ndarray | list):
        return np.array_equal(left, right, equal_nan=np.asarray(right).dtype.kind == "f")
    return type(left) is type(right) and bool(left == right)


ROWS: list[dict[str, Any]] = [
    {
        "flag": bool(row % 2),
        "count": row,
        "share": row / 7,
        "text": "é" * row,
        "raw": bytes([row]) * (row % 3),
        "tokens": list(range(row % 4)),
        "image": np.full((2, 3), row, np.uint8),
        "mask": np.array([row % 2 == 0] * (row % 3)),
        "half": np.arange(row % 3, dtype=np.float16),
        "single": np.float32(row),
    }
    for row in range(23)
]


def test_rows_come_back_as_they_were_also_after_pickling(tmp_path: Path) -> None:
    data = write(tmp_path, iter(ROWS), shard_rows=10)
    split = ArrowSplit(data, "train")
    assert (len(split), len(data["splits"]["train"]["shards"])) == (23, 3)
    for index in (0, 9, 10, 22, -1):
        row = split[index]
        assert list(row) == list(ROWS[0]) == split.column_names
        for name, value in ROWS[index].items():
            assert equal(row[name], value.item() if isinstance(value, np.generic) else value), name
    assert split[3]["image"].dtype == np.uint8 and split[3]["half"].dtype == np.float16
    for index in (23, -24):
        with pytest.raises(IndexError):
            split[index]
    columns = data["splits"]["train"]["columns"]
    assert (columns["image"], columns["tokens"]) == ("uint8[2,3]", "int64[*]")
    assert (columns["text"], columns["raw"], columns["flag"], columns["row_id"]) == ("string", "bytes", "bool", "int64")
    split[5]["image"][:] = 0
    assert (split[5]["image"] == 5).all(), "a row is the reader's"
    assert pickle.loads(pickle.dumps(split))[7]["count"] == 7
    with pytest.raises(ConfigError) as caught:
        ArrowSplit(data, "valid")
    assert "train" in (caught.value.remedy or "")


def test_row_ids_count_unless_given(tmp_path: Path) -> None:
    counted = ArrowSplit(write(tmp_path / "a", [{"x": 1}] * 5, shard_rows=2), "train")
    assert counted.row_ids(1, 5).tolist() == [1, 2, 3, 4]
    given_ids = ArrowSplit(write(tmp_path / "b", [{"x": 1, "row_id": 10 * row} for row in range(5)]), "train")
    assert given_ids.row_ids(3, 5).tolist() == [30, 40] and given_ids.column_names == ["x"]
    texts = ArrowSplit(write(tmp_path / "c", [{"x": 1, "row_id": text} for text in ("007", "7")]), "train")
    assert texts.row_ids(0, 2).tolist() == ["007", "7"]
    with pytest.raises(DataError, match="row ids must be integers or texts"):
        write(tmp_path / "d", [{"x": 1, "row_id": 0.5}])


def test_lists_of_texts_come_back_and_new_rows_have_them_too(tmp_path: Path) -> None:
    rows = [{"words": ["a"] * (row % 3)} for row in range(7)]
    data = write(tmp_path, rows, shard_rows=3)
    split = ArrowSplit(data, "train")
    assert [split[row] for row in range(7)] == rows
    columns = data["splits"]["train"]["columns"]
    assert columns["words"] == "string[*]" and GivenRows([{"words": ("a", "b")}], columns)[0] == {"words": ["a", "b"]}
    assert parse_text("row 0", "words", '["a", "b"]', Column.parse("string[*]")) == ["a", "b"]
    for bad in ("a", [1], None):
        with pytest.raises(DataError, match="a list of texts is needed"):
            GivenRows([{"words": bad}], columns)
    with pytest.raises(DataError, match="row 7, column 'words': list does not fit"):
        write(tmp_path / "b", [*rows, {"words": [1]}], shard_rows=3)


def test_an_empty_split_or_one_without_a_name_is_refused(tmp_path: Path) -> None:
    nothing: list[Any] = [[], iter(())]
    for rows in nothing:
        with pytest.raises(DataError, match="split 'train' is empty"):
            write(tmp_path, rows)
    for name in ("", "../up", "a/b", ".hidden", "a b"):
        with pytest.raises(DataError, match="cannot be the name of a split"):
            write_split(Store.open(tmp_path), name, [{"x": 1}])


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ({"x": [1.0, float("nan")]}, "NaN in split 'train', row 13, column 'x'"),
        ({"x": [float("-inf")]}, "an infinite value in split 'train', row 13, column 'x'"),
        ({"x": ["a"]}, "row 13, column 'x': list does not fit"),
        ({"x": None}, "row 13, column 'x': NoneType does not fit"),
        ({"x": 1.0}, "row 13, column 'x': an array of shape"),
        ({"x": [[1.0]]}, "row 13, column 'x': an array of shape"),
        ({}, "row 13, column 'x': the column is missing"),
        ({"x": [1.0], "y": 2}, "row 13: not in the first row: y"),
        (7, "row 13: not a mapping"),
    ],
)
def test_what_does_not_fit_is_named_by_row_and_column(tmp_path: Path, bad: Any, what: str) -> None:
    rows = [{"x": [0.5] * (row % 3)} for row in range(13)]
    with pytest.raises(DataError) as caught:
        write(tmp_path, [*rows, bad, {"x": [1.0]}], shard_rows=5)
    assert what in caught.value.message
    assert not (tmp_path / "data/train/00002.arrow").exists()


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([{"x": 1}, {"x": "one"}], "row 1, column 'x'"),
        ([{"x": None}], "None cannot be stored"),
        ([{"x": True}, {"x": 2}], "mixture of types"),
        ([{"x": np.zeros((2, 2))}, {"x": np.zeros((2, 3))}], "shape [2, 3] next to [2, 2]"),
        ([{"x": ["a", 1]}], "column 'x'"),
        ([{"x": ["a"]}, {"x": [1]}], "column 'x'"),
        ([{1: 1}], "name must be text"),
        ([{}], "non-empty mapping"),
    ],
)
def test_first_rows_that_cannot_be_stored_are_refused(tmp_path: Path, rows: list[Any], what: str) -> None:
    with pytest.raises(DataError) as caught:
        write(tmp_path, rows)
    assert what in caught.value.message


def test_numbers_are_widened_within_the_first_rows_and_never_narrowed_after(tmp_path: Path) -> None:
    assert write(tmp_path / "a", [{"x": 1}, {"x": 2.5}])["splits"]["train"]["columns"]["x"] == "float64"
    with pytest.raises(DataError, match="float64 does not fit int64"):
        write(tmp_path / "b", [{"x": [1]}, {"x": [2.5]}], shard_rows=1)
    split = ArrowSplit(write(tmp_path / "c", [{"x": float("nan")}], allow_nan=True), "train")
    assert np.isnan(split[0]["x"])


class Rows:
    """Rows that are counted as they are taken, and that fail at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self._fail_at = fail_at

    def __iter__(self) -> Iterator[Row]:
        for row in range(25):
            if row == self._fail_at:
                raise ConnectionError
            yield {"x": row}


def test_a_repeated_run_writes_only_what_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        write(tmp_path, Rows(fail_at=22), shard_rows=10)
    shards = sorted((tmp_path / "data/train").iterdir())
    assert [shard.name for shard in shards] == ["00000.arrow", "00001.arrow"]
    before = [shard.stat().st_mtime_ns for shard in shards]
    shards[1].write_bytes(shards[1].read_bytes()[:-1])  # damaged meanwhile: written again
    again = write(tmp_path, Rows(), shard_rows=10)
    assert shards[0].stat().st_mtime_ns == before[0] and shards[1].stat().st_mtime_ns != before[1]
    split = ArrowSplit(again, "train")
    assert [split[row]["x"] for row in range(25)] == list(range(25))
    assert again == write(tmp_path, Rows(), shard_rows=10)
    fresh = write(tmp_path / "fresh", Rows(), shard_rows=10)
    assert again["files"] == fresh["files"]  # byte for byte


def test_other_settings_and_a_record_cut_short_mean_unfinished(tmp_path: Path) -> None:
    write(tmp_path, Rows(), shard_rows=7)
    again = write(tmp_path, Rows(), shard_rows=10)
    assert [ArrowSplit(again, "train")[row]["x"] for row in range(25)] == list(range(25))
    record = tmp_path / "records/data/train/000000/00000001.json"
    for text in ("", "{", "[]", '{"files": [{}]}'):
        record.write_text(text)
        assert len(ArrowSplit(write(tmp_path, Rows(), shard_rows=10), "train")) == 25


def test_a_shard_that_is_none_is_named(tmp_path: Path) -> None:
    data = write(tmp_path, ROWS)
    (tmp_path / "data/train/00000.arrow").write_bytes(b"x" * 100)
    with pytest.raises(DamagedError) as caught:
        ArrowSplit(data, "train")[0]
    assert caught.value.field == "data/train/00000.arrow"


def test_a_remote_split_is_downloaded_once_and_the_cache_stays_bounded(tmp_path: Path) -> None:
    data = write("memory://shards/a", Rows(), shard_rows=10)
    try:
        cache = FileCache(tmp_path / "cache")
        assert [ArrowSplit(data, "train", cache)[row]["x"] for row in (0, 12, 24)] == [0, 12, 24]
        kept = {path.name for path in (tmp_path / "cache").iterdir()} - {"lock"}
        assert kept == {file["sha256"] for file in data["files"]}
        Store.open("memory://shards/a").delete_tree()
        assert ArrowSplit(data, "train", cache)[24]["x"] == 24
    finally:
        Store.open("memory://shards/a").delete_tree()


def test_the_cache_lets_go_of_what_was_used_longest_ago(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    entries = [store.write_bytes(f"f{number}", bytes([number]) * 100) for number in range(3)]
    cache = FileCache(tmp_path / "cache", max_bytes=250)
    first, second = (cache.fetch(store, entry) for entry in entries[:2])
    for path, used in ((first, 2), (second, 1)):
        os.utime(path, (used, used))
    third = cache.fetch(store, entries[2])
    assert (first.exists(), second.exists(), third.read_bytes()) == (True, False, b"\x02" * 100)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@settings(max_examples=15)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "i": st.integers(-(2**63), 2**63 - 1),
                "f": st.floats(allow_nan=False, allow_infinity=False),
                "s": st.text(),
                "b": st.binary(),
                "l": st.lists(st.integers(-5, 5)),
            }
        ),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 4),
)
def test_any_rows_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Row], shard_rows: int) -> None:
    split = ArrowSplit(write(tmp_path_factory.mktemp("any"), rows, shard_rows=shard_rows), "train")
    for index, row in enumerate(rows):
        assert all(equal(split[index][name], value) for name, value in row.items())


# ------------------------------------------------------------------------------------------------- predictions
def test_predictions_are_read_back_with_their_row_ids(tmp_path: Path) -> None:
    parts = SplitParts(Store.open(tmp_path), "test", rows=25, rows_per_file=10)
    assert [parts.row_range(part) for part in range(parts.total)] == [(0, 10), (10, 20), (20, 25)]
    parts = SplitParts(Store.open(tmp_path), "test", rows=3, rows_per_file=10)
    columns: dict[str, Any] = {
        "prediction": np.array([1, 2, 3]),
        "label": ["a", "b", "c"],
        "scores": list(np.ones((3, 2), np.float32)),
        "boxes": np.zeros((3, 2, 4)),
    }
    assert not parts.is_finished(0)
    entry = write_split_predictions(parts, 0, np.array([7, 8, 9]), columns, split="test")
    assert [part.files for part in parts.collect()] == [(entry,)]
    table = pq.read_table(tmp_path / entry.path).to_pydict()
    assert (table["row_id"], table["prediction"], table["label"]) == ([7, 8, 9], [1, 2, 3], ["a", "b", "c"])
    assert table["scores"] == [[1.0, 1.0]] * 3 and np.shape(table["boxes"]) == (3, 2, 4)


def test_a_damaged_or_differently_cut_part_counts_as_unfinished(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    parts = SplitParts(store, "test", rows=5, rows_per_file=5)
    entry = write_split_predictions(parts, 0, np.arange(5), {"p": np.arange(5)}, split="test")
    assert not SplitParts(store, "test", rows=5, rows_per_file=2).is_finished(0)
    content = (tmp_path / entry.path).read_bytes()
    (tmp_path / entry.path).write_bytes(content[:-1])
    assert not parts.is_finished(0)
    with pytest.raises(InfrastructureError, match="Parts of the result are missing"):
        list(parts.collect())
    # A bit that changed shows only in the digest, which the process that starts the others compares.
    (tmp_path / entry.path).write_bytes(content[:-1] + b"?")
    assert parts.is_finished(0)
    parts.forget_damaged()
    assert parts.list_finished(0) == set()


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"p": [1, 2]}, "2 values for 3 rows"),
        ({"row_id": [1, 2, 3]}, "reserved for the row's own id"),
        ({"p": [1, "a", 2]}, "Column 'p'"),
    ],
)
def test_columns_that_cannot_be_written_are_named(tmp_path: Path, columns: dict[str, Any], what: str) -> None:
    parts = SplitParts(Store.open(tmp_path), "test", rows=3, rows_per_file=10)
    with pytest.raises(DataError, match=what):
        write_split_predictions(parts, 0, np.arange(3), columns, split="test")
    assert not (tmp_path / "predictions").exists()


def _splits(counts: dict[str, dict[str, int]], column: str = "label") -> dict[str, Any]:
    return {name: {column: {"rows": sum(each.values()), "counts": each}} for name, each in counts.items()}


EVEN = {"0": 500, "1": 500}
OTHER_SHARES = (
    "Labels are distributed differently in split '{}': 'label' is 1 in {} % of its rows, and in {} % of those of '{}'."
)
NO_ROW = "Split '{}' has no row whose 'label' is 2, and {}."


@pytest.mark.parametrize(
    ("counts", "texts"),
    [
        ({"train": EVEN, "test": {"0": 52, "1": 48}}, []),
        ({"train": EVEN, "test": {"0": 6, "1": 1}}, []),  # seven rows show little
        ({"train": EVEN}, []),
        ({"a": {"0": 60, "1": 40}, "b": {"0": 600, "1": 400}}, []),
        ({"a": {"0": 5, "1": 95}, "b": {"0": 600, "1": 400}}, [OTHER_SHARES.format("a", 95, 40, "b")]),
        ({"train": {"0": 990, "1": 10}, "test": {"0": 20}}, []),  # a fifth of a row was to be expected
        (
            {"train": {"0": 500, "1": 300, "2": 200}, "test": {"0": 60, "1": 40}},
            [NO_ROW.format("test", "20 % of the rows of 'train' have")],
        ),
        (
            {"train": {"0": 50, "1": 50}, "test": {"0": 9, "1": 9, "2": 1}},
            [NO_ROW.format("train", "another split has")],
        ),
        (
            {"train": EVEN, "validation": {"0": 51, "1": 49}, "test": {"0": 10, "1": 90}},
            [OTHER_SHARES.format("test", 90, 50, "train")],
        ),
    ],
)
def test_labels(counts: dict[str, dict[str, int]], texts: list[str]) -> None:
    assert describe_unusual(_splits(counts), {}, {}) == texts


def test_columns_that_are_not_labels_may_differ() -> None:
    assert describe_unusual(_splits({"train": {"2020": 500}, "test": {"2021": 500}}, "year"), {}, {}) == []
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
    assert len(texts) == MOST + 1 and texts[-1] == f"{100 - MOST} more warnings of this kind are left out."
