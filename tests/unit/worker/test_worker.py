"""The verbs of the worker, with a model small enough to run them all in the test's own process."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from tests.support import tiny
from tests.support.launched import request
from trainer_lib.data.row_parts import split_parts
from trainer_lib.errors import CodeError, ConfigError, DamagedError, DataError
from trainer_lib.launch import LaunchConfig, launch
from trainer_lib.requests import PreparedData, TrainResult
from trainer_lib.storage import Store
from trainer_lib.worker import events as worker_events


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared_data: PreparedData) -> tuple[str, TrainResult]:
    folder = tmp_path_factory.mktemp("trained")
    output = str(folder / "train")
    return output, tiny.run(tiny.train_request(folder, prepared_data, output), kind="in_process")


def check_files(output: str, result: Any) -> set[str]:
    """Every file of a result is there, with its digest."""
    for file in result.files:
        assert Store.open(output).digest(file.path) == file.sha256
        assert Store.open(output).size(file.path) == file.size
    return {file.path for file in result.files}


def test_prepare_gives_splits_info_and_files(prepared_data: PreparedData) -> None:
    assert {name: split.rows for name, split in prepared_data.splits.items()} == {"train": 90, "test": 25}
    assert prepared_data.splits["train"].columns == {"x": "float32[*]", "label": "int64", "row_id": "int64"}
    assert prepared_data.info == {"width": 6}
    files = check_files(prepared_data.url, prepared_data)
    assert files >= {"data/train/00002.arrow", "data/test/00000.arrow", "assets/note.txt"}


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return {'train': []}", "split 'train' is empty"),
        ("return {'train': [{'x': 1.0}, {'x': float('nan')}]}", "NaN in split 'train', row 1, column 'x'"),
        ("out.info['x'] = object(); return {'train': [{'x': 1.0}]}", "JSON"),
    ],
)
def test_prepare_refuses_bad_data(tmp_path: Path, body: str, what: str) -> None:
    recipe = f"def prepare(options, out):\n    {body}\ndef build_model(options, data): ...\n"
    with pytest.raises(DataError, match=what):
        tiny.run(request(tmp_path, recipe), kind="in_process")


def test_train_exports_a_model_and_says_what_it_did(trained: tuple[str, TrainResult]) -> None:
    output, result = trained
    assert check_files(output, result) >= {"model/model.safetensors", "model/config.json"}
    assert (result.global_step, result.global_samples) == (36, 270)
    assert (result.world_size, result.resumed_from, result.parameters) == (1, None, 146)
    assert result.checkpoints[0] == "checkpoint-36"
    assert len(result.checkpoints) == 2
    assert result.metrics["train_loss"] < 0.7
    history = json.loads(Path(output, "history.json").read_text())
    assert [entry["step"] for entry in history if "loss" in entry] == [10, 20, 30]


def test_a_finished_training_run_again_takes_no_step_and_gives_the_same(
    tmp_path: Path, prepared_data: PreparedData, trained: tuple[str, TrainResult]
) -> None:
    output, first = trained
    again = tiny.run(tiny.train_request(tmp_path, prepared_data, output), kind="in_process")
    assert (again.resumed_from, again.global_step) == (36, 36)
    assert again.files == first.files


def test_samples_are_counted_also_when_the_batch_changes_between_attempts(
    tmp_path: Path, prepared_data: PreparedData
) -> None:
    output = str(tmp_path / "train")
    first = tiny.run(tiny.train_request(tmp_path, prepared_data, output, max_steps=6), kind="in_process")
    smaller = {"global_batch_size": 4, "per_device_train_batch_size": 4, "allow_global_batch_change": True}
    again = tiny.run(tiny.train_request(tmp_path, prepared_data, output, max_steps=12, **smaller), kind="in_process")
    assert (first.global_samples, again.global_step, again.global_samples) == (6 * 8, 12, 6 * 8 + 6 * 4)


def test_exported_bytes_do_not_depend_on_where_they_lie_or_how_it_was_logged(
    tmp_path: Path, prepared_data: PreparedData, trained: tuple[str, TrainResult]
) -> None:
    output = str(tmp_path / "elsewhere")
    asked = tiny.train_request(tmp_path, prepared_data, output, logging_steps=3, save_steps=20, run_name="other")
    assert tiny.run(asked, kind="in_process").files == trained[1].files


def test_events_tell_position_speed_and_time_left(tmp_path: Path, prepared_data: PreparedData) -> None:
    events: list[dict[str, Any]] = []
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    config = LaunchConfig(kind="in_process")
    launch(asked, config, env={}, on_line=lambda line: None, on_event=events.append)
    logs = [event for event in events if event["event"] == "log" and "loss" in event]
    assert [event["step"] for event in logs] == [10, 20, 30]
    assert all(event["max_steps"] == 36 and event["eta_s"] > 0 and event["samples_per_second"] > 0 for event in logs)
    assert [event["step"] for event in events if event["event"] == "save"] == [6, 12, 18, 24, 30, 36]


def test_evaluate_measures_each_split_and_what_the_recipe_adds(
    tmp_path: Path, prepared_data: PreparedData, trained: tuple[str, TrainResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_events, "QUIET_S", 0.0)
    output = str(tmp_path / "evaluate")
    more = {
        "data": prepared_data,
        "model_url": f"{trained[0]}/model",
        "model": {},
        "args": tiny.ARGS,
        "splits": ("test", "train"),
    }
    asked, events = request(tmp_path, tiny.RECIPE, "evaluate", output=output, **more), list[dict[str, Any]]()
    config = LaunchConfig(kind="in_process")
    result = launch(asked, config, env={}, on_line=lambda line: None, on_event=events.append)
    assert set(result.metrics) == {"test", "train", "overall"}
    # Both splits are one progress, in rows, with the time left once the first batches are through.
    shown = [event for event in events if event.get("max_steps")]
    assert {event["max_steps"] for event in shown} == {25 + 90}
    steps = [event["step"] for event in shown]
    assert steps == sorted(steps)
    assert (25 in steps, steps[-1], shown[-1]["eta_s"]) == (True, 115, 0)
    assert re.fullmatch(r"evaluating: batch 4 of \d+, \d+ s left", shown[3]["message"])
    assert "eta_s" not in shown[0]
    assert 0.5 < result.metrics["test"]["accuracy"] <= 1
    assert result.metrics["test"]["loss"] > 0
    total = sum(float(abs(tensor).sum()) for tensor in load_file(f"{trained[0]}/model/model.safetensors").values())
    assert result.metrics["overall"]["weights"] == pytest.approx(total, rel=1e-5)
    outcomes = {"outcomes/test.json", "outcomes/train.json"}
    assert check_files(output, result) == {"metrics.json", "artifacts/note.txt", *outcomes}


def test_outcomes_are_what_the_recipe_pairs_with_the_row_of_each(
    tmp_path: Path, prepared_data: PreparedData, trained: tuple[str, TrainResult]
) -> None:
    own = """

def outcome_pairs(p):
    off = p.predictions[:, 1].copy()
    off[7] += 1000
    return {"predictions": off[::-1], "labels": p.predictions[::-1, 1], "rows": range(len(off))[::-1]}
"""
    output = str(tmp_path / "evaluate")
    more = {"data": prepared_data, "model_url": f"{trained[0]}/model", "model": {}, "splits": ("test",)}
    asked = request(tmp_path, tiny.RECIPE + own, "evaluate", output=output, args=tiny.ARGS, **more)
    tiny.run(asked, kind="in_process")
    found = json.loads(Path(output, "outcomes/test.json").read_text())
    assert (found["kind"], found["rows"]) == ("numbers", 25)
    assert found["hardest"][0][0] == 7
    assert found["hardest"][0][3] == pytest.approx(1000, rel=1e-4)


def test_predict_writes_every_row_once_and_keeps_finished_parts(
    tmp_path: Path, prepared_data: PreparedData, trained: tuple[str, TrainResult]
) -> None:
    output = str(tmp_path / "predict")
    more = {"data": prepared_data, "model_url": f"{trained[0]}/model", "model": {}, "args": tiny.ARGS, "split": "test"}
    asked = request(tmp_path, tiny.RECIPE, "predict", output=output, rows_per_file=10, **more)
    result = tiny.run(asked, kind="in_process")
    parts = sorted(Path(output, "predictions/test").iterdir())
    rows = [row for part in parts for row in pq.read_table(part)["row_id"].to_pylist()]
    assert (result.rows, len(parts), rows) == (25, 3, list(range(25)))
    assert result.parts == 3
    assert not [path for path in Path(output, "claims").rglob("*") if path.is_file()]
    scores = pq.read_table(parts[0])["scores"].to_pylist()
    assert pq.read_table(parts[0])["prediction"].to_pylist() == [int(b > a) for a, b in scores]
    kept = parts[1].stat().st_mtime_ns
    parts[0].unlink()
    split_parts(Store.open(output), "test", rows=25, rows_per_file=10).forget_damaged()
    again = tiny.run(asked, kind="in_process")
    assert (again.parts, again.rows, len(list(parts[0].parent.iterdir()))) == (1, 10, 3)
    assert parts[1].stat().st_mtime_ns == kept


def test_weights_of_another_model_are_refused(
    tmp_path: Path, prepared_data: PreparedData, trained: tuple[str, TrainResult]
) -> None:
    other = tiny.RECIPE.replace("nn.Linear(16, 2)", "nn.Linear(16, 3)")
    model = {"model_url": f"{trained[0]}/model", "model": {}}
    more = {"data": prepared_data, **model, "args": tiny.ARGS, "splits": ("test",)}
    with pytest.raises(DamagedError, match="weights do not fit this model"):
        tiny.run(request(tmp_path, other, "evaluate", **more), kind="in_process")


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        (("return Net(", "return 7  # ("), ConfigError, "must return a torch.nn.Module"),
        (("logits = self", "logits = self.nothing + self"), CodeError, "no attribute 'nothing'"),
        (('assert data.read_file("note.txt")', 'assert data.read_file("no.txt")'), ConfigError, "no such file"),
    ],
)
def test_train_says_what_is_wrong_with_the_recipe(
    tmp_path: Path, prepared_data: PreparedData, change: tuple[str, str], error: type[Exception], what: str
) -> None:
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"))
    path = Path(asked.recipe.path)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(error, match=what) as caught:
        tiny.run(asked, kind="in_process")
    if error is CodeError:
        assert f"{path}:" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"args": {"learning_rat": 1}}, "train.args.learning_rat"),
        ({"train_split": "trian"}, "split"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    tmp_path: Path, prepared_data: PreparedData, fields: dict[str, Any], field: str
) -> None:
    asked = replace(tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train")), **fields)
    with pytest.raises(ConfigError) as caught:
        tiny.run(asked, kind="in_process")
    assert caught.value.field == field
