"""What callbacks are given and do in a training, what overrides do, and what a Trainer and its parts tell."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import surface
from tests.support.overrides import SURFACE, exercise
from tests.support.toys import Classifier, classification_rows
from tests.support.training import LOGGED, Note, StopAt, arguments, preempted_at, trained, trainer
from trainer_lib import ExportableState, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback
from trainer_lib.callbacks.base import EVENTS
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.overrides import CALLABLE, UNCALLED

ROWS = classification_rows(16)
DOZEN = ROWS[:12]
seen: list[str] = []


def noting_everything() -> tuple[TrainerCallback, list[tuple[str, int, dict[str, Any]]]]:
    """A callback, and the list in which it notes every event with its step and what it was given by keyword."""
    note, seen = TrainerCallback(), list[tuple[str, int, dict[str, Any]]]()

    def noting(event: str) -> Any:
        return lambda args, state, control, **kwargs: seen.append((event, state.global_step, kwargs))

    for event in EVENTS:
        setattr(note, event, noting(event))
    return note, seen


def test_all_sixteen_events_fire_where_they_should_with_what_they_should(tmp_path: Path) -> None:
    note, seen = noting_everything()
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    given |= {"logging_strategy": "steps", "logging_steps": 2, "gradient_accumulation_steps": 3, "max_steps": 2}
    given |= {"push_to_hub": True, "hub_model_id": str(tmp_path / "hub"), "hub_strategy": "end"}
    given |= {"per_device_train_batch_size": 2}
    one = trained(tmp_path / "out", ROWS, eval_dataset=ROWS[:4], callbacks=[note], processing_class="words", **given)
    one.predict(ROWS[:4])
    step = ["on_step_begin", *("on_substep_end",) * 2, "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    evaluation = ["on_prediction_step", "on_log", "on_evaluate"]
    order = [event for event, _, _ in seen]
    assert order == [
        *("on_init_end", "on_train_begin", "on_epoch_begin", *step, *step, "on_log", *evaluation, "on_save"),
        *("on_epoch_end", "on_log", "on_train_end", "on_push_begin", "on_prediction_step", "on_predict"),
    ]
    assert sorted(set(order)) == sorted(EVENTS) == surface.SURFACE["TrainerCallback_events"]
    usual = {"model", "processing_class", "tokenizer", "optimizer", "lr_scheduler"}
    usual |= {"train_dataloader", "eval_dataloader"}
    more = {"on_log": {"logs"}, "on_evaluate": {"metrics"}, "on_predict": {"metrics"}}
    for event, _, kwargs in seen:
        assert kwargs.keys() == usual | more.get(event, set())
        assert kwargs["model"] is one.model and kwargs["processing_class"] == kwargs["tokenizer"] == "words"
        if event not in ("on_init_end",):
            assert kwargs["optimizer"] is one.optimizer and kwargs["lr_scheduler"] is one.lr_scheduler
            assert kwargs["train_dataloader"] is not None
    evaluated = next(kwargs for event, _, kwargs in seen if event == "on_evaluate")
    assert "eval_loss" in evaluated["metrics"] and len(evaluated["eval_dataloader"]) == 1
    assert "loss" in next(kwargs for event, _, kwargs in seen if event == "on_log")["logs"]
    assert "test_loss" in seen[-1][2]["metrics"]


class Ask(TrainerCallback):
    """Sets switches at the end of a step."""

    def __init__(self, step: int, *switches: str) -> None:
        self.step, self.switches = step, switches

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for switch in self.switches if state.global_step == self.step else ():
            setattr(control, switch, True)
        return control


def test_switches_make_the_loop_log_evaluate_and_save(tmp_path: Path) -> None:
    note, seen = noting_everything()
    ask = Ask(2, "should_log", "should_evaluate", "should_save")
    trained(tmp_path, ROWS, eval_dataset=ROWS[:4], callbacks=[ask, note], max_steps=4)
    asked = [(event, step) for event, step, _ in seen if event in ("on_log", "on_evaluate", "on_save")]
    assert asked == [("on_log", 2), ("on_log", 2), ("on_evaluate", 2), ("on_save", 2), ("on_log", 4)]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_an_epoch_can_be_left_and_training_stopped(tmp_path: Path) -> None:
    note, seen = noting_everything()
    one = trained(tmp_path, ROWS, callbacks=[Ask(1, "should_epoch_stop"), note], num_train_epochs=2)
    assert one.state.global_step == 5  # one step of the first epoch, four of the second
    assert [step for event, step, _ in seen if event == "on_epoch_begin"] == [0, 1]
    one = trained(tmp_path, ROWS, callbacks=[Ask(3, "should_training_stop")], num_train_epochs=2)
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


def test_every_overridable_method_is_called_by_a_run(tmp_path: Path) -> None:
    assert exercise(str(tmp_path)) == SURFACE["called"]


def test_no_public_method_of_the_reference_is_left_out() -> None:
    reference = surface.SURFACE["Trainer_methods"]
    foreign = {"get_cp_size", "get_sp_size", "get_tp_size"}  # of parallelism inside a layer
    public = {name for name in reference if not name.startswith("_")} - foreign
    assert public <= {*SURFACE["called"], *SURFACE["called_by_users_only"]}


def test_signatures_are_the_references() -> None:
    for name, parameters in SURFACE["signatures"].items():
        found = [p for p in inspect.signature(getattr(Trainer, name)).parameters if p != "self"]
        assert found[: len(parameters)] == parameters, name


class OfOld(Trainer):
    """Overrides as written for the Trainers of five years, none of which knew the newest parameters."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        seen.append("prediction_step")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _get_train_sampler(self) -> Any:  # type: ignore[override]
        seen.append("_get_train_sampler")
        return torch.utils.data.SequentialSampler(DOZEN)

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        seen.append("_save")
        super()._save(output_dir)

    def _wrap_model(self, model: Any, training: bool = True) -> Any:  # type: ignore[override]
        seen.append("_wrap_model")
        return super()._wrap_model(model, training)

    def floating_point_ops(self, inputs: Any) -> int:
        seen.append("floating_point_ops")
        return 1


def test_overrides_with_the_signatures_of_old_are_called_as_they_take_it(tmp_path: Path) -> None:
    seen.clear()
    one = trained(tmp_path, DOZEN, cls=OfOld, eval_dataset=DOZEN, max_steps=2, **LOGGED)
    one.evaluate()
    one.save_model()
    assert set(seen) == {name for name in vars(OfOld) if not name.startswith("__")}
    assert one.state.total_flos == 2


# ---------------------------------------------------------------------------------------------------------- attributes
def test_attributes_tell_what_is_going_on(tmp_path: Path) -> None:
    def look(state: Any, **_: Any) -> Any:
        assert one.model_wrapped.training and one.optimizer is not None and one.lr_scheduler is not None
        return one.is_in_train, state.global_step > 0

    step = Note("on_step_end", look)
    predict = Note("on_predict", lambda *_, **__: (one.is_in_train, one.control.should_training_stop))
    one = trainer(tmp_path, DOZEN, callbacks=[step, predict], max_steps=1, gradient_accumulation_steps=2)
    assert one.model_wrapped is one.model and one.optimizer is one.lr_scheduler is None
    one.train()
    one.predict(DOZEN)
    assert (step.kept, predict.kept) == ([(True, True)], [(False, True)])
    assert one.current_gradient_accumulation_steps == 2
    assert (one.is_model_parallel, one.place_model_on_device, one.label_names) == (False, True, ["labels"])
    assert one.args.output_dir == str(tmp_path)
    assert not one.is_fsdp_enabled and not one.is_deepspeed_enabled
    assert one.is_local_process_zero() and one.is_world_process_zero()
    assert one.state.is_local_process_zero and one.state.is_world_process_zero
    assert one.num_examples(one.get_train_dataloader()) == one.num_examples(one.get_eval_dataloader(DOZEN)) == 12
    assert one.num_examples([{"x": 1}, {"x": 2}]) == 8  # without a length: two batches of four


def test_end_finishes_the_trackers_and_leaves_the_process_group(tmp_path: Path) -> None:
    one = trainer(tmp_path, DOZEN, report_to="jsonl", max_steps=1, **LOGGED)
    closed: list[str] = []
    [tracking] = [each for each in one.callback_handler.callbacks if type(each).__name__ == "JsonlCallback"]
    tracking.close = closed.append  # type: ignore[attr-defined]
    one.train()
    closed.clear()
    one.end()
    assert closed == ["FINISHED"] and not torch.distributed.is_initialized()


def test_the_sequence_to_sequence_trainers_helpers_can_be_called(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    settings: Any = GenerationConfig
    settings(max_length=7, num_beams=3).save_pretrained(tmp_path)
    assert Seq2SeqTrainer.load_generation_config(str(tmp_path)).num_beams == 3
    args = Seq2SeqTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    one = Seq2SeqTrainer(Classifier(), args, processing_class=SimpleNamespace(pad_token_id=9, eos_token_id=None))
    assert one._pad_tensors_to_max_len(torch.tensor([[1, 2]]), 4).tolist() == [[1, 2, 9, 9]]


# ---------------------------------------------------------------------------------------------------------------- state
def test_every_member_of_the_state_says_where_training_stands(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    given |= {"load_best_model_at_end": True, "num_train_epochs": 2, "logging_strategy": "steps", "logging_steps": 2}
    state = trained(tmp_path, DOZEN, eval_dataset=DOZEN[:4], include_num_input_tokens_seen="all", **given).state
    assert (state.epoch, state.global_step, state.max_steps, state.num_train_epochs) == (2.0, 6, 6, 2)
    assert (state.logging_steps, state.eval_steps, state.save_steps, state.train_batch_size) == (2, 2, 2, 4)
    assert state.num_input_tokens_seen == 0 and state.total_flos > 0  # rows of numbers have no tokens
    losses = {entry["step"]: entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry}
    assert state.best_metric == min(losses.values()) == losses[state.best_global_step or 0]
    assert state.best_model_checkpoint == str(tmp_path / f"checkpoint-{state.best_global_step}")
    assert (state.is_hyper_param_search, state.trial_name, state.trial_params) == (False, None, None)
    assert "TrainerControl" in (state.stateful_callbacks or {})


# ------------------------------------------------------------------------------------------------------------ arguments
def test_a_subclass_of_the_arguments_may_place_the_model_itself(tmp_path: Path) -> None:
    given = arguments(tmp_path)

    class Placed(type(given)):  # type: ignore[misc]
        place_model_on_device = False

    class Watching(Trainer):
        moved = False

        def _move_model_to_device(self, model: Any, device: Any) -> None:
            self.moved = True

    assert Watching(Classifier(), given).moved and not Watching(Classifier(), Placed(str(tmp_path), use_cpu=True)).moved


# ------------------------------------------------------------------------------------------------------------ overrides
@pytest.mark.parametrize("name", sorted(UNCALLED))
def test_an_override_that_nobody_would_call_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    assert hasattr(Trainer, name) == (name in CALLABLE)
    mixin = type("Mixin", (), {name: lambda self, *given: None})
    cls: Any = type("Mine", (mixin, Trainer), {})
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, DOZEN, cls=cls)
    assert caught.value.field == f"Mixin.{name}" and len(caught.value.remedy or "") > 10


def test_a_push_and_a_report_to_a_search_of_ones_own_are_called(tmp_path: Path) -> None:
    class Own(Trainer):
        told: list[Any] = []  # noqa: RUF012

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            self.told.append(checkpoint_folder)

        def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
            self.told.append((step, sorted(metrics)[0]))

    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path / "a", DOZEN, cls=Own, eval_dataset=DOZEN, max_steps=1, **given).train()
    assert Own.told == [(1, "epoch")]  # nothing is pushed
    given |= {"push_to_hub": True, "hub_model_id": (tmp_path / "hub").as_uri()}
    trainer(tmp_path / "b", DOZEN, cls=Own, eval_dataset=DOZEN, max_steps=1, **given).train()
    assert Own.told[1:] == [(1, "epoch"), str(tmp_path / "b" / "checkpoint-1")]
