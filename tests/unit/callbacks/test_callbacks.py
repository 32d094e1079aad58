"""The callback protocol, the default flow, early stopping, and what is shown."""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from typing import Any

import pytest

from trainer_lib.arguments import TrainingArguments
from trainer_lib.callbacks.base import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from trainer_lib.errors import ConfigError
from trainer_lib.state import TrainerControl, TrainerState

ARGS = TrainingArguments("out")
WATCHED = TrainingArguments("out", eval_strategy="steps", metric_for_best_model="loss")


def _handler(*callbacks: Any) -> CallbackHandler:
    return CallbackHandler(callbacks, "model", "processor", "optimizer", "schedule")


class Recorder(TrainerCallback):
    """Counts steps."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


def test_a_callback_may_return_another_control_and_its_errors_are_not_swallowed() -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
            return TrainerControl(should_training_stop=True)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("mine")

    recorder = Recorder()
    handler = _handler(Stop, recorder)
    assert handler.on_step_end(ARGS, TrainerState(), TrainerControl()).should_training_stop
    assert recorder.steps == 1
    with pytest.raises(RuntimeError, match="mine"):
        handler.on_save(ARGS, TrainerState(), TrainerControl())


def test_callbacks_are_added_found_and_removed_by_class_or_instance(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    handler = _handler(DefaultFlowCallback, recorder)
    assert handler.callback_list == "DefaultFlowCallback\nRecorder"
    handler.add_callback(Recorder)
    assert "Recorder is already among the callbacks" in caplog.text
    assert handler.pop_callback(recorder) is recorder and isinstance(handler.pop_callback(Recorder), Recorder)
    assert handler.pop_callback(Recorder) is None
    handler.remove_callback(DefaultFlowCallback)
    assert handler.callbacks == []
    with pytest.raises(ConfigError, match="callbacks = int"):
        handler.add_callback(3)  # type: ignore[arg-type]


def test_callbacks_changed_between_steps_are_seen() -> None:
    first, second = Recorder(), Recorder()
    handler = _handler(first)

    def seen() -> tuple[int, int]:
        handler.on_step_end(ARGS, TrainerState(), TrainerControl())
        return first.steps, second.steps

    assert seen() == (1, 0)
    handler.callbacks.append(second)
    assert seen() == (2, 1)
    del handler.callbacks[0]
    assert seen() == (2, 2)
    patched: Any = second
    patched.on_step_end = first.on_step_end
    handler.on_train_begin(ARGS, TrainerState(), TrainerControl())
    assert seen() == (3, 2)


# -------------------------------------------------------------------------------------- default flow
def _flow(
    step: int = 1, max_steps: int = 100, epoch: float = 0.5, event: str = "on_step_end", **given: Any
) -> set[str]:
    args = TrainingArguments("out", **given)
    state = TrainerState(global_step=step, max_steps=max_steps, epoch=epoch)
    state.compute_steps(args, max_steps)
    control = TrainerControl()
    getattr(DefaultFlowCallback(), event)(args, state, control)
    return {name.removeprefix("should_") for name, on in vars(control).items() if on}


def test_steps_are_due_at_their_intervals() -> None:
    given: dict[str, Any] = {"eval_strategy": "steps", "logging_steps": 2, "eval_steps": 3, "save_steps": 4}
    due = {step: _flow(step, **given) for step in range(1, 13)}
    assert {step for step, what in due.items() if "log" in what} == {2, 4, 6, 8, 10, 12}
    assert {step for step, what in due.items() if "evaluate" in what} == {3, 6, 9, 12}
    assert {step for step, what in due.items() if "save" in what} == {4, 8, 12}


BY_STEPS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3}
BY_EPOCHS: dict[str, Any] = {"event": "on_epoch_end", "eval_strategy": "epoch"}
BEST = {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "loss"}
EVERY: dict[str, Any] = dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch")


@pytest.mark.parametrize(
    ("given", "due"),
    [
        ({}, set()),
        ({"logging_first_step": True}, {"log"}),
        ({"logging_first_step": True, "logging_strategy": "epoch"}, {"log"}),
        ({"step": 100, **BY_STEPS, "save_steps": 7}, {"evaluate", "save", "training_stop"}),
        ({"step": 100, "save_strategy": "no", "logging_strategy": "no"}, {"training_stop"}),
        ({"step": 100, **BEST}, {"training_stop"}),
        ({"step": 3, **BY_STEPS, "eval_delay": 4}, set()),
        ({"step": 6, **BY_STEPS, "eval_delay": 4}, {"evaluate"}),
        ({"epoch": 1, **BY_EPOCHS, "eval_delay": 2}, set()),
        ({"epoch": 2, **BY_EPOCHS, "eval_delay": 2}, {"evaluate"}),
        ({"event": "on_epoch_end"}, set()),
        ({"event": "on_epoch_end", **EVERY}, {"log", "evaluate", "save"}),
    ],
)
def test_epochs_are_due_at_their_end(given: dict[str, Any], due: set[str]) -> None:
    """And the first step where asked, the last one, and evaluations after their delay."""
    assert _flow(**given) == due


def test_shares_are_resolved_against_the_length_of_the_run() -> None:
    given: dict[str, Any] = {"max_steps": 40, "eval_strategy": "steps"}
    for name, what in (("logging_steps", "log"), ("eval_steps", "evaluate"), ("save_steps", "save")):
        shares = {**given, name: 0.25}
        assert [step for step in range(1, 41) if what in _flow(step, **shares)] == [10, 20, 30, 40]


# ------------------------------------------------------------------------------------- early stopping


def _watch(values: list[float], callback: EarlyStoppingCallback, **given: Any) -> list[bool]:
    args = TrainingArguments("out", **{"eval_strategy": "steps", "metric_for_best_model": "loss", **given})
    state, control = TrainerState(), TrainerControl()
    callback.on_train_begin(args, state, control)
    stops = []
    for step, value in enumerate(values, 1):
        state.global_step = step
        callback.on_evaluate(args, state, control, metrics={"eval_loss": value, "eval_accuracy": value})
        stops.append(control.should_training_stop)
    return stops


@pytest.mark.parametrize(
    ("values", "patience", "stops"),
    [
        ([1.0, 0.9, 0.95, 0.8, 0.9], (2,), False),
        ([1.0, 0.9, 0.95, 0.9], (2,), True),
        ([1.0, 0.95, 0.92], (2, 0.1), True),  # an improvement must exceed the threshold
        ([math.nan, math.nan], (2,), True),  # a non-finite metric never improves
        ([1.0, math.nan, 0.5], (2,), False),
    ],
)
def test_patience_counts_evaluations_without_improvement(
    values: list[float], patience: tuple[Any, ...], stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert _watch(values, EarlyStoppingCallback(*patience)) == [*[False] * (len(values) - 1), stops]
    greater = [1 - value for value in values]
    assert _watch(greater, EarlyStoppingCallback(*patience), metric_for_best_model="eval_accuracy")[-1] == stops
    assert not any(_watch(values, EarlyStoppingCallback(), metric_for_best_model="bleu"))
    assert "no metric eval_bleu" in caplog.text


def test_a_resumed_run_goes_on_counting_and_knows_the_best_whenever_the_trainer_notes_it() -> None:
    whole = _watch([1.0, 1.1, 1.2], EarlyStoppingCallback(2))
    first = EarlyStoppingCallback(2)
    before = _watch([1.0, 1.1], first)
    resumed = EarlyStoppingCallback.from_state(json.loads(json.dumps(first.state())))
    # A callback without a state of its own knows the best that the Trainer has noted.
    for callback, best, value in ((resumed, 1.0, 1.2), (EarlyStoppingCallback(), 0.5, 0.6)):
        state, control = TrainerState(global_step=2, best_metric=best), TrainerControl()
        callback.on_train_begin(WATCHED, state, control)
        callback.on_evaluate(WATCHED, state, control, metrics={"eval_loss": value})
        assert [*before, control.should_training_stop] == whole == [False, False, True]
    # A second run begins without what the first one counted.
    again = EarlyStoppingCallback()
    assert _watch([1.0, 2.0], again) == [False, True] and _watch([3.0], again) == [False]
    # The Trainer may note the best metric before its callbacks see the evaluation.
    state, control, callback = TrainerState(), TrainerControl(), EarlyStoppingCallback(2)
    callback.on_train_begin(WATCHED, state, control)
    for value in (1.0, 0.9, 0.8, 0.7):
        state.best_metric = value
        callback.on_evaluate(WATCHED, state, control, metrics={"eval_loss": value})
    assert not control.should_training_stop


def test_early_stopping_without_a_metric_or_evaluations_is_refused() -> None:
    for args, words in (
        (TrainingArguments("out", eval_strategy="epoch"), "metric_for_best_model = none"),
        (TrainingArguments("out", metric_for_best_model="loss"), "eval_strategy = no"),
    ):
        with pytest.raises(ConfigError, match=words):
            EarlyStoppingCallback().on_train_begin(args, TrainerState(), TrainerControl())
    for patience, threshold in ((0, 0.0), (1, -1.0), (1, math.nan)):
        with pytest.raises(ConfigError):
            EarlyStoppingCallback(patience, threshold)


# ------------------------------------------------------------------------------------------ progress
class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def _train(callback: ProgressCallback, state: TrainerState, steps: int = 3) -> None:
    control = TrainerControl()
    callback.on_train_begin(ARGS, state, control)
    for step in range(state.global_step + 1, state.global_step + steps + 1):
        state.global_step = step
        callback.on_step_end(ARGS, state, control)
    callback.on_log(ARGS, state, control, logs={"loss": 0.123456, "total_flos": 3.0, "note": "x" * 300})
    for _ in range(2):
        callback.on_prediction_step(ARGS, state, control, eval_dataloader=[1, 2])
    callback.on_evaluate(ARGS, state, control, metrics={})
    callback.on_train_end(ARGS, state, control)


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    _train(ProgressCallback(), TrainerState(max_steps=10))
    out, err = capsys.readouterr()
    assert out.startswith("step 3/10  loss 0.1235  note [text of 300 characters")
    assert "left 0:00:00" in out
    assert "total_flos" not in out
    assert err == ""


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", Terminal())
    callback = ProgressCallback()
    _train(callback, TrainerState(global_step=4, max_steps=10))
    assert "7/10" in terminal.getvalue()
    assert "0/2" in terminal.getvalue()  # drawn once: two batches take less than the refresh interval
    assert (callback.training_bar, callback.prediction_bar) == (None, None)
    # A loader without length shows none.
    callback.on_prediction_step(ARGS, TrainerState(), TrainerControl(), eval_dataloader=itertools.count())
    assert callback.prediction_bar is None


def test_the_printer_prints_the_logs_and_leaves_them_alone(capsys: pytest.CaptureFixture[str]) -> None:
    logs = {"loss": 0.5, "total_flos": 3.0}
    PrinterCallback().on_log(ARGS, TrainerState(), TrainerControl(), logs=logs)
    assert capsys.readouterr().out == "{'loss': '0.5'}\n"
    assert logs == {"loss": 0.5, "total_flos": 3.0}
    # Other processes show nothing.
    quiet = TrainerState(max_steps=10, is_world_process_zero=False, is_local_process_zero=False)
    _train(ProgressCallback(), quiet)
    PrinterCallback().on_log(ARGS, quiet, TrainerControl(), logs=logs)
    assert capsys.readouterr() == ("", "")
