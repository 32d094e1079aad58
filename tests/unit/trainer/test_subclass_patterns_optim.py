"""Optimizers, schedules, clipping and what callbacks do to weights: on transformers' Trainer and on ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.patterns import RESUMED, Make, Small, Table, assert_same

PATTERNS = Table()


@PATTERNS.add
def a_rate_for_every_layer(make: Make) -> Any:
    class LayerWise(make.lib.Trainer):  # type: ignore[name-defined,misc]
        optimizer: Any

        def create_optimizer(self) -> Any:
            if self.optimizer is None:
                groups = []
                rate = self.args.learning_rate
                for part in (self.model.head, self.model.norm, self.model.body):
                    groups.append({"params": list(part.parameters()), "lr": rate, "weight_decay": 0.1})
                    rate *= 0.5
                self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate)
            return self.optimizer

    return make(LayerWise, max_steps=4)


@PATTERNS.add
def two_groups_from_the_classs_own_settings(make: Make) -> Any:
    class Groups(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def create_optimizer(self, model: Any = None) -> Any:
            decay = self.get_decay_parameter_names(self.model)
            named = list(self.model.named_parameters())
            cls, kwargs = type(self).get_optimizer_cls_and_kwargs(self.args)
            groups = [
                {"params": [value for name, value in named if name in decay], "weight_decay": 0.3},
                {"params": [value for name, value in named if name not in decay], "weight_decay": 0.0, "lr": 0.1},
            ]
            self.optimizer = cls(groups, **kwargs)
            return self.optimizer

    return make(Groups, max_steps=4)


@PATTERNS.add
def another_optimizer_class(make: Make) -> Any:
    class Momentum(make.lib.Trainer):  # type: ignore[name-defined,misc]
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            return torch.optim.SGD, {"lr": args.learning_rate, "momentum": 0.9, "nesterov": True}

    return make(Momentum, max_steps=4)


@PATTERNS.add
def no_decay_at_all(make: Make) -> Any:
    class Undecayed(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name in super().get_decay_parameter_names(model) if "head" not in name]

    return make(Undecayed, weight_decay=0.5)


@PATTERNS.add
def a_schedule_of_ones_own(make: Make) -> Any:
    class Cyclic(make.lib.Trainer):  # type: ignore[name-defined,misc]
        lr_scheduler: Any

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if self.lr_scheduler is None:
                rates = [1.0, 0.5, 0.25]
                self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                    self.optimizer if optimizer is None else optimizer, lambda step: rates[step % 3]
                )
                self._created_lr_scheduler = True
            return self.lr_scheduler

    return make(Cyclic, max_steps=5)


@PATTERNS.add
def given_optimizer_and_schedule(make: Make) -> Any:
    model = Small()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return make(make.lib.Trainer, model=model, optimizers=(optimizer, schedule), max_steps=4)


@PATTERNS.add
def given_class_and_settings(make: Make) -> Any:
    given = (torch.optim.Adagrad, {"lr": 0.05})
    return make(make.lib.Trainer, optimizer_cls_and_kwargs=given, max_steps=4)


@PATTERNS.add
def an_optimizer_over_a_part_of_the_model(make: Make) -> Any:
    class HeadOnly(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.head.parameters(), lr=self.args.learning_rate)
            return self.optimizer

    return make(HeadOnly, max_steps=4, max_grad_norm=0.1)


@PATTERNS.add
def freezing_and_thawing(make: Make) -> Any:
    class Thaw(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            for each in model.body.parameters():
                each.requires_grad = False

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 2:
                for each in model.body.parameters():
                    each.requires_grad = True

    return make(make.lib.Trainer, callbacks=[Thaw()], max_steps=4)


@PATTERNS.add
def a_frozen_part_from_the_start(make: Make) -> Any:
    model = Small()
    for each in model.body.parameters():
        each.requires_grad = False
    return make(make.lib.Trainer, model=model, max_steps=4)


@PATTERNS.add
def groups_added_as_training_goes(make: Make) -> Any:
    class Head(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.head.parameters(), lr=self.args.learning_rate)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            # torch's other schedules refuse groups that come later.
            self.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)
            return self.lr_scheduler

    class Add(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                optimizer = kwargs["optimizer"]
                getattr(optimizer, "optimizer", optimizer).add_param_group(
                    {"params": list(model.body.parameters()), "lr": 0.05, "initial_lr": 0.05}
                )

    return make(Head, callbacks=[Add()], max_steps=4)


@PATTERNS.add
def clipping_by_value(make: Make) -> Any:
    class ByValue(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _clip_grad_norm(self, model: Any) -> Any:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)

    return make(ByValue)


@PATTERNS.add
def a_norm_of_ones_own_is_logged(make: Make) -> Any:
    class Halved(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
            return super()._get_grad_norm(model, grad_norm=grad_norm) / 2

    return make(Halved)


@PATTERNS.add
def no_clipping(make: Make) -> Any:
    return make(make.lib.Trainer, max_grad_norm=0.0)


@PATTERNS.add
def an_average_of_the_weights(make: Make) -> Any:
    class Ema(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.shadow = copy.deepcopy(model.state_dict())

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            for name, value in model.state_dict().items():
                self.shadow[name].mul_(0.5).add_(value, alpha=0.5)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.load_state_dict(self.shadow)

    return make(make.lib.Trainer, callbacks=[Ema()], max_steps=4)


@PATTERNS.add
def gradients_changed_before_the_step(make: Make) -> Any:
    class Sign(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            for each in model.parameters():
                each.grad.sign_()

    return make(make.lib.Trainer, callbacks=[Sign()], optim="sgd")


@PATTERNS.add
def weights_clamped_after_the_step(make: Make) -> Any:
    class Clamp(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            with torch.no_grad():
                for each in model.parameters():
                    each.clamp_(-0.3, 0.3)

    return make(make.lib.Trainer, callbacks=[Clamp()])


@PATTERNS.add
def the_rate_set_by_a_callback(make: Make) -> Any:
    class Halve(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (1 + state.global_step)

    class Shown(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _get_learning_rate(self) -> float:
            return float(self.optimizer.param_groups[0]["lr"])

    return make(Shown, callbacks=[Halve()], lr_scheduler_type="constant")


@PATTERNS.add
def two_optimizers_in_one(make: Make) -> Any:
    class Both(torch.optim.Optimizer):
        def __init__(self, *parts: Any) -> None:
            self.parts = parts
            super().__init__([value for part in parts for value in part.param_groups], {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for part in self.parts:
                part.step()

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def create_optimizer(self, model: Any = None) -> Any:
            body = [*self.model.body.parameters(), *self.model.norm.parameters()]
            head = torch.optim.SGD(self.model.head.parameters(), lr=0.1)
            self.optimizer = Both(torch.optim.Adam(body, lr=0.01), head)
            return self.optimizer

    return make(Mine, lr_scheduler_type="constant")


@PATTERNS.add
def a_second_optimizer_saved_and_resumed(make: Make) -> Any:
    class Second(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.head_optimizer = torch.optim.SGD(self.model.head.parameters(), lr=0.05, momentum=0.9)
            rest = [*self.model.body.parameters(), *self.model.norm.parameters()]
            self.optimizer = torch.optim.SGD(rest, lr=self.args.learning_rate)
            return self.optimizer

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            self.head_optimizer.step()
            self.head_optimizer.zero_grad()
            return loss

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            super()._save_optimizer_and_scheduler(output_dir)
            torch.save(self.head_optimizer.state_dict(), Path(output_dir) / "head_optimizer.pt")

        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                self.head_optimizer.load_state_dict(torch.load(Path(checkpoint) / "head_optimizer.pt"))

    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    make(Second, **saves).train()
    one = make(Second, **saves)
    one.leaves_out = (RESUMED,)
    one.train(resume_from_checkpoint=str(make.folder / "checkpoint-2"))
    one.seen = sorted(each.name for each in (make.folder / "checkpoint-4").glob("head*"))
    return one


def split(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
            return self.lr_scheduler

    return make(Mine)


OLD = Table()


@OLD.add
def both_made_at_once(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    return make(Mine)


@OLD.add
def a_schedule_without_the_optimizer(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def create_optimizer(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def create_scheduler(self, num_training_steps: int) -> None:
            self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    return make(Mine)


@pytest.mark.parametrize("name", sorted(OLD))
def test_an_older_form_ends_where_the_newest_one_ends_on_transformers_trainer(name: str, tmp_path: Path) -> None:
    assert_same(OLD[name], tmp_path, reference=split)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_the_pattern_ends_where_it_ends_on_transformers_trainer(name: str, tmp_path: Path) -> None:
    assert_same(PATTERNS[name], tmp_path)
