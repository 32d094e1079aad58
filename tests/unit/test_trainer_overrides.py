"""Every public method may be overridden in a subclass, and is then called."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib import EarlyStoppingCallback, Trainer, TrainerCallback

ROWS = classification_rows(12)
SURFACE = json.loads((Path(__file__).parents[1] / "data" / "trainer_methods.json").read_text())


@pytest.fixture
def exercised(tmp_path: Path) -> set[str]:
    """The names of all overridden methods that a run calls: training, evaluating, predicting, saving, reporting."""
    called: set[str] = set()

    def spying(name: str, method: Any) -> Any:
        def spy(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return method(*args, **kwargs)

        return staticmethod(spy) if isinstance(inspect.getattr_static(Trainer, name), staticmethod) else spy

    body = {name: spying(name, getattr(Trainer, name)) for name in SURFACE["called"]}
    spied: Any = type("Spied", (Trainer,), body)
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    given |= {"logging_strategy": "steps", "logging_steps": 1, "load_best_model_at_end": True, "max_steps": 2}
    one: Trainer = trainer(
        tmp_path,
        ROWS,
        cls=spied,
        eval_dataset=ROWS,
        model_init=Classifier,
        use_legacy_prediction_loop=True,
        include_num_input_tokens_seen="all",
        compute_metrics=lambda p: {"rows": float(len(p.predictions))},
        **given,
    )
    one.add_callback(EarlyStoppingCallback(5))
    one.train(resume_from_checkpoint="auto")
    one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    one.predict(ROWS)
    one.save_model(str(tmp_path / "model"))
    one.save_state()
    one.log_metrics("train", {"loss": 1.0})
    one.save_metrics("train", {"loss": 1.0})
    return called


def test_every_overridable_method_is_called_by_a_run(exercised: set[str]) -> None:
    assert exercised == set(SURFACE["called"])


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
