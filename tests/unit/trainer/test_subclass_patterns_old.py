"""Overrides with the signatures of earlier Trainers: they end where the newest form ends on transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional

import trainer_lib
from tests.support.patterns import ROWS, Make, Table, assert_same
from tests.support.seq2seq import Copier, rows, seq2seq_trainer
from tests.support.toys import TokenModel, token_rows
from trainer_lib import Seq2SeqTrainer


def own_cross_entropy(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = functional.cross_entropy(outputs["logits"], labels)
            return (loss, outputs) if return_outputs else loss

    return make(Mine, eval_dataset=ROWS, eval_strategy="steps", eval_steps=1)


OLD = Table()


@OLD.add
def without_the_number_of_items(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = functional.cross_entropy(outputs["logits"], labels)
            return (loss, outputs) if return_outputs else loss

        def training_step(self, model: Any, inputs: Any) -> Any:
            return super().training_step(model, inputs)

    return make(Mine, eval_dataset=ROWS, eval_strategy="steps", eval_steps=1)


@OLD.add
def without_the_outputs(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return functional.cross_entropy(model(x=inputs["x"])["logits"], inputs["labels"])

    return make(Mine, eval_dataset=ROWS, eval_strategy="steps", eval_steps=1)


@OLD.add
def a_step_that_divides_what_it_returns(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def training_step(self, model: Any, inputs: Any) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.autocast_smart_context_manager():
                loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach() / self.args.gradient_accumulation_steps

    return make(Mine, eval_dataset=ROWS, eval_strategy="steps", eval_steps=1)


@pytest.mark.parametrize("name", sorted(OLD))
def test_an_older_signature_ends_where_the_newest_one_ends_on_transformers_trainer(name: str, tmp_path: Path) -> None:
    assert_same(OLD[name], tmp_path, reference=own_cross_entropy)


# ------------------------------------------------------------------------------------------ attributes that are set
def test_generation_settings_that_a_subclass_sets_may_be_none(tmp_path: Path) -> None:
    class Questions(Seq2SeqTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self._gen_kwargs = {"max_length": None, "num_beams": None}
            loader = self.get_eval_dataloader(args[0])
            return self.evaluation_loop(loader, "Evaluation", metric_key_prefix="eval").metrics

    one = seq2seq_trainer(tmp_path, Copier(), cls=Questions, generation_max_length=8)
    one.evaluate(rows(4))
    asked = one.model.asked[-1]
    assert (asked["max_length"], asked["num_beams"]) == (8, 1)  # as if neither were given


def test_the_noise_of_the_embedding_that_a_subclass_sets_is_used(tmp_path: Path) -> None:
    class Noisy(trainer_lib.Trainer):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.neftune_noise_alpha = 5.0

    losses = []
    for cls in (trainer_lib.Trainer, Noisy):
        one = Make(trainer_lib, tmp_path / cls.__name__)(cls, model=TokenModel(), train_dataset=token_rows(8))
        one.train()
        losses.append([entry["loss"] for entry in one.state.log_history if "loss" in entry])
    assert losses[0] != losses[1]
