"""What a Trainer, its accelerator, its state and its arguments tell; overrides that would never be called."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.toys import Classifier, classification_rows
from tests.support.training import Note, StopAt, arguments, preempted_at, trainer
from trainer_lib import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.overrides import CALLABLE, UNCALLED

ROWS = classification_rows(12)
EVERY_STEP: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}


# ---------------------------------------------------------------------------------------------------------- attributes
def test_attributes_tell_what_is_going_on(tmp_path: Path) -> None:
    class Look(TrainerCallback):
        phases: list[tuple[str, bool, bool]] = []  # noqa: RUF012

        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert one.model_wrapped.training and one.optimizer is not None and one.lr_scheduler is not None
            self.phases.append(("step", one.is_in_train, one.state.global_step > 0))

        def on_predict(self, *_: Any, **__: Any) -> None:
            self.phases.append(("predict", one.is_in_train, one.control.should_training_stop))

    look = Look()
    one = trainer(tmp_path, ROWS, callbacks=[look], max_steps=1, gradient_accumulation_steps=2)
    assert one.model_wrapped is one.model and one.optimizer is one.lr_scheduler is None
    one.train()
    one.predict(ROWS)
    assert look.phases == [("step", True, True), ("predict", False, True)]
    assert one.current_gradient_accumulation_steps == 2
    assert (one.is_model_parallel, one.place_model_on_device, one.label_names) == (False, True, ["labels"])
    assert one.args.output_dir == str(tmp_path)
    assert not one.is_fsdp_enabled and not one.is_deepspeed_enabled


def test_the_rank_of_a_single_process_is_zero(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    assert one.is_local_process_zero() and one.is_world_process_zero()
    assert one.state.is_local_process_zero and one.state.is_world_process_zero


def test_num_examples_is_the_datasets_length_or_an_estimate_from_the_batches(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS)
    assert one.num_examples(one.get_train_dataloader()) == one.num_examples(one.get_eval_dataloader(ROWS)) == 12
    assert one.num_examples([{"x": 1}, {"x": 2}]) == 8  # two batches of four


def test_end_finishes_the_trackers_and_leaves_the_process_group(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, report_to="jsonl", max_steps=1, **EVERY_STEP)
    closed: list[str] = []
    [tracking] = [each for each in one.callback_handler.callbacks if type(each).__name__ == "JsonlCallback"]
    tracking.close = closed.append  # type: ignore[attr-defined]
    one.train()
    closed.clear()
    one.end()
    assert closed == ["FINISHED"] and not torch.distributed.is_initialized()


def test_a_data_collator_of_ones_own_makes_the_batches(tmp_path: Path) -> None:
    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        labels = torch.tensor([row["labels"] for row in rows])
        return {"x": torch.stack([row["x"] * 0 for row in rows]), "labels": labels}

    one = trainer(tmp_path, ROWS, model=Classifier(0.0), data_collator=collate)
    logits = one.predict(ROWS).predictions
    assert (logits == logits[0]).all()


def test_the_sequence_to_sequence_trainers_helpers_can_be_called(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    settings: Any = GenerationConfig
    settings(max_length=7, num_beams=3).save_pretrained(tmp_path)
    assert Seq2SeqTrainer.load_generation_config(str(tmp_path)).num_beams == 3
    args = Seq2SeqTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    one = Seq2SeqTrainer(Classifier(), args, processing_class=SimpleNamespace(pad_token_id=9, eos_token_id=None))
    assert one._pad_tensors_to_max_len(torch.tensor([[1, 2]]), 4).tolist() == [[1, 2, 9, 9]]


# ---------------------------------------------------------------------------------------------------------- accelerator
class ByHand(Trainer):
    """A training step that goes through every member of the accelerator."""

    used = False

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        helper, self.used = self.accelerator, True
        assert (helper.num_processes, helper.process_index, helper.device.type) == (1, 0, "cpu")
        assert helper.is_main_process and helper.is_local_main_process and helper.sync_gradients
        inputs = self._prepare_inputs(inputs)
        with helper.no_sync(model), helper.autocast():
            loss: torch.Tensor = helper.unwrap_model(model)(**inputs)["loss"]
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.bfloat16
        helper.backward(loss)
        gradients = [each for each in self.model.parameters() if each.grad is not None]
        assert helper.clip_grad_norm_(gradients, 1e-9) > 1e-9
        total = math.sqrt(sum(float((each.grad**2).sum()) for each in gradients if each.grad is not None))
        assert total == pytest.approx(1e-9, rel=1e-3)
        helper.wait_for_everyone()
        assert helper.gather(loss.detach()) == helper.gather_for_metrics(loss.detach()) == loss
        return loss.detach()


def test_the_accelerator_serves_steps_of_ones_own(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, cls=ByHand, max_steps=1, bf16=True)
    one.train()
    assert one.used  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------------- state
def test_every_member_of_the_state_says_where_training_stands(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    given |= {"load_best_model_at_end": True, "num_train_epochs": 2, "logging_strategy": "steps", "logging_steps": 2}
    one = trainer(tmp_path, ROWS, eval_dataset=ROWS[:4], include_num_input_tokens_seen="all", **given)
    one.train()
    state = one.state
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

    assert Watching(Classifier(), given).moved
    assert not Watching(Classifier(), Placed(str(tmp_path), use_cpu=True)).moved


def test_mixed_precision_says_which_number_format_the_arguments_ask_for() -> None:
    formats = [TrainingArguments("out", **given).mixed_precision for given in ({}, {"bf16": True}, {"fp16": True})]  # type: ignore[arg-type]
    assert formats == ["no", "bf16", "fp16"]


# ------------------------------------------------------------------------------------------------------------ overrides
@pytest.mark.parametrize("name", sorted(UNCALLED))
def test_an_override_that_nobody_would_call_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    assert hasattr(Trainer, name) == (name in CALLABLE)
    mixin = type("Mixin", (), {name: lambda self, *given: None})
    cls: Any = type("Mine", (mixin, Trainer), {})
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path, ROWS, cls=cls)
    assert caught.value.field == f"Mixin.{name}"
    assert len(caught.value.remedy or "") > 10


def test_a_rate_of_ones_own_is_logged(tmp_path: Path) -> None:
    class Shown(Trainer):
        def _get_learning_rate(self) -> float:
            return 0.25

    one = trainer(tmp_path, ROWS, cls=Shown, max_steps=1, **EVERY_STEP)
    one.train()
    assert one.state.log_history[0]["learning_rate"] == 0.25


def test_a_push_and_a_report_to_a_search_of_ones_own_are_called(tmp_path: Path) -> None:
    class Own(Trainer):
        told: list[Any] = []  # noqa: RUF012

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            self.told.append(checkpoint_folder)

        def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
            self.told.append((step, sorted(metrics)[0]))

    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path / "a", ROWS, cls=Own, eval_dataset=ROWS, max_steps=1, **given).train()
    assert Own.told == [(1, "epoch")]  # nothing is pushed
    given |= {"push_to_hub": True, "hub_model_id": (tmp_path / "hub").as_uri()}
    trainer(tmp_path / "b", ROWS, cls=Own, eval_dataset=ROWS, max_steps=1, **given).train()
    assert Own.told[1:] == [(1, "epoch"), str(tmp_path / "b" / "checkpoint-1")]


def test_resume_from_checkpoint_may_stand_in_the_arguments(tmp_path: Path) -> None:
    assert preempted_at(trainer(tmp_path, ROWS, callbacks=[StopAt(2)], num_train_epochs=2)) == 2
    for asked in (True, "auto", str(tmp_path / "checkpoint-2")):
        started = Note("on_train_begin", lambda state, **_: state.global_step)
        trainer(tmp_path, ROWS, callbacks=[started], num_train_epochs=2, resume_from_checkpoint=asked).train()
        assert started.kept == [2]
