"""Data that is prepared source by source: parts that depend on nothing else, and are not made twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.launched import request
from trainer_lib.data.shards import ArrowSplit
from trainer_lib.data.statistics import merge
from trainer_lib.errors import CodeError, ConfigError, DataError
from trainer_lib.records import to_record
from trainer_lib.requests import PreparedData, PrepareResult

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
        raise FileNotFoundError(f"no {source}")
    value = float if source in options.get("floats", []) else int
    rows = [{"x": [float(source)] * (n + 1), "label": value(n % 3)} for n in range(source)]
    if "ids" in options:
        rows = [{**row, "row_id": options["ids"] * source + n} for n, row in enumerate(rows)]
    return {"train": iter(rows[1:]), "test": iter(rows[:1])}


def build_model(options, data): ...
'''


def _prepare(folder: Path, sources: list[Any], recipe: str = RECIPE, **options: Any) -> PrepareResult:
    options = {"sources": sources, "log": str(folder / "log.txt"), **options}
    asked = request(folder, recipe, output=str(folder / "out"), shard_rows=3, options=options)
    result: PrepareResult = tiny.run(asked, kind="in_process")
    return result


def _calls(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text().split()


def test_rows_are_in_the_order_of_the_sources_whatever_their_number(tmp_path: Path) -> None:
    result = _prepare(tmp_path, [5, 2, 1, 8])
    data = to_record(PreparedData(str(tmp_path / "out"), result.splits, result.info, result.files))
    train, test = ArrowSplit(data, "train"), ArrowSplit(data, "test")
    assert [int(train[row]["x"][0]) for row in range(len(train))] == [5] * 4 + [2] + [8] * 7
    assert [len(train[row]["x"]) for row in range(len(train))] == [2, 3, 4, 5, 2, 2, 3, 4, 5, 6, 7, 8]
    assert [int(test[row]["x"][0]) for row in range(len(test))] == [5, 2, 1, 8]
    ids = train.row_ids(0, len(train))
    assert np.all(np.diff(ids) > 0)
    assert ids[4] == 1 << 32
    assert (result.splits["train"].lengths, result.info) == ((3, 1, 1, 3, 3, 1), {"sources": 4})
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert statistics["train"]["label"] == {
        "rows": 12,
        "min": 0,
        "max": 2,
        "sum": 12,
        "counts": {"0": 3, "1": 6, "2": 3},
    }
    assert statistics["train"]["x"] == {"rows": 12, "shortest": 2, "longest": 8, "elements": 51}
    assert {entry.path for entry in result.files} >= {
        "assets/note.txt",
        "statistics.json",
        "data/test/000002-00000.arrow",
    }


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
        ([2, 3], {"floats": [3]}, r"differ in column 'label': int64 in 2, float64 in 3"),
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
    result = _prepare(tmp_path, [2, 3], ids=10)
    data = to_record(PreparedData(str(tmp_path / "out"), result.splits, result.info, result.files))
    assert ArrowSplit(data, "train").row_ids(0, 3).tolist() == [21, 31, 32]


def test_both_ways_to_prepare_are_refused(tmp_path: Path) -> None:
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


def test_more_sources_than_a_commit_can_list_are_refused_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_lib.worker.prepare_parts.MOST_FILES", 2)
    with pytest.raises(DataError, match="up to 2 sources") as caught:
        _prepare(tmp_path, [5, 2, 8])
    assert (caught.value.field, caught.value.value) == ("list_sources", "3")
    assert not (tmp_path / "log.txt").exists()
