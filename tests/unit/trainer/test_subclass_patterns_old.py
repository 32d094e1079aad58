"""Overrides with the signatures of earlier Trainers: they end where the newest form ends on transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional

from tests.support.patterns import ROWS, Make, Table, assert_same


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
