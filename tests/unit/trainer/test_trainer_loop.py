"""Training on one process: how long it is, what happens in which order, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.toys import Augmented, Classifier, Stream, classification_rows
from tests.support.training import Note, logged, trainer
from trainer_lib import Trainer
from trainer_lib.errors import ConfigError

ROWS = classification_rows(10)
EVERY_STEP: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}


# -------------------------------------------------------------------------------------------------------------- length
@pytest.mark.parametrize(
    ("given", "steps", "epoch"),
    [
        ({"num_train_epochs": 2}, 6, 2.0),
        ({"num_train_epochs": 0.5}, 2, 2 / 3),
        ({"max_steps": 4}, 4, 4 / 3),
        ({"gradient_accumulation_steps": 2, "num_train_epochs": 3}, 6, 3.0),
        ({"dataloader_drop_last": True, "num_train_epochs": 2}, 4, 2.0),
        ({"global_batch_size": 3, "num_train_epochs": 1}, 4, 1.0),
        ({"global_batch_size": 10, "per_device_train_batch_size": 3, "num_train_epochs": 2}, 2, 2.0),
    ],
)
def test_length(given: dict[str, Any], steps: int, epoch: float, tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, **given)
    output = one.train()
    assert (output.global_step, one.state.global_step, one.state.max_steps) == (steps, steps, steps)
    assert one.state.epoch == pytest.approx(epoch)


@pytest.mark.parametrize("loader", ["ours", "the user's"])
def test_the_epoch_of_a_stream_without_a_length_is_the_number_of_passes(loader: str, tmp_path: Path) -> None:
    """Ten rows in steps of four. The first pass has no known length: `max_steps` stands in for it."""

    class Loading(Trainer):
        def get_train_dataloader(self) -> Any:
            ours = super().get_train_dataloader()
            return ours if loader == "ours" else DataLoader(Stream(ROWS), batch_size=4)

    ends = Note("on_epoch_end", lambda state, **_: state.epoch)
    given: dict[str, Any] = {**EVERY_STEP, "save_strategy": "steps", "save_steps": 4, "max_steps": 11}

    def make(folder: str, *callbacks: Any) -> Trainer:
        return trainer(tmp_path / folder, Stream(ROWS), cls=Loading, callbacks=list(callbacks), **given)

    whole = make("whole", ends)
    whole.train()
    assert ends.kept == [1, 2, 3, pytest.approx(3 + 2 / 3)]
    epochs = [entry["epoch"] for entry in whole.state.log_history if "loss" in entry]
    assert epochs[3:] == pytest.approx([1 + 1 / 3, 1 + 2 / 3, 2, 2 + 1 / 3, 2 + 2 / 3, 3, 3 + 1 / 3, 3 + 2 / 3])
    assert epochs[:3] == sorted(epochs[:3]) and epochs[2] < 1
    resumed = make("resumed")
    resumed.train(str(tmp_path / "whole" / "checkpoint-4"))
    assert [entry["epoch"] for entry in resumed.state.log_history if "loss" in entry] == epochs


def test_every_sample_is_read_once_per_epoch_in_another_order(tmp_path: Path) -> None:
    data = Augmented(ROWS)
    trainer(tmp_path, data, num_train_epochs=2, gradient_accumulation_steps=2).train()
    assert sorted(data.read[:10]) == sorted(data.read[10:]) == list(range(10))
    assert data.read[:10] != data.read[10:]
    again = Augmented(ROWS)
    trainer(tmp_path, again, num_train_epochs=1, dataloader_num_workers=0, data_seed=42).train()
    assert again.read == data.read[:10]
    other = Augmented(ROWS)
    trainer(tmp_path, other, num_train_epochs=1, data_seed=1).train()
    assert other.read != again.read


# --------------------------------------------------------------------------------------------------------- the story


def test_what_is_logged(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, num_train_epochs=1, lr_scheduler_type="linear", **EVERY_STEP)
    output = one.train()
    *steps, last = logged(one)
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert steps[0].keys() == {"loss", "grad_norm", "learning_rate", "epoch", "step"}
    assert [entry["learning_rate"] for entry in steps] == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
    assert last["train_loss"] == output.training_loss == pytest.approx(np.mean([entry["loss"] for entry in steps]))
    sparse = trainer(tmp_path, ROWS, num_train_epochs=1, logging_strategy="steps", logging_steps=3)
    sparse.train()
    assert sparse.state.log_history[0]["loss"] == pytest.approx(np.mean([entry["loss"] for entry in steps]))
    first = trainer(tmp_path, ROWS, max_steps=2, logging_strategy="steps", logging_steps=9, logging_first_step=True)
    first.train()
    assert [entry["step"] for entry in first.state.log_history] == [1, 2]


def test_clipping_limits_the_norm_and_logs_it_before(tmp_path: Path) -> None:
    def norm(state: Any, model: torch.nn.Module, **_: Any) -> float:
        return float(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).norm())

    norms = Note("on_pre_optimizer_step", norm)
    for limit in (0.01, 0.0):
        one = trainer(tmp_path, ROWS, max_steps=1, callbacks=[norms], max_grad_norm=limit, **EVERY_STEP)
        one.train()
    assert norms.kept[0] == pytest.approx(0.01, rel=1e-3)
    assert norms.kept[1] == pytest.approx(one.state.log_history[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("given", [{"bf16": True}, {"fp16": True}, {"optim": "sgd"}, {"optim": "adafactor"}, {}])
def test_it_learns(given: dict[str, Any], tmp_path: Path) -> None:
    rows = classification_rows(64)
    one = trainer(tmp_path, rows, num_train_epochs=12, learning_rate=0.05, logging_strategy="epoch", **given)
    one.train()
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    assert losses[-1] < 0.6 * losses[0]


# ------------------------------------------------------------------------------------------------------ the optimizer
def test_what_can_be_asked_about_the_optimizer(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, weight_decay=0.1)
    with pytest.raises(ConfigError, match="The optimizer does not exist yet"):
        one.get_learning_rates()
    one.create_optimizer_and_scheduler(10)
    assert one.get_learning_rates() == [0.01, 0.01]
    assert one.get_optimizer_group("body.weight")["weight_decay"] == 0.1
    assert one.get_optimizer_group(one.model.norm.weight)["weight_decay"] == 0.0  # type: ignore[union-attr,arg-type]
    assert len(one.get_optimizer_group()) == 2
    with pytest.raises(ConfigError, match="param = other: The optimizer does not hold the parameter"):
        one.get_optimizer_group("other")
    assert one.get_num_trainable_parameters() == sum(p.numel() for p in one.model.parameters())
    assert one.get_decay_parameter_names(one.model) == ["body.weight", "head.weight"]


def test_a_users_optimizer_and_schedule_are_used(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    one = trainer(tmp_path, ROWS, model=model, optimizers=(optimizer, schedule), max_steps=2, **EVERY_STEP)
    one.train()
    assert [entry["learning_rate"] for entry in one.state.log_history[:2]] == pytest.approx([0.5, 0.05])
    chosen = trainer(tmp_path, ROWS, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.3}), max_steps=1)
    chosen.train()
    assert isinstance(chosen.optimizer, torch.optim.SGD)


def test_a_schedule_that_follows_a_metric_steps_after_evaluations(tmp_path: Path) -> None:
    one = trainer(
        tmp_path,
        ROWS,
        eval_dataset=ROWS,
        compute_metrics=lambda p: {"worse": 1.0},
        metric_for_best_model="worse",
        eval_strategy="steps",
        eval_steps=1,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        max_steps=3,
        **EVERY_STEP,
    )
    one.train()
    rates = [entry["learning_rate"] for entry in one.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.01, 0.01, 0.005])


def test_training_twice_trains_again_from_the_weights_there_are(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, max_steps=2, save_strategy="steps", save_steps=1)
    one.train()
    first = one.model.head.weight.detach().clone()  # type: ignore[operator,union-attr]
    one.train()
    assert one.state.global_step == 2
    assert not torch.equal(first, one.model.head.weight)  # type: ignore[arg-type,union-attr]
    assert one.get_learning_rates() == [0.0, 0.0]
    fresh = trainer(tmp_path / "b", ROWS, model_init=Classifier, max_steps=2)
    fresh.train()
    weights = fresh.model.state_dict()["head.weight"].clone()
    fresh.train()
    assert torch.equal(weights, fresh.model.state_dict()["head.weight"])
