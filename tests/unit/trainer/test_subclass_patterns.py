"""Losses, steps, optimizers, the loop and saving as user code overrides them: on transformers' Trainer and on ours."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainer_lib
from tests.support.patterns import EVALUATES, RESUMED, ROWS, SAVES, Either, Make, Small, Table, assert_same
from tests.support.seq2seq import Copier, rows, seq2seq_trainer
from tests.support.toys import TokenModel, token_rows
from trainer_lib import Seq2SeqTrainer
from trainer_lib.errors import ConfigError

PATTERNS = Table()


# -------------------------------------------------------------------------------------------------------------- losses
@PATTERNS.of(class_weights=[1.0, 2.0, 5.0], **EVALUATES)
class ClassWeights(Either):
    takes = ("class_weights",)

    def __init__(self, *args: Any, class_weights: list[float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.class_weights = torch.tensor(class_weights, device=self.args.device)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.get("labels")
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss(weight=self.class_weights)(outputs.get("logits").view(-1, 3), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


@PATTERNS.add
def decorated_with_wraps(make: Make) -> Any:
    def halved(method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs) * 0.5

        return wrapper

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        compute_loss = halved(make.lib.Trainer.compute_loss)

    return make(Mine)


@PATTERNS.add
def replaced_on_the_instance(make: Make) -> Any:
    def loss_of(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return model(**inputs)["loss"] * 3

    one = make()
    one.compute_loss = types.MethodType(loss_of, one)
    return one


@PATTERNS.of()
class InputsChangedAndKept(Either):
    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        self._last = {**inputs, "x": inputs["x"] * 2}
        return self._last

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert inputs is self._last
        return super().compute_loss(model, inputs, *args, **kwargs)


class Smoothing(Either):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.label_smoother(outputs, labels)
        return (loss, outputs) if return_outputs else loss


@PATTERNS.add
def the_label_smoother_called_by_hand(make: Make) -> Any:
    model: Any = Small()
    # The reference reads its problem_type.
    model.config = types.SimpleNamespace(problem_type=None, to_json_string=lambda: "{}")
    return make(Smoothing, model=model, label_smoothing_factor=0.1)


# --------------------------------------------------------------------------------------------------------------- steps
@PATTERNS.of()
class AdversarialStep(Either):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        weight = self.model.body.weight
        backup = weight.data.clone()
        weight.data.add_(0.1 * weight.grad / weight.grad.norm())
        self.accelerator.backward(self.compute_loss(model, inputs))
        weight.data.copy_(backup)
        return loss.detach()


# ---------------------------------------------------------------------------------------------- optimizers, schedules
@PATTERNS.of(max_steps=4)
class TwoGroupsFromTheClasssOwnSettings(Either):
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


@PATTERNS.of(weight_decay=0.5, max_steps=4)
class AnotherOptimizerAndLessDecay(Either):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return torch.optim.SGD, {"lr": args.learning_rate, "momentum": 0.9, "nesterov": True}

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name in super().get_decay_parameter_names(model) if "head" not in name]


@PATTERNS.of(max_steps=5)
class CyclicSchedule(Either):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            rates = [1.0, 0.5, 0.25]
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step % 3])
            self._created_lr_scheduler = True
        return self.lr_scheduler


@PATTERNS.of(max_steps=4, max_grad_norm=0.1)
class OptimizerOverAPart(Either):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.head.parameters(), lr=self.args.learning_rate)
        return self.optimizer


class PlateauOverAPart(OptimizerOverAPart):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        # torch's other schedules refuse groups that come later.
        self.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)
        return self.lr_scheduler


@PATTERNS.add
def groups_added_as_training_goes(make: Make) -> Any:
    def add(args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            more = {"params": list(model.body.parameters()), "lr": 0.05, "initial_lr": 0.05}
            getattr(optimizer, "optimizer", optimizer).add_param_group(more)

    return make(PlateauOverAPart, callbacks=[make.callback(on_step_end=add)], max_steps=4)


@PATTERNS.add
def freezing_and_thawing(make: Make) -> Any:
    def freeze(args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.body.requires_grad_(False)

    def thaw(args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.body.requires_grad_(state.global_step >= 2)

    return make(callbacks=[make.callback(on_train_begin=freeze, on_step_begin=thaw)], max_steps=4)


@PATTERNS.of()
class ClippingByValueAndALoggedNormOfOnesOwn(Either):
    def _clip_grad_norm(self, model: Any) -> Any:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, grad_norm=grad_norm) / 2


@PATTERNS.add
def gradients_and_weights_changed_around_the_step(make: Make) -> Any:
    def sign(args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for each in model.parameters():
            each.grad.sign_()

    def clamp(args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for each in model.parameters():
            each.data.clamp_(-0.3, 0.3)

    return make(callbacks=[make.callback(on_pre_optimizer_step=sign, on_optimizer_step=clamp)], optim="sgd")


class Shown(Either):
    def _get_learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


@PATTERNS.add
def the_rate_set_by_a_callback(make: Make) -> Any:
    def halve(args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + state.global_step)

    return make(Shown, callbacks=[make.callback(on_step_begin=halve)], lr_scheduler_type="constant")


class Second(Either):
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


@PATTERNS.add
def a_second_optimizer_saved_and_resumed(make: Make) -> Any:
    make(Second, max_steps=5, **SAVES).train()
    one = make(Second, max_steps=5, **SAVES)
    one.leaves_out = (RESUMED,)
    one.train(resume_from_checkpoint=str(make.folder / "checkpoint-2"))
    one.seen = sorted(each.name for each in (make.folder / "checkpoint-4").glob("head*"))
    return one


# ------------------------------------------------------------------------------------------------- events, loop, saving
@PATTERNS.add
def every_event_in_order(make: Make) -> Any:
    names = [name for name in dir(make.lib.TrainerCallback) if name.startswith("on_") and "push" not in name]
    seen: list[str] = []

    def noting(name: str) -> Any:
        return lambda args, state, control, **_: seen.append(f"{name} {state.global_step}")

    note = make.callback(**{name: noting(name) for name in names})
    one = make(callbacks=[note], gradient_accumulation_steps=2, max_steps=3, **EVALUATES, **SAVES)
    one.train()
    one.predict(ROWS[:4])
    one.seen = seen
    return one


@PATTERNS.add
def a_callback_that_holds_the_trainer(make: Make) -> Any:
    def again(args: Any, state: Any, control: Any, **_: Any) -> None:
        one.evaluate(eval_dataset=ROWS[8:], metric_key_prefix="again")

    one = make(num_train_epochs=2, max_steps=-1)
    one.add_callback(make.callback(on_epoch_end=again))
    return one


@PATTERNS.of()
class TheLoopWrapped(Either):
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = ["before"]
        result = super()._inner_training_loop(*args, **kwargs)
        self.seen = [*self.seen, result.global_step]
        return result

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.compute_loss_context_manager()
        return super().train(*args, **kwargs)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        return super()._finalize_training(trial, num_train_samples, start_time)


@PATTERNS.of(num_train_epochs=1, max_steps=-1)
class OtherLengths(Either):
    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        values = super().set_initial_training_values(args, dataloader)
        self.seen = [each for each in values if each is not None]
        return (values[0] + 1, *values[1:-1], values[-1] + 2)


class Counted(Either):
    def floating_point_ops(self, inputs: Any) -> int:
        return 10 * len(inputs["labels"])

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self.state.num_input_tokens_seen += inputs["x"].numel()


@PATTERNS.add
def flops_counted_by_hand(make: Make) -> Any:
    one = make(Counted, gradient_accumulation_steps=2)
    one.train()
    one.seen = [one.state.total_flos, one.state.num_input_tokens_seen]
    return one


def _resumed(make: Make, cls: Any, **given: Any) -> Any:
    make(max_steps=4, **SAVES).train()
    one = make(cls, max_steps=4, **given, **SAVES)
    one.leaves_out = (RESUMED,)
    one.train(resume_from_checkpoint=str(make.folder / "checkpoint-2"))
    return one


class Loading(Either):
    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> Any:
        self.seen = ["weights"]
        return super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        self.seen = [*self.seen, "optimizer"]
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        self.seen = [*self.seen, "random"]


@PATTERNS.add
def a_checkpoint_resumed(make: Make) -> Any:
    return _resumed(make, Loading)


class Fresh(Either):
    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        pass


@PATTERNS.add
def weights_resumed_with_a_new_optimizer(make: Make) -> Any:
    return _resumed(make, Fresh, lr_scheduler_type="constant")


# -------------------------------------------------------------------------------------------------- signatures of old
class OwnCrossEntropy(Either):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


def newest_loss(make: Make) -> Any:
    return make(OwnCrossEntropy, **EVALUATES)


@PATTERNS.of(newest_loss, **EVALUATES)
class WithoutTheOutputs(Either):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return functional.cross_entropy(model(x=inputs["x"])["logits"], inputs["labels"])


@PATTERNS.of(newest_loss, **EVALUATES)
class AStepThatDividesWhatItReturns(Either):
    def training_step(self, model: Any, inputs: Any) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.autocast_smart_context_manager():
            loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach() / self.args.gradient_accumulation_steps


class Split(Either):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        return self.lr_scheduler


def newest_optimizer(make: Make) -> Any:
    return make(Split)


@PATTERNS.of(newest_optimizer)
class BothMadeAtOnce(Either):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)


@PATTERNS.of(newest_optimizer)
class AScheduleWithoutTheOptimizer(Either):
    def create_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def create_scheduler(self, num_training_steps: int) -> None:
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_a_pattern_ends_where_it_or_its_newest_form_ends_on_transformers_trainer(name: str, tmp_path: Path) -> None:
    assert_same(PATTERNS[name], tmp_path)


def test_older_signatures_of_loading_and_saving_are_served(tmp_path: Path) -> None:
    class Mine(trainer_lib.Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint: Any) -> None:  # type: ignore[override]
            super()._load_from_checkpoint(resume_from_checkpoint)

        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:  # type: ignore[override]
            super()._save_checkpoint(model, trial, metrics=metrics)

    assert _resumed(Make(trainer_lib, tmp_path), Mine).state.global_step == 4 and (tmp_path / "checkpoint-4").is_dir()


def test_a_loop_that_replaces_ours_and_an_epoch_of_another_length_are_refused(tmp_path: Path) -> None:
    class Mine(trainer_lib.Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any: ...

    class Short(trainer_lib.Trainer):
        def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
            values = super().set_initial_training_values(*args, **kwargs)
            return (values[0], 1, *values[2:])

    with pytest.raises(ConfigError, match=r"Mine\._inner_training_loop"):
        Make(trainer_lib, tmp_path)(Mine)
    with pytest.raises(ConfigError, match="set_initial_training_values = 1: An epoch of this data has 4"):
        Make(trainer_lib, tmp_path)(Short, model=Small()).train()


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
    for cls in (None, trainer_lib.Trainer, Noisy):
        torch.manual_seed(0)
        one = Make(trainer_lib, tmp_path)(cls, model=TokenModel(), train_dataset=token_rows(8))
        losses.append(one.train().training_loss)
    assert losses[0] == losses[1] != losses[2]
