"""Every public method may be overridden in a subclass, and is then called."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from tests.support import surface
from tests.support.overrides import ROWS, SURFACE, exercise
from tests.support.training import trainer
from trainer_lib import Trainer, TrainerCallback


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


class Rewriting(Trainer):
    """Changes what a method gives, to see that the change arrives."""

    def get_train_dataloader(self) -> Any:
        rows = [{"x": row["x"].unsqueeze(0), "labels": torch.tensor([row["labels"]])} for row in ROWS[:2]]
        return torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        assert optimizer is self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.5, total_iters=99)
        return self.lr_scheduler

    def log(self, logs: dict[str, float]) -> None:  # type: ignore[override]  # as of old
        super().log({**logs, "mine": 1.0})

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval_loss": 7.0}

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return []


def test_what_overrides_return_takes_effect(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"}
    one = trainer(tmp_path, None, cls=Rewriting, num_train_epochs=2, logging_strategy="steps", logging_steps=1, **given)
    one.train()
    assert one.state.global_step == 4
    assert isinstance(one.optimizer, torch.optim.SGD)
    assert {entry["learning_rate"] for entry in one.state.log_history if "learning_rate" in entry} == {0.125}
    assert all(entry["mine"] == 1.0 for entry in one.state.log_history)
    assert one.state.best_metric == 7.0


def test_callbacks_can_be_added_taken_and_removed_and_their_returned_control_counts(tmp_path: Path) -> None:
    class Stopping(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = True
            return control

    one = trainer(tmp_path, ROWS, max_steps=9)
    one.add_callback(Stopping)
    one.train()
    assert one.state.global_step == 1
    assert isinstance(one.pop_callback(Stopping), Stopping)
    assert one.pop_callback(Stopping) is None
    extra = Stopping()
    one.add_callback(extra)
    one.remove_callback(extra)
    one.train()
    assert one.state.global_step == 9


class OfOld(Trainer):
    """Overrides as written for the Trainers of five years, none of which knew the newest parameters."""

    def training_step(self, model: Any, inputs: Any) -> torch.Tensor:  # type: ignore[override]
        seen.append("training_step")
        return super().training_step(model, inputs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False) -> Any:  # type: ignore[override]
        seen.append("compute_loss")
        return super().compute_loss(model, inputs, return_outputs)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        seen.append("prediction_step")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def create_optimizer(self) -> Any:  # type: ignore[override]
        seen.append("create_optimizer")
        return super().create_optimizer()

    def _get_train_sampler(self) -> Any:  # type: ignore[override]
        seen.append("_get_train_sampler")
        return torch.utils.data.SequentialSampler(ROWS)

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        seen.append("_save")
        super()._save(output_dir)

    def _wrap_model(self, model: Any, training: bool = True) -> Any:  # type: ignore[override]
        seen.append("_wrap_model")
        return super()._wrap_model(model, training)

    def log(self, logs: dict[str, float]) -> None:  # type: ignore[override]
        seen.append("log")
        super().log(logs)

    def floating_point_ops(self, inputs: Any) -> int:
        seen.append("floating_point_ops")
        return 1


seen: list[str] = []


def test_overrides_with_the_signatures_of_old_are_called_as_they_take_it(tmp_path: Path) -> None:
    seen.clear()
    one = trainer(tmp_path, ROWS, cls=OfOld, eval_dataset=ROWS, max_steps=2, logging_strategy="steps", logging_steps=1)
    one.train()
    one.evaluate()
    one.save_model()
    assert set(seen) == {name for name in vars(OfOld) if not name.startswith("__")}
    assert one.state.total_flos == 2
