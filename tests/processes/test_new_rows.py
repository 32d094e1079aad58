"""`trainflow predict`: new rows become files of predictions, each row exactly once, whatever is killed in between."""

from __future__ import annotations

import json
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.command import running, trainflow
from tests.support.launched import wait_until
from tests.support.model_folders import code_is_removed as code_is_removed
from tests.support.model_folders import publish_line
from tests.support.toy import RECIPE
from trainer_lib import load_model
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.launch.settings.config import LaunchConfig
from trainflow.tasks.new_rows import NewRows, RowsJob, predict_new_rows

HERE = LaunchConfig(kind="in_process", processes=1)
ROWS = [{"id": f"r{n}", "x": [n / 100]} for n in range(120)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    publish_line(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [json.dumps(row) + "\n" for row in ROWS]
    (tmp_path / "new").mkdir()
    for name, part in (("a.jsonl", lines[:50]), ("b.jsonl", lines[50:])):
        (tmp_path / "new" / name).write_text("".join(part))
    return tmp_path / "new"


def _predict(asked: NewRows) -> Any:
    job = RowsJob.of(replace(asked, trust=asked.trust or True))
    return predict_new_rows(job, on_line=print, on_event=lambda event: None, workers=[HERE])


def _new_rows(folder: Path, to: str = "out", **settings: Any) -> NewRows:
    return NewRows(model=str(folder / "model"), data=[str(folder / "new.jsonl")], to=str(folder / to), **settings)


def _files(to: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((to / "predictions").iterdir())}


def test_rows_are_predicted_with_their_ids_and_once(model: str, data: Path, tmp_path: Path) -> None:
    asked = NewRows(model=model, data=[f"{data}/*.jsonl"], to=str(tmp_path / "out"), rows_per_file=50)
    manifest, was_done = _predict(asked)
    assert (manifest.facts.rows, manifest.facts.id_column, was_done) == (120, "id", False)
    table = pq.read_table(tmp_path / "out" / "predictions")
    assert table["row_id"].to_pylist() == [row["id"] for row in ROWS]
    expected = load_model(model, trust_code=True).predict([{"x": row["x"]} for row in ROWS])["prediction"]
    assert table["prediction"].to_pylist() == [list(value) for value in expected]
    before = _files(tmp_path / "out")
    assert len(before) == 3
    assert _predict(asked)[1] is True

    # A part that was damaged since is predicted again, the others are kept.
    part = tmp_path / "out" / "predictions" / "part-00001.parquet"
    kept = part.with_name("part-00000.parquet").stat().st_mtime_ns
    part.write_bytes(part.read_bytes()[:-1])
    assert _predict(asked)[1] is False
    assert _files(tmp_path / "out") == before
    assert part.with_name("part-00000.parquet").stat().st_mtime_ns == kept


BY_LENGTH = """
def collate(rows):
    import torch

    width = max(len(row["x"]) for row in rows)
    x = torch.stack([torch.nn.functional.pad(torch.as_tensor(row["x"]), (0, width - len(row["x"]))) for row in rows])
    return {"x": x}


def build_model(options, data):
    import torch

    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, x):
            if x.shape[0] > 1 and (x == 13).any():
                raise ValueError("not in a batch")
            return {"sum": x.sum(1), "width": torch.full((len(x),), x.shape[1])}

    return Sums()


def prediction_columns(p, data):
    return {"sum": p[0], "width": p[1]}
"""


def test_rows_by_length_share_batches_and_keep_their_order(tmp_path: Path) -> None:
    publish_line(tmp_path / "model", recipe=BY_LENGTH)
    draw = random.Random(0)
    rows: list[dict[str, Any]] = [{"x": [draw.randrange(9) for _ in range(draw.randrange(1, 40))]} for _ in range(500)]
    rows[7], rows[300]["x"][0] = {"x": ["a"]}, 13  # a bad row, and one that its batch fails on
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for name, sort_by in (("as they come", None), ("by length", "x")):
        asked = _new_rows(tmp_path, name, rows_per_file=200, sort_by=sort_by, max_errors=2)
        _predict(asked)
        found[name] = pq.read_table(tmp_path / name / "predictions").to_pydict()
    widths = {name: sum(filter(None, table.pop("width"))) for name, table in found.items()}
    assert found["as they come"] == found["by length"]
    expected = [None if row["x"] == ["a"] else sum(row["x"]) for row in rows]
    assert found["by length"]["sum"] == expected
    assert widths["by length"] < 0.75 * widths["as they come"]
    with pytest.raises(DataError, match=r"The rows have no column 'xs'; the nearest is 'x'"):
        _predict(replace(asked, to=str(tmp_path / "c"), sort_by="xs"))


def test_a_folder_of_other_predictions_or_files_is_left_alone(model: str, data: Path, tmp_path: Path) -> None:
    to = str(tmp_path / "out")
    _predict(NewRows(model=model, data=[str(data)], to=to))
    with pytest.raises(ConfigError, match="rows_per_file: 10000 -> 7"):
        _predict(NewRows(model=model, data=[str(data)], to=to, rows_per_file=7))
    (data / "b.jsonl").write_text('{"id": "r1", "x": [3.0]}\n')
    with pytest.raises(ConfigError, match="differ from these: rows"):
        _predict(NewRows(model=model, data=[str(data)], to=to))
    with pytest.raises(ConfigError, match="other files") as foreign:
        _predict(NewRows(model=model, data=[str(data)], to=str(data)))
    assert foreign.value.field == "--to"


def test_mended_rows_go_into_the_same_folder_where_no_part_was_finished(model: str, data: Path, tmp_path: Path) -> None:
    asked = NewRows(model=model, data=[str(data)], to=str(tmp_path / "out"), rows_per_file=50)
    sound = (data / "a.jsonl").read_text()
    (data / "a.jsonl").write_text(sound.replace("[0.07]", '["a"]'))
    with pytest.raises(DataError, match="line 8"):
        _predict(asked)
    # A part in another format that no record calls finished.
    (tmp_path / "out" / "predictions").mkdir()
    (tmp_path / "out" / "predictions" / "part-00009.jsonl").write_text("{}")
    (data / "a.jsonl").write_text(sound)
    assert _predict(asked)[0].facts.rows == 120
    assert list(_files(tmp_path / "out")) == [f"part-0000{part}.parquet" for part in range(3)]
    # Where some are finished, the rows after the bad one are other rows than before.
    later = replace(asked, to=str(tmp_path / "later"))
    (data / "b.jsonl").write_text((bad := (data / "b.jsonl").read_text()).replace("[0.6]", '["a"]'))
    with pytest.raises(DataError):
        _predict(later)
    (data / "b.jsonl").write_text(bad)
    with pytest.raises(ConfigError, match="differ from these: rows"):
        _predict(later)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"x": [1.0]}, {"x": ["a"]}], r"new\.jsonl, row 1 \(line 2\), column 'x': the value is not float64"),
        ([{"X": [1.0]}], r"row 0 \(line 1\), column 'X': .*the nearest is 'x'"),
        ([{"labels": [1.0]}], "needs the column 'x', which the rows do not have"),
        ([{"x": [1.0]}, {}], r"row 1 \(line 2\), column 'x': the column is missing"),
        ([{"id": 1, "x": [1.0]}, {"id": "b", "x": [1.0]}], "the id 'b' is not an integer"),
        ([], "no rows"),
    ],
)
def test_rows_that_the_model_cannot_take_are_named(rows: list[Any], words: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(DataError, match=words):
        _predict(NewRows(model=model, data=[str(tmp_path / "new.jsonl")], to=str(tmp_path / "out")))
    assert not (tmp_path / "out" / "COMMIT.json").exists()


BAD = [
    {"id": "a", "x": [1.0]},
    {"id": "b", "x": ["two"]},
    {"id": 3, "x": [3.0]},
    {"x": [4.0]},
    {"id": "e", "x": [-1.0]},
    {"id": "f", "x": [6.0], "extra": 1},
    {"id": "g", "x": [7.0]},
]
PICKY = """

def collate(rows):
    import torch

    if any(row["x"][0] < 0 for row in rows):
        raise ValueError("x must not be negative")
    return {"x": torch.tensor([[float(row["x"][0])] for row in rows])}
"""


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_bad_rows_go_into_a_column_up_to_a_limit(file_format: str, tmp_path: Path) -> None:
    publish_line(tmp_path / "model", recipe=RECIPE + PICKY)
    lines = [*map(json.dumps, BAD), "{not json"]
    (tmp_path / "new.jsonl").write_text("\n".join(lines) + "\n")
    asked = _new_rows(tmp_path, file_format=file_format, rows_per_file=5, batch_size=2)
    for few in (0, 2, 5):
        with pytest.raises(DataError):
            _predict(replace(asked, max_errors=few, to=f"{asked.to}{few}"))
    manifest, _ = _predict(replace(asked, max_errors=6))
    assert (manifest.facts.rows, manifest.facts.errors) == (8, 6)
    if file_format == "parquet":
        found = pq.read_table(tmp_path / "out" / "predictions").to_pylist()
    else:
        found = [json.loads(line) for text in _files(tmp_path / "out").values() for line in text.splitlines()]
    assert [row["row_id"] for row in found] == ["a", "b", None, None, "e", "f", "g", None]
    assert [row["prediction"] for row in found] == [[2.0], None, None, None, None, None, [14.0], None]
    words = ["not float64", "id 3 is not a text", "id is missing", "ValueError: x must not", "'extra'"]
    for row, word in zip(found, [None, *words, None, "JSON"], strict=True):
        assert row["error"] is None if word is None else word in row["error"], row
    # What was finished under a smaller limit is kept under a greater one.
    assert _predict(replace(asked, max_errors=7, to=f"{asked.to}5"))[0].facts.errors == 6


SLOW = """

import time


def prediction_columns(p, data):
    time.sleep(SECONDS)
    return {"y": p}
"""


def test_a_second_command_helps_the_first_and_commits_when_that_is_killed(data: Path, tmp_path: Path) -> None:
    publish_line(tmp_path / "model", recipe=RECIPE + SLOW.replace("SECONDS", "0.1"))
    to = tmp_path / "shared"
    asked = NewRows(model=str(tmp_path / "model"), data=[str(data)], to=str(tmp_path / "whole"), rows_per_file=2)
    _predict(asked)
    command = ["predict", asked.model, str(data), "--rows-per-file", "2", "--to", str(to), "--trust", "any"]
    with running(*command, cwd=tmp_path, log=tmp_path / "log") as first:
        wait_until(lambda: (to / "predictions").is_dir() and len(_files(to)) >= 3, 90)
        lines: list[str] = []

        def kill_first() -> None:
            wait_until(lambda: len(list((to / "claims").glob("*.beat"))) == 2, 90)
            first.stop(signal.SIGKILL)

        killer = threading.Thread(target=kill_first)
        killer.start()
        job = RowsJob.of(replace(asked, to=str(to), trust=True))
        manifest, was_done = predict_new_rows(job, on_line=lines.append, on_event=lambda event: None, workers=[HERE])
        killer.join()
    assert (manifest.facts.rows, was_done) == (120, False)
    assert lines[0] == "Another process predicts these rows: this one takes parts as well."
    assert _files(to) == _files(tmp_path / "whole")
    answer = json.loads(trainflow(*command, "--json", cwd=tmp_path).out)
    assert (answer["rows"], answer["was_done"], len(answer["files"])) == (120, True, 60)
    refused = trainflow("predict", f"{asked.model}x", data, cwd=tmp_path)
    assert refused.code == 2
    assert "There is no model" in refused.err


def test_published_code_runs_only_when_it_is_trusted(model: str, data: Path) -> None:
    with pytest.raises(ConfigError, match="not trusted") as refused:
        RowsJob.of(NewRows(model=model, data=[str(data)]))
    digest = str(refused.value.remedy).split('"')[1]
    assert RowsJob.of(NewRows(model=model, data=[str(data)], trust=digest)).url.startswith(str(Path.cwd()))
    with pytest.raises(ConfigError, match="other code"):
        RowsJob.of(NewRows(model=model, data=[str(data)], trust="0" * 64))


STRICT = """

def collate(rows):
    import torch
    from trainer_lib.errors import DataError

    for row in rows:
        if row["x"][0] < row.get("labels", [0.0])[0]:
            raise DataError("column 'x': the value is too small.", field="rows", value="x", remedy="Raise it.")
    return {"x": torch.tensor([[float(row["x"][0])] for row in rows])}
"""


def test_what_collate_finds_out_names_the_row(tmp_path: Path) -> None:
    publish_line(tmp_path / "model", recipe=RECIPE + STRICT)
    (tmp_path / "new.jsonl").write_text('{"x": [1.0]}\n{"x": [-1.0]}\n{"x": [2.0]}\n')
    asked = _new_rows(tmp_path)
    with pytest.raises(DataError, match=r"new\.jsonl, row 1 \(line 2\), column 'x': the value is too small") as caught:
        _predict(asked)
    assert caught.value.remedy == "Raise it."
    (tmp_path / "new.jsonl").write_text('{"labels": [-1.0]}\n')
    with pytest.raises(DataError, match="needs the column 'x', which the rows do not have"):
        _predict(replace(asked, to=str(tmp_path / "other")))


def test_the_column_that_is_predicted_is_left_aside(tmp_path: Path) -> None:
    publish_line(tmp_path / "model", info={"label": "answer"})
    (tmp_path / "new.jsonl").write_text('{"x": [1.0], "answer": {"text": ["one"]}}\n')
    asked = _new_rows(tmp_path)
    assert RowsJob.of(replace(asked, trust=True)).find_unused() == ["answer"]
    _predict(replace(asked, file_format="jsonl"))
    assert b"prediction" in _files(tmp_path / "out")["part-00000.jsonl"]
