"""What a training had logged, read from its folder: of one that ended, and of one that did not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flows.charts import draw_charts
from flows.training_history import read_training_history, read_unfinished_history
from trainer_lib.commit import write_commit
from trainer_lib.storage import Store


@pytest.fixture
def stage(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "stage")


def save(stage: Store, step: int, *, log: list[dict[str, Any]], since_log: list[Any]) -> None:
    """Commit a checkpoint with the two files that know of losses."""
    folder = stage.child("checkpoints", f"checkpoint-{step}")
    content = {"trainer_state.json": {"log_history": log}, "data.json": {"history": {"since_log": since_log}}}
    files = [folder.write_bytes(name, json.dumps(value).encode()) for name, value in content.items()]
    write_commit(folder, "checkpoint", files, {"step": step})


def test_the_steps_behind_the_last_log_are_part_of_the_history(stage: Store) -> None:
    assert read_training_history(stage) == []
    stage.write_bytes("history.json", b'[{"loss": 1.0, "step": 4}, {"train_loss": 0.9, "step": 6}]')
    assert len(read_training_history(stage)) == 2, "an earlier version wrote no losses.json"
    stage.write_bytes("losses.json", b'[{"step": 5, "loss": 0.5}, {"step": 6, "loss": "NaN"}]')
    assert [entry.get("loss") for entry in read_training_history(stage)] == [1.0, None, 0.5, "NaN"]


def test_of_a_training_without_an_end_the_newest_checkpoint_knows_what_was_logged(stage: Store) -> None:
    assert read_unfinished_history(stage) == []
    save(stage, 4, log=[], since_log=[[9.0, 1.0]] * 4)
    save(stage, 8, log=[{"loss": 2.0, "step": 6}], since_log=[[1.5, 1.0], ["nan", "inf"]])
    assert read_unfinished_history(stage)[:2] == [{"loss": 2.0, "step": 6}, {"loss": 1.5, "step": 7}]
    last = read_unfinished_history(stage)[2]
    assert last["step"] == 8
    assert math.isnan(last["loss"])
    [chart] = draw_charts(read_unfinished_history(stage))
    assert chart.title == "Loss"


def test_what_was_seen_is_not_read_twice(stage: Store) -> None:
    save(stage, 8, log=[{"loss": 2.0, "step": 6}], since_log=[[1.5, 1.0], [1.25, 1.0]])
    seen: list[dict[str, Any]] = [{"loss": 2.0, "step": 6}, {"eval_loss": 3.0, "step": 7}, {"loss": 1.0, "step": None}]
    assert [entry["step"] for entry in read_unfinished_history(stage, seen)] == [6, 7, 7, 8]
    seen = [{"eval_loss": 3.0, "step": 8}]
    save(stage, 9, log=[{"eval_loss": 3.0, "step": 8}, {"eval_loss": 2.5, "step": 9}], since_log=[])
    assert [entry["step"] for entry in read_unfinished_history(stage, seen)] == [8, 9]
    logged = {6: {"loss": 2.0}, 8: {"eval_loss": 3.0}, 9: {"eval_loss": 2.5}, 10: {"loss": 1.0}}
    ahead = [{**entry, "step": step} for step, entry in logged.items()]
    assert read_unfinished_history(stage, ahead) == ahead


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"history": {"since_log": [1]}}', b'{"history": 5}'])
def test_a_checkpoint_that_cannot_be_read_takes_nothing_away(stage: Store, text: bytes) -> None:
    save(stage, 8, log=[{"loss": 2.0, "step": 6}], since_log=[])
    stage.write_bytes("checkpoints/checkpoint-8/data.json", text)
    seen = [{"loss": 3.0, "step": 2}]
    assert read_unfinished_history(stage, seen) == seen
