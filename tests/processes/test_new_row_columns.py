"""`trainflow predict`: columns that every row gets, and values that only the recipe's collate can judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.new_rows import NewRows, RowsJob, predict_new_rows
from tests.support.model_folders import publish_line, remove_fetched_code
from tests.support.toy import RECIPE
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.launch import LaunchConfig


@pytest.fixture(autouse=True)
def _code_is_removed() -> Iterator[None]:
    yield
    remove_fetched_code()


@pytest.fixture
def model(tmp_path: Path) -> str:
    publish_line(tmp_path / "model")
    return str(tmp_path / "model")


def _predict(asked: NewRows) -> None:
    here = LaunchConfig(kind="in_process", processes=1)
    job = RowsJob.of(replace(asked, trust=True))
    predict_new_rows(job, on_line=print, on_event=lambda event: None, workers=[here])


def _texts(to: Path) -> list[str]:
    return [path.read_text() for path in sorted((to / "predictions").iterdir())]


def test_every_row_gets_a_column_that_is_set(model: str, tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    asked = NewRows(model=model, data=[str(tmp_path / "new.jsonl")], to=str(tmp_path / "out"), format="jsonl")
    _predict(replace(asked, constants={"x": "[3.0]"}))
    found = [json.loads(line) for text in _texts(tmp_path / "out") for line in text.splitlines()]
    assert [row["row_id"] for row in found] == [1, 2]
    assert found[0]["prediction"] == found[1]["prediction"]
    with pytest.raises(ConfigError, match="differ from these: constants"):
        _predict(replace(asked, constants={"x": "[4.0]"}))
    for constants, words in (({"y": "1"}, "trained without this column"), ({"x": "three"}, r"column is float64\[")):
        with pytest.raises(ConfigError, match=words):
            _predict(replace(asked, constants=constants, to=f"{asked.to}2"))
    (tmp_path / "new.jsonl").write_text('{"x": [1.0]}\n')
    with pytest.raises(DataError, match=r"line 1\), column 'x': the row has a value of its own"):
        _predict(replace(asked, constants={"x": "[3.0]"}, to=f"{asked.to}3"))


STRICT = (
    RECIPE
    + """

def collate(rows):
    import torch
    from trainer_lib.errors import DataError

    for row in rows:
        if row["x"][0] < row.get("labels", [0.0])[0]:
            raise DataError("column 'x': the value is too small.", field="rows", value="x", remedy="Raise it.")
    return {"x": torch.tensor([[float(row["x"][0])] for row in rows])}
"""
)


def test_what_collate_finds_out_names_the_row(tmp_path: Path) -> None:
    publish_line(tmp_path / "model", recipe=STRICT)
    (tmp_path / "new.jsonl").write_text('{"x": [1.0]}\n{"x": [-1.0]}\n{"x": [2.0]}\n')
    asked = NewRows(model=str(tmp_path / "model"), data=[str(tmp_path / "new.jsonl")], to=str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"new\.jsonl, row 1 \(line 2\), column 'x': the value is too small") as caught:
        _predict(asked)
    assert caught.value.remedy == "Raise it."
    (tmp_path / "new.jsonl").write_text('{"labels": [-1.0]}\n')
    with pytest.raises(DataError, match="needs the column 'x', which the rows do not have"):
        _predict(replace(asked, to=str(tmp_path / "other")))


def test_the_column_that_is_predicted_is_left_aside(tmp_path: Path) -> None:
    publish_line(tmp_path / "model", info={"label": "answer"})
    (tmp_path / "new.jsonl").write_text('{"x": [1.0], "answer": {"text": ["one"]}}\n')
    asked = NewRows(model=str(tmp_path / "model"), data=[str(tmp_path / "new.jsonl")], to=str(tmp_path / "out"))
    assert RowsJob.of(replace(asked, trust=True)).find_unused() == ["answer"]
    _predict(replace(asked, format="jsonl"))
    assert "prediction" in _texts(tmp_path / "out")[0]
