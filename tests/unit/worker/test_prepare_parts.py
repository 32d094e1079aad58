"""Data that is prepared source by source: parts that depend on nothing else, and are not made twice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.launched import request
from trainer_lib.base.records import to_record
from trainer_lib.data.rows.shards import ArrowSplit
from trainer_lib.data.rows.source_parts import merge
from trainer_lib.errors import CodeError, ConfigError, DataError
from trainer_lib.protocol.requests import PreparedData, PrepareResult
from trainer_lib.storage import Store

RECIPE = '''
"""Rows of numbered sources, and a line in a file for each call."""
import os


def list_sources(options, out):
    out.info["sources"] = len(options["sources"])
    out.write_file("note.txt", b"hello")
    return options["sources"]


def prepare_shard(source, options):
    with open(options["log"], "a") as log:
        log.write(f"{source}\\n")
    if source == options.get("bad"):
        raise ValueError(f"no {source}")
    value = float if source in options.get("floats", []) else int
    label = options.get("labels", {}).get(str(source), "label")
    rows = [{"x": [float(source)] * (n + 1), label: value(n % 3)} for n in range(source)]
    if "ids" in options:
        rows = [{**row, "row_id": options["ids"] * source + n} for n, row in enumerate(rows)]
    if "text_ids" in options:
        rows = [{**row, "row_id": f"00{n}"} for n, row in enumerate(rows)]
    tested = 0 if source in options.get("untested", []) else 1
    return {"train": iter(rows[tested:]), "test": iter(rows[:tested])}


def build_model(options, data): ...
'''


def _prepare(folder: Path, sources: list[Any], recipe: str = RECIPE, **options: Any) -> PrepareResult:
    options = {"sources": sources, "log": str(folder / "log.txt"), **options}
    asked = request(folder, recipe, output=str(folder / "out"), shard_rows=3, options=options)
    result: PrepareResult = tiny.run(asked, kind="in_process")
    return result


def _warned(asked: Any) -> tuple[PrepareResult, list[str]]:
    """The result of a request, and its warnings."""
    result, events = tiny.heard(asked)
    return result, [event["message"] for event in events if event["event"] == "warning"]


def _calls(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text().split()


def _data(folder: Path, result: PrepareResult) -> dict[str, Any]:
    data: dict[str, Any] = to_record(PreparedData(str(folder / "out"), result.splits, result.info, result.files))
    return data


def test_rows_are_in_the_order_of_the_sources_whatever_their_number(tmp_path: Path) -> None:
    result = _prepare(tmp_path, [5, 2, 1, 8])
    data = _data(tmp_path, result)
    train, test = ArrowSplit(data, "train"), ArrowSplit(data, "test")
    assert [int(train[row]["x"][0]) for row in range(len(train))] == [5] * 4 + [2] + [8] * 7
    assert [len(train[row]["x"]) for row in range(len(train))] == [2, 3, 4, 5, 2, 2, 3, 4, 5, 6, 7, 8]
    assert [int(test[row]["x"][0]) for row in range(len(test))] == [5, 2, 1, 8]
    ids = train.row_ids(0, len(train))
    assert np.all(np.diff(ids) > 0)
    assert ids[4] == 1 << 32
    assert (result.splits["train"].lengths, result.info) == ((3, 1, 1, 3, 3, 1), {"sources": 4})
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())["train"]
    assert statistics["label"] == {"rows": 12, "min": 0, "max": 2, "sum": 12, "counts": {"0": 3, "1": 6, "2": 3}}
    assert statistics["x"] == {"rows": 12, "shortest": 2, "longest": 8, "elements": 51}
    written = {"assets/note.txt", "statistics.json", "data/test/000002-00000.arrow"}
    assert {entry.path for entry in result.files} >= written


def test_a_run_that_continues_calls_nothing_for_finished_sources(tmp_path: Path) -> None:
    with pytest.raises(CodeError, match=r"no 8.*\(source 8\)"):
        _prepare(tmp_path, [5, 2, 8, 4], bad=8)
    assert _calls(tmp_path) == ["5", "2", "8"]
    result = _prepare(tmp_path, [5, 2, 8, 4])
    assert _calls(tmp_path) == ["5", "2", "8", "8", "4"]
    (tmp_path / "other").mkdir()
    assert _prepare(tmp_path / "other", [5, 2, 8, 4]) == result  # every file has the same digest
    # What was damaged since, and what another list has in that place, is made again.
    path = tmp_path / "out" / "data" / "train" / "000001-00000.arrow"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert _prepare(tmp_path, [5, 2, 8, 4]) == result
    assert _calls(tmp_path)[5:] == ["2"]
    longer = _prepare(tmp_path, [5, 2, 8, 7, 3])
    assert _calls(tmp_path)[6:] == ["7", "3"]
    assert set(result.splits["train"].shards[:4]) < set(longer.splits["train"].shards)


@pytest.mark.parametrize(
    ("sources", "options", "words"),
    [
        ([], {}, "no sources"),
        ([2, 2], {}, "listed twice"),
        ([4, 3], {"text_ids": True, "untested": [3]}, r"in the splits 'test' and 'train'|in the splits 'train' and"),
        ([4, 3], {"ids": 1}, r"in the splits 'test' and 'train'|in the splits 'train' and 'test'"),
        ([0], {}, "no rows"),
    ],
)
def test_sources_that_do_not_fit_each_other_are_named(
    sources: list[int], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        _prepare(tmp_path, sources, **options)


def test_ids_of_the_recipe_are_kept(tmp_path: Path) -> None:
    for name, options, ids in (("a", {"ids": 10}, [21, 31, 32]), ("b", {"text_ids": True}, ["001", "001", "002"])):
        result = _prepare(tmp_path / name, [2, 3], **options)
        assert ArrowSplit(_data(tmp_path / name, result), "train").row_ids(0, 3).tolist() == ids
    with pytest.raises(ConfigError, match=r"both prepare\(\) and prepare_shard\(\)"):
        _prepare(tmp_path, [1], recipe=f"{RECIPE}\n\ndef prepare(options, out): ...\n")


def test_statistics_are_the_same_however_they_are_merged() -> None:
    parts = [
        {"x": {"rows": n, "min": -n, "max": n, "sum": n, "counts": {str(value): 1 for value in range(n)}}}
        for n in (1, 70, 99, 3)
    ]
    whole = merge(parts)
    assert whole == merge([merge(parts[:2]), merge(parts[2:])])
    assert whole["x"]["rows"] == 173
    many = merge([*parts, {"x": {"rows": 1, "min": 0, "max": 0, "sum": 0, "counts": {"other": 1, "more": 1}}}])
    assert "counts" not in many["x"]


def test_more_sources_or_files_than_a_commit_can_list_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_lib.worker.prepare.MOST_FILES", 2)
    with pytest.raises(DataError, match="up to 2 sources") as caught:
        _prepare(tmp_path, [5, 2, 8])
    assert (caught.value.field, caught.value.value) == ("list_sources", "3")
    assert not (tmp_path / "log.txt").exists(), "no source was read"
    monkeypatch.setattr("trainer_lib.worker.prepare.MOST_FILES", 7)
    assert len(_prepare(tmp_path, [2, 3]).files) == 6  # of two splits of two sources, note.txt and statistics.json
    with pytest.raises(DataError, match="up to 7 files, and its sources made 8") as caught:
        _prepare(tmp_path, [2, 3, 4])
    assert "raise prepare.shard_rows" in str(caught.value.remedy)


def test_a_split_that_no_source_fills_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"The split 'test' is empty in every source\.") as caught:
        _prepare(tmp_path, [5, 2], untested=[5, 2])
    assert (caught.value.field, caught.value.value) == ("prepare_shard", "test")
    assert "leave the split out" in str(caught.value.remedy)
    # Also by a run that finds all sources finished.
    with pytest.raises(DataError, match="'test' is empty"):
        _prepare(tmp_path, [5, 2], untested=[5, 2])
    assert _calls(tmp_path) == ["5", "2"]


def test_a_split_that_one_source_fills_is_fine(tmp_path: Path) -> None:
    for _ in range(2):
        result = _prepare(tmp_path, [5, 2, 3], untested=[5, 3])
        assert _calls(tmp_path) == ["5", "2", "3"]
        assert {name: split.rows for name, split in result.splits.items()} == {"train": 9, "test": 1}
        assert result.splits["test"].shards == ("data/test/000001-00000.arrow",)


@pytest.mark.parametrize(
    ("options", "words", "remedy"),
    [
        ({"floats": [3]}, "'label': int64 in 2, float64 in 3", "Give every source the"),
        (
            {"labels": {"3": "lable"}},
            "'label': int64 in 2, no such column in 3",
            r'Did you mean "label" by the column "lable" of 3\? Give every source',
        ),
        (
            {"labels": {"2": "lable"}},
            "'lable': int64 in 2, no such column in 3",
            r'Did you mean "lable" by the column "label" of 3\? Give every source',
        ),
    ],
)
def test_a_source_with_other_columns_ends_the_preparation_at_once(
    options: dict[str, Any], words: str, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"split 'train' differ in column {words}\.") as caught:
        _prepare(tmp_path, [2, 3, 4, 5], **options)
    assert (caught.value.field, caught.value.value) == ("prepare_shard", "3")
    assert re.match(remedy, str(caught.value.remedy))
    assert _calls(tmp_path) == ["2", "3"]
    # Once either is mended, both are prepared again.
    assert _prepare(tmp_path, [2, 3, 4, 5]).splits["train"].rows == 10
    assert _calls(tmp_path) == ["2", "3", "2", "3", "4", "5"]


def test_other_columns_of_earlier_commands_are_found_and_a_mended_source_is_read_again(tmp_path: Path) -> None:
    for options in ({"bad": 3}, {"floats": [3], "bad": 4}):
        with pytest.raises(CodeError):
            _prepare(tmp_path, [2, 3, 4], **options)
    with pytest.raises(DataError, match="split 'train' differ in column 'label': int64 in 2, float64 in 3"):
        _prepare(tmp_path, [2, 3, 4])
    assert _prepare(tmp_path, [2, 3, 4]).splits["train"].rows == 6
    assert _calls(tmp_path) == ["2", "3", "3", "4", "4", "2", "3"]


OPENING_RECIPE = """
import errno
import fsspec


def list_sources(options, out):
    return options["sources"]


def opened(source):
    yield {"x": 1}
    open(source)


def numbered(source):
    error = OSError("gone")
    error.errno = errno.ENOENT
    raise error


def wrapped(source):
    try:
        open(source)
    except OSError as error:
        raise RuntimeError("cannot read") from error


WAYS = {
    "lazy": opened,
    "fsspec": lambda source: fsspec.open(source["file"]).open(),
    "errno": numbered,
    "wrapped": wrapped,
    "another": lambda source: {}[source],
}


def prepare_shard(source, options):
    return {"train": WAYS[options["how"]](source)}


def build_model(options, data): ...
"""


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ("lazy", "rows/a.jsonl"),
        ("fsspec", {"file": "memory://bucket/a.jsonl", "rows": [0, 10]}),
        ("errno", "s3://bucket/a.jsonl"),
        ("wrapped", "rows/a.jsonl"),
    ],
)
def test_a_source_that_has_vanished_is_named(how: str, source: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"A file does not exist .*\(") as caught:
        _prepare(tmp_path, [source], recipe=OPENING_RECIPE, how=how)
    error = caught.value
    shown = source if isinstance(source, str) else json.dumps(source)
    assert (error.field, error.value, error.retryable) == ("prepare_shard", shown, False)
    assert "Restore it, or leave the source out" in str(error.remedy)
    assert "recipe.py" in str(error.details)


def test_another_error_while_a_source_is_read_is_one_of_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(CodeError, match=r"KeyError: .*\(source a\)") as other:
        _prepare(tmp_path, ["a"], recipe=OPENING_RECIPE, how="another")
    assert str(other.value.remedy).startswith("Fix the recipe")


def test_files_of_an_earlier_command_are_read_once_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    digest = Store.digest

    def noted(store: Store, rel: str) -> str:
        read.append(rel)
        return digest(store, rel)

    monkeypatch.setattr(Store, "digest", noted)
    for bad in (2, 8):  # two commands that are cut short
        with pytest.raises(CodeError):
            _prepare(tmp_path, [5, 2, 8, 4], bad=bad)
    assert read == []
    _prepare(tmp_path, [5, 2, 8, 4])
    trained = ["train/000000-00000", "train/000000-00001", "train/000001-00000"]  # 4 rows and 1 row, 3 in a file
    assert sorted(read) == [f"data/{name}.arrow" for name in ("test/000000-00000", "test/000001-00000", *trained)]
    read.clear()
    (tmp_path / "whole").mkdir()
    _prepare(tmp_path / "whole", [5, 2, 8, 4])
    assert read == []


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_damaged_file_of_an_earlier_command_is_noticed_before_the_commit(damage: str, tmp_path: Path) -> None:
    """One that has its size is noticed by the last step, whose one worker prepares the source again."""
    expected = _prepare(tmp_path, [5, 2, 8, 4])
    path = tmp_path / "out" / "data" / "train" / "000002-00001.arrow"
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:-1] + (b"?" if damage == "changed" else b""))
    options = {"sources": [5, 2, 8, 4], "log": str(tmp_path / "log.txt")}
    asked = request(tmp_path, RECIPE, output=str(tmp_path / "out"), shard_rows=3, options=options)
    (tmp_path / "log.txt").unlink()
    found, warnings = [], list[str]()
    for step in ("list", "parts", "finish"):
        result, warned = _warned(replace(asked, step=step))
        found.append(result)
        warnings += warned
        if step == "parts":
            assert (tmp_path / "log.txt").exists() == (damage != "changed")
    assert found[-1] == expected
    assert path.read_bytes() == data
    assert _calls(tmp_path) == ["8"]
    texts = ["A source is prepared again: files were damaged after they had been written."]
    assert warnings == (texts if damage == "changed" else [])


def test_what_the_statistics_show_is_a_warning(tmp_path: Path) -> None:
    options = {"sources": [5, 2, 8, 40], "log": str(tmp_path / "log.txt")}
    recipe = RECIPE.replace('out.info["sources"] = len(options["sources"])', 'out.info["max_length"] = 39')
    recipe = recipe.replace("[float(source)] * (n + 1)", "[source] * (n + 1)")
    asked = request(tmp_path, recipe, output=str(tmp_path / "out"), shard_rows=100, options=options)
    result, warnings = _warned(asked)
    text = "The longest row of split 'train' has 40 values in column 'x', and the recipe's max_length is 39."
    assert warnings == list(result.warnings) == [text]
