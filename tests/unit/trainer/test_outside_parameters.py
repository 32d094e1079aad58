"""Weights of a loss module train, are saved and resumed; a model's own `load_state_dict` is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.searching import search_trainer
from tests.support.toys import Classifier, classification_rows
from tests.support.training import assert_equal, final_state, note_heads, trainer
from trainer_lib import Trainer
from trainer_lib.errors import ConfigError

ROWS = classification_rows(32)
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}


class Scaled(nn.Module):
    """A loss with a weight, and a count that it keeps in a buffer."""

    calls: torch.Tensor

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))
        self.model = model

    def forward(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls += 1
        logits = outputs["logits"]
        return nn.functional.cross_entropy(logits * self.scale.mean(), labels) + (self.scale**2).mean()


class WithLoss(Trainer):
    """Keeps a loss, or several by name, as the trainers of sentence-transformers do."""

    loss: Any

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self.loss["main"] if isinstance(self.loss, Mapping) else self.loss
        outputs = model(x=inputs["x"])
        value = loss(outputs, inputs["labels"])
        return (value, outputs) if return_outputs else value

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        every = nn.ModuleDict(self.loss) if isinstance(self.loss, Mapping) else self.loss
        self.optimizer = torch.optim.AdamW([{"params": list(every.parameters())}], lr=1e-2)
        return self.optimizer


class Anonymous(WithLoss):
    """The parameter is not an attribute of the Trainer."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        hidden = self.loss
        self.loss = hidden.__call__
        self.optimizer = torch.optim.AdamW([{"params": list(hidden.parameters())}], lr=1e-2)
        return self.optimizer


def _by_override(folder: Path, cls: Any = WithLoss, **given: Any) -> tuple[Trainer, Scaled]:
    torch.manual_seed(0)
    model = Classifier()
    loss = Scaled(model)
    one = trainer(folder, ROWS, model=model, cls=cls, **{**SAVING, **given})
    one.loss = loss  # type: ignore[attr-defined]
    return one, loss


def _by_name(folder: Path, **given: Any) -> tuple[Trainer, Scaled]:
    one, loss = _by_override(folder, **given)
    one.loss = {"main": loss}  # type: ignore[attr-defined]
    return one, loss


def _anonymous(folder: Path, **given: Any) -> tuple[Trainer, Scaled]:
    return _by_override(folder, Anonymous, **given)


def _as_loss_func(folder: Path, **given: Any) -> tuple[Trainer, Scaled]:
    loss = Scaled()
    return trainer(folder, ROWS, compute_loss_func=loss, **{**SAVING, **given}), loss


@pytest.mark.parametrize("build", [_by_override, _by_name, _anonymous, _as_loss_func])
@pytest.mark.parametrize("background", [False, True])
def test_weights_of_a_loss_train_and_are_resumed_bit_for_bit(tmp_path: Path, build: Any, background: bool) -> None:
    whole, expected = build(tmp_path / "whole", max_steps=4, save_async=background)
    whole.train()
    assert not torch.equal(expected.scale.detach(), torch.ones(4))
    build(tmp_path / "stopped", max_steps=2, save_async=background)[0].train()
    resumed, loss = build(tmp_path / "stopped", max_steps=4, save_async=background, resume_from_checkpoint=True)
    resumed.train()
    assert torch.equal(loss.scale, expected.scale)
    if build is not _anonymous:
        assert torch.equal(loss.calls, expected.calls)
    for one in (whole, resumed):
        assert one.optimizer is not None
        one.optimizer.param_groups = [
            {**group, "params": [each for each in group["params"] if each.shape != (4,)]}
            for group in one.optimizer.param_groups
        ]
        one.optimizer.state.clear()
    assert_equal(final_state(resumed), final_state(whole))


@pytest.mark.parametrize("build", [_by_override, _by_name, _as_loss_func])
def test_a_retry_with_less_memory_begins_with_the_first_weights_of_the_loss(tmp_path: Path, build: Any) -> None:
    class Hungry(Classifier):
        calls = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            self.calls += 1
            if self.calls > 3 and len(x) > 2:  # in the second half of a step: the first has left a gradient
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(x, labels)

    given: dict[str, Any] = {"max_steps": 4, "save_steps": 10, "global_batch_size": 8}
    small, expected = build(tmp_path / "small", per_device_train_batch_size=2, **given)
    small.train()
    found, loss = build(tmp_path / "found", auto_find_batch_size=True, **given)
    found.model.__class__ = Hungry
    found.train()
    assert found.state.train_batch_size == 2 and found.model.calls > 4
    assert torch.equal(loss.scale, expected.scale) and torch.equal(loss.calls, expected.calls)


def test_every_trial_begins_with_the_first_weights_of_the_loss(tmp_path: Path) -> None:
    loss = Scaled()
    one = search_trainer(tmp_path, compute_loss_func=loss)
    best = one.hyperparameter_search(lambda trial: {"learning_rate": 1e-2}, n_trials=3)
    assert len({each["objective"] for each in best.run_summary}) == 1
    assert torch.equal(loss.scale.detach(), torch.ones(4)) and loss.calls == 0
    one.train()
    assert not torch.equal(loss.scale.detach(), torch.ones(4))


def test_a_checkpoint_without_the_weights_of_the_loss_says_so(tmp_path: Path) -> None:
    trainer(tmp_path, ROWS, max_steps=2, **SAVING).train()
    with pytest.raises(ConfigError, match=r"lacks compute_loss_func\.scale"):
        _as_loss_func(tmp_path, max_steps=4, resume_from_checkpoint=True)[0].train()


def test_a_models_own_load_state_dict_is_reached(tmp_path: Path) -> None:
    class Renaming(Classifier):
        """Saves under other names than its parameters have, and takes a name that only a newer version writes."""

        loads = 0

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {f"v2.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            type(self).loads += 1
            named = {name.removeprefix("v2."): value for name, value in state_dict.items() if name.startswith("v2.")}
            return super().load_state_dict(named, strict, assign)

    def build(folder: str, **given: Any) -> Trainer:
        torch.manual_seed(0)
        return trainer(tmp_path / folder, ROWS, model=Renaming(), **SAVING, **given)

    whole = build("whole", max_steps=4)
    whole.train()
    build("stopped", max_steps=2).train()
    resumed = build("stopped", max_steps=4, resume_from_checkpoint=True)
    resumed.train()
    assert Renaming.loads == 1
    assert_equal(final_state(resumed), final_state(whole))


class Overflowing(Scaled):
    """The gradient of its weight is infinite at the second step; the model's gradients are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients = 0
        self.scale.register_hook(self._overflow)  # type: ignore[no-untyped-call]

    def _overflow(self, gradient: torch.Tensor) -> torch.Tensor:
        self.gradients += 1
        return gradient * float("inf") if self.gradients == 2 else gradient


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_an_overflow_in_a_loss_skips_the_step(tmp_path: Path, optim: str, fp16: bool) -> None:
    heads = note_heads()
    one = trainer(
        tmp_path,
        ROWS,
        compute_loss_func=Overflowing(),
        optim=optim,
        fp16=fp16,
        max_steps=3,
        callbacks=[heads],
        logging_strategy="steps",
        logging_steps=1,
        lr_scheduler_type="constant",
    )
    one.train()
    loss: Any = one.compute_loss_func
    assert torch.isfinite(loss.scale).all() and not torch.equal(loss.scale.detach(), torch.ones(4))
    assert torch.equal(heads.kept[1], heads.kept[0]) and not torch.equal(heads.kept[2], heads.kept[1])
    first, second, third = [entry for entry in one.state.log_history if "grad_norm" in entry]
    assert math.isfinite(second["loss"]) and math.isnan(second["grad_norm"]) and math.isfinite(third["grad_norm"])
    # With fp16, the first scale is too large for the model's own gradients.
    assert third["nonfinite_steps"] == second["nonfinite_steps"] == first.get("nonfinite_steps", 0) + 1
    assert not one.accelerator.optimizer_step_was_skipped
