"""The state of a run, and what its methods give back."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.surface import SURFACE
from trainer_lib.arguments import TrainingArguments
from trainer_lib.base import outputs
from trainer_lib.callbacks.base import EarlyStoppingCallback
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.state import ExportableState, TrainerControl, TrainerState


def test_the_state_has_the_references_fields_and_defaults() -> None:
    state = TrainerState()
    assert [field.name for field in dataclasses.fields(state)] == list(SURFACE["TrainerState"])
    for name, default in SURFACE["TrainerState"].items():
        ours = getattr(state, name)
        assert ours == default or (default is None and ours in ([], {})), name
    assert dataclasses.asdict(TrainerControl()) == SURFACE["TrainerControl"]


def test_the_state_survives_json_and_files(tmp_path: Path) -> None:
    state = TrainerState(
        epoch=1.5, global_step=7, max_steps=10, log_history=[{"loss": 0.5, "step": 7}], trial_params={"lr": 1.0}
    )
    state.best_metric = 0.1
    assert TrainerState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    file = tmp_path / "trainer_state.json"
    state.save_to_json(str(file))
    assert TrainerState.load_from_json(file) == state
    text = file.read_text()
    assert list(json.loads(text)) == sorted(SURFACE["TrainerState"])
    assert text.endswith("}\n")
    assert TrainerState.from_dict({"global_step": 3, "from_the_future": 1}).global_step == 3
    TrainerState(log_history=[{"loss": float("nan")}]).save_to_json(file)
    assert np.isnan(TrainerState.load_from_json(file).log_history[0]["loss"])


@pytest.mark.parametrize("content", ["[]", '{"global_step": "many"}', '{"epoch": null}', "{"])
def test_a_damaged_state_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(DamagedError) as caught:
        TrainerState.load_from_json(tmp_path / "s.json")
    assert caught.value.remedy
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainerState.load_from_json(tmp_path / "none.json")


def test_starting_references_are_noted_and_shares_become_steps_rounded_up() -> None:
    started: Any = SimpleNamespace(hp_name=lambda trial: "first", _trial=None)
    started.is_local_process_zero, started.is_world_process_zero = lambda: True, lambda: False
    state = TrainerState()
    state.init_training_references(started, 10, 2, SimpleNamespace(params={"learning_rate": 0.1}))
    assert (state.max_steps, state.num_train_epochs, state.is_world_process_zero) == (10, 2, False)
    assert (state.trial_name, state.trial_params) == ("first", {"learning_rate": 0.1})
    state.init_training_references(started, 10, 2, None)
    assert state.trial_params is None
    state.compute_steps(TrainingArguments("out", logging_steps=0.101, save_steps=7), 100)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (11, 500, 7)


def test_callback_states_are_kept_by_class_and_in_order() -> None:
    first, second = EarlyStoppingCallback(2), EarlyStoppingCallback(3)
    first.early_stopping_patience_counter = 1
    state = TrainerState(stateful_callbacks=[first, TrainerControl(should_log=True), second])
    assert state.stateful_callbacks["TrainerControl"]["args"]["should_log"] is True
    saved = state.stateful_callbacks["EarlyStoppingCallback"]
    restored = [EarlyStoppingCallback.from_state(each) for each in saved]
    counts = [(each.early_stopping_patience, each.early_stopping_patience_counter) for each in restored]
    assert counts == [(2, 1), (3, 0)]
    assert TrainerControl.from_state(state.stateful_callbacks["TrainerControl"]).should_log
    with pytest.raises(ConfigError, match="stateful_callbacks = object"):
        TrainerState(stateful_callbacks=[object()])

    class Forgetful(ExportableState):
        pass

    with pytest.raises(NotImplementedError, match="Forgetful"):
        Forgetful().state()


def test_outputs_are_tuples_and_eval_prediction_unpacks_with_what_was_asked_for() -> None:
    assert outputs.TrainOutput(3, 0.5, {"a": 1.0}) == (3, 0.5, {"a": 1.0})
    assert outputs.PredictionOutput([1], None, None).predictions == [1]
    assert outputs.EvalLoopOutput([1], [2], {}, 3).num_samples == 3
    assert outputs.BestRun("7", 0.1, {"lr": 1}).run_summary is None
    predictions, labels = outputs.EvalPrediction(np.ones(2), np.zeros(2))
    assert (predictions.sum(), labels.sum()) == (2, 0)
    assert len(tuple(outputs.EvalPrediction(1, 2, inputs=3))) == 3
    full = outputs.EvalPrediction(1, 2, 3, 4)
    assert (full[0], full[1], full[2], full[3], len(full)) == (1, 2, 3, 4, 4)
    assert outputs.EvalPrediction(1, 2, losses=4)[2] == 4
    for index in (-1, 4):
        with pytest.raises(IndexError):
            _ = full[index]


def test_speed_metrics_count_per_second() -> None:
    metrics = outputs.speed_metrics("train", time.time() - 2, num_samples=10, num_steps=4, num_tokens=100)
    assert metrics["train_runtime"] == pytest.approx(2, abs=0.5)
    assert metrics["train_samples_per_second"] == pytest.approx(10 / metrics["train_runtime"], rel=0.01)
    assert set(outputs.speed_metrics("eval", time.time() - 1, num_samples=1)) == {
        "eval_runtime",
        "eval_samples_per_second",
    }
    assert set(outputs.speed_metrics("eval", time.time() + 100, num_samples=1)) == {"eval_runtime"}


def test_a_model_output_is_dictionary_attributes_and_tuple() -> None:
    output = outputs.ModelOutput(loss=1, logits=2, past=None)
    assert (output.loss, output["loss"], output[0], output[1:]) == (1, 1, 1, (2,))
    assert list(output) == ["loss", "logits"]
    assert output.past is None
    assert copy.deepcopy(output) == output
    output["hidden"] = 3
    assert (output.hidden, output[2]) == (3, 3)

    @dataclass
    class Mine(outputs.ModelOutput):
        loss: Any = None
        logits: Any = None

    mine = Mine(logits=2)
    assert (mine.to_tuple(), dict(mine)) == ((2,), {"logits": 2})
    mine.loss = 1
    assert mine[0] == 1
    assert copy.copy(mine).loss == 1
