"""Callbacks in a real training: what each event is given, what `control` does, what a checkpoint remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.toys import classification_rows
from tests.support.training import StopAt, preempted_at, trainer
from trainer_lib import EarlyStoppingCallback, ExportableState, TrainerCallback
from trainer_lib.callbacks.base import EVENTS

ROWS = classification_rows(16)


class Everything(TrainerCallback):
    """Notes every event, in order, with what it was given by keyword."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, Any]]] = []
        for event in EVENTS:
            setattr(self, event, self._noting(event))

    def _noting(self, event: str) -> Any:
        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append((event, state.global_step, kwargs))

        return note

    def order(self) -> list[str]:
        return [event for event, _, _ in self.seen]


def test_all_sixteen_events_fire_where_they_should_with_what_they_should(tmp_path: Path) -> None:
    note = Everything()
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    given |= {"logging_strategy": "steps", "logging_steps": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    given |= {"push_to_hub": True, "hub_model_id": str(tmp_path / "hub"), "hub_strategy": "end"}
    one = trainer(tmp_path / "out", ROWS, eval_dataset=ROWS[:4], callbacks=[note], processing_class="words", **given)
    one.train()
    one.predict(ROWS[:4])
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    evaluation = ["on_prediction_step", "on_log", "on_evaluate"]
    assert note.order() == [
        *("on_init_end", "on_train_begin", "on_epoch_begin", *step, *step, "on_log", *evaluation, "on_save"),
        *("on_epoch_end", "on_log", "on_train_end", "on_push_begin", "on_prediction_step", "on_predict"),
    ]
    assert set(note.order()) == set(EVENTS)
    usual = {"model", "processing_class", "tokenizer", "optimizer", "lr_scheduler"}
    usual |= {"train_dataloader", "eval_dataloader"}
    more = {"on_log": {"logs"}, "on_evaluate": {"metrics"}, "on_predict": {"metrics"}}
    for event, _, kwargs in note.seen:
        assert kwargs.keys() == usual | more.get(event, set())
        assert kwargs["model"] is one.model and kwargs["processing_class"] == kwargs["tokenizer"] == "words"
        if event not in ("on_init_end",):
            assert kwargs["optimizer"] is one.optimizer and kwargs["lr_scheduler"] is one.lr_scheduler
            assert kwargs["train_dataloader"] is not None
    evaluated = next(kwargs for event, _, kwargs in note.seen if event == "on_evaluate")
    assert "eval_loss" in evaluated["metrics"] and len(evaluated["eval_dataloader"]) == 1
    assert "loss" in next(kwargs for event, _, kwargs in note.seen if event == "on_log")["logs"]
    assert "test_loss" in note.seen[-1][2]["metrics"]


class Ask(TrainerCallback):
    """Sets switches at the end of a step."""

    def __init__(self, step: int, *switches: str) -> None:
        self.step, self.switches = step, switches

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for switch in self.switches if state.global_step == self.step else ():
            setattr(control, switch, True)
        return control


def test_switches_make_the_loop_log_evaluate_and_save(tmp_path: Path) -> None:
    note = Everything()
    ask = Ask(2, "should_log", "should_evaluate", "should_save")
    one = trainer(tmp_path, ROWS, eval_dataset=ROWS[:4], callbacks=[ask, note], max_steps=4)
    one.train()
    asked = [(event, step) for event, step, _ in note.seen if event in ("on_log", "on_evaluate", "on_save")]
    assert asked == [("on_log", 2), ("on_log", 2), ("on_evaluate", 2), ("on_save", 2), ("on_log", 4)]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_an_epoch_can_be_left_and_training_stopped(tmp_path: Path) -> None:
    note = Everything()
    one = trainer(tmp_path, ROWS, callbacks=[Ask(1, "should_epoch_stop"), note], num_train_epochs=2)
    one.train()
    assert one.state.global_step == 5  # one step of the first epoch, four of the second
    assert [step for event, step, _ in note.seen if event == "on_epoch_begin"] == [0, 1]
    one = trainer(tmp_path, ROWS, callbacks=[Ask(3, "should_training_stop")], num_train_epochs=2)
    one.train()
    assert one.state.global_step == 3


# ------------------------------------------------------------------------------------------------------------- states
class Counter(TrainerCallback, ExportableState):
    """Counts steps, by `by`."""

    def __init__(self, by: int = 1) -> None:
        self.by, self.count = by, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += self.by

    def state(self) -> dict[str, Any]:
        return {"args": {"by": self.by}, "attributes": {"count": self.count}}


class Absent(Counter):
    pass


def test_states_of_several_callbacks_of_one_class_are_restored_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"num_train_epochs": 2}
    first = [Counter(1), Counter(10), Absent()]
    assert preempted_at(trainer(tmp_path, ROWS, callbacks=[*first, StopAt(3)], **given)) == 3
    again = [Counter(1), Counter(10)]
    trainer(tmp_path, ROWS, callbacks=again, **given).train(resume_from_checkpoint=True)
    assert [each.count for each in again] == [8, 80]
    assert "state of a Absent, which is not among the callbacks" in caplog.text


@pytest.mark.parametrize(("restore", "counts"), [(False, [3 + 5 * 100]), (True, [8])])
def test_restoring_callback_states_replaces_those_given(restore: bool, counts: list[int], tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_train_epochs": 2, "restore_callback_states_from_checkpoint": restore}
    assert preempted_at(trainer(tmp_path, ROWS, callbacks=[Counter(1), StopAt(3)], **given)) == 3
    one = trainer(tmp_path, ROWS, callbacks=[Counter(100)], **given)
    one.train(resume_from_checkpoint=True)
    assert [each.count for each in one.callback_handler.callbacks if isinstance(each, Counter)] == counts


# ----------------------------------------------------------------------------------------------------- early stopping
ACCURACIES = [0.5, 0.6, 0.55, 0.58, 0.59, 0.9]
WATCH: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "max_steps": 8,
}


def watched(folder: Path, first: int = 0, **given: Any) -> Any:
    values = iter(ACCURACIES[first:])
    return trainer(
        folder, ROWS, eval_dataset=ROWS[:4], compute_metrics=lambda p: {"accuracy": next(values)}, **{**WATCH, **given}
    )


def test_early_stopping_goes_on_counting_in_a_resumed_run(tmp_path: Path) -> None:
    whole = watched(tmp_path / "a", callbacks=[EarlyStoppingCallback(3)])
    whole.train()
    assert whole.state.global_step == 5 and whole.state.best_global_step == 2
    stopped = watched(tmp_path / "b", callbacks=[EarlyStoppingCallback(3), StopAt(3)])
    assert preempted_at(stopped) == 3
    # The request cut the evaluation of step 3 short: the resumed run makes up for it.
    resumed = watched(tmp_path / "b", first=2, callbacks=[EarlyStoppingCallback(3)])
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
    assert resumed.state.best_metric == 0.6 and resumed.state.best_model_checkpoint.endswith("checkpoint-2")


# -------------------------------------------------------------------------------------------------------------- logging
@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"logging_steps": 3}, [3, 6]),
        ({"logging_steps": 3, "logging_first_step": True}, [1, 3, 6]),
        ({"logging_steps": 0.5}, [4, 8]),
        ({"logging_strategy": "epoch"}, [4, 8]),
        ({"logging_strategy": "no"}, []),
    ],
)
def test_when_losses_are_logged(given: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, **{"num_train_epochs": 2, "logging_strategy": "steps", **given})
    one.train()
    assert [entry["step"] for entry in one.state.log_history if "loss" in entry] == steps


def test_the_memory_report_has_the_references_keys(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, eval_dataset=ROWS[:4], skip_memory_metrics=False, max_steps=1)
    train, evaluation, test = one.train().metrics, one.evaluate(), one.predict(ROWS[:4]).metrics
    assert {name for name in train if "_mem_" in name} == {
        "before_init_mem_cpu",
        *(f"{stage}_mem_cpu_{what}_delta" for stage in ("init", "train") for what in ("alloc", "peaked")),
    }
    for stage, metrics in (("eval", evaluation), ("test", test)):
        found = {name for name in metrics or {} if "_mem_" in name}
        assert found == {f"{stage}_mem_cpu_alloc_delta", f"{stage}_mem_cpu_peaked_delta"}
    assert all(isinstance(value, int) for name, value in train.items() if "_mem_" in name)
