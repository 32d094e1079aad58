"""`Engine`: the wrapped model, optimizer and schedule that train, through a strategy and in a precision."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib import optim
from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import AcceleratorConfig
from trainer_lib.arguments.configs.deepspeed_config import plan
from trainer_lib.arguments.configs.parallelism_config import read_layout
from trainer_lib.distributed.precision import Precision
from trainer_lib.errors import ConfigError
from trainer_lib.optim.optimizers import get_decay_parameter_names, parameter_groups
from trainer_lib.strategies.base import Strategy, total_norm
from trainer_lib.trainer.accelerator.slot import unwrap_prepared

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Events
    from trainer_lib.trainer.run import TrainingRun
    from trainer_lib.trainer.trainer import Trainer
    from trainer_lib.trainer.world import World

_PREFIX = "outside/"  # of their tensors in a checkpoint


class OutsideParameters:
    """The trained parameters of one Trainer that are not its model's, such as the weights of a loss module.

    The optimizer holds them because an override of `create_optimizer` gave them to it, or because `compute_loss_func`
    is a module. The strategy does not know them: their gradients are averaged here. `named` is empty before a training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.named: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._owners: dict[str, tuple[str, nn.Module]] = {}  # of the buffers: attribute of the Trainer, and module
        # By name: attribute, the buffer's module or the parameter itself, value on the CPU.
        self._first: dict[str, tuple[str, nn.Module | torch.Tensor, torch.Tensor]] | None = None

    def groups_of_loss(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Groups of the trained parameters that only `compute_loss_func` has, where it is a module."""
        loss: Any = self._trainer.compute_loss_func
        if not isinstance(loss, nn.Module):
            return []
        known = {id(param) for param in model.parameters()}
        groups = parameter_groups(loss, weight_decay, get_decay_parameter_names(loss))
        own = [{**group, "params": [param for param in group["params"] if id(param) not in known]} for group in groups]
        return [group for group in own if group["params"]]

    def find(self, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
        """Find what the optimizer holds besides the model, and make its values equal on all ranks. Collective."""
        self.named, self._buffers, self._owners = {}, {}, {}
        if strategy.name == "deepspeed":
            return  # its optimizer holds parts of all parameters
        model = self._trainer.model_wrapped
        known = {id(param) for param in (*strategy.named_parameters(model).values(), *model.parameters())}
        held = {
            id(param): (param, f"optimizer.{number}.{place}")
            for number, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
            if id(param) not in known
        }
        if not held:
            return
        known |= {id(buffer) for buffer in model.buffers()}
        for prefix, module in self._modules():
            own = {name: param for name, param in module.named_parameters(prefix) if id(param) in held}
            self.named.update({name: param for name, param in own.items() if held.pop(id(param), None) is not None})
            if own:
                buffers = {n: buffer for n, buffer in module.named_buffers(prefix) if id(buffer) not in known}
                self._buffers.update(buffers)
                self._owners.update(dict.fromkeys(buffers, (prefix, module)))
        self.named.update({name: param for param, name in held.values()})
        if strategy.comm.world_size > 1:
            first = strategy.comm.rank == 0
            for param in self.named.values():
                param.data.copy_(strategy.sum(param.data if first else torch.zeros_like(param.data)))
        self._note_first()

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        trainer = self._trainer
        for name, value in trainer.__dict__.items():
            is_list = isinstance(value, list | tuple) and all(isinstance(part, nn.Module) for part in value)
            several = value.items() if isinstance(value, Mapping) else enumerate(value) if is_list else ()
            for key, module in [(None, value), *several]:
                if isinstance(module, nn.Module) and module not in (trainer.model, trainer.model_wrapped):
                    yield (name if key is None else f"{name}.{key}"), module

    # -- several trainings that begin alike ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def first_values_kept(self) -> Iterator[None]:
        """Inside, `put_back` returns to the values ``[...]`` that the first training began with."""
        is_outermost = self._first is None
        if is_outermost:
            self._first = {}
        try:
            yield
        finally:
            if is_outermost:
                self._first = None

    def _note_first(self) -> None:
        if self._first is None:
            return
        for name, tensor in {**self.named, **self._buffers}.items():
            prefix, owner = self._owners.get(name, ("", tensor))
            # A module that an override makes for every training replaces the one before it.
            if name not in self._first or self._first[name][1] is not owner:
                self._first[name] = prefix, owner, tensor.detach().to("cpu", copy=True)

    def put_back(self) -> None:
        """Restore the values ``[...]`` that the first training began with; nothing outside of `first_values_kept`."""
        for name, (prefix, owner, value) in (self._first or {}).items():
            # A forward may have replaced a buffer, also by one of another shape.
            tensor = dict(owner.named_buffers(prefix)).get(name) if isinstance(owner, nn.Module) else owner
            if tensor is None:
                continue
            if tensor.shape == value.shape and tensor.dtype == value.dtype:
                tensor.data.copy_(value)  # in place: a view stays a view
            else:
                tensor.data = value.to(tensor.device, copy=True)
            tensor.grad = None

    def average_gradients(self, strategy: Strategy) -> None:
        """Average their gradients over ranks, as the strategy does with the model's. Collective."""
        if strategy.comm.world_size == 1:
            return
        for param in self.named.values():
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad = strategy.sum(gradient).div_(strategy.comm.world_size)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """Their part of a checkpoint: values ``[...]`` of parameters, and buffers of their modules."""
        every = {**{name: tensor.detach() for name, tensor in self.named.items()}, **self._buffers}
        return {f"{_PREFIX}{name}": tensor for name, tensor in every.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], url: str) -> None:
        """Restore what `tensors` returned, ``[...]`` by name. Raises ConfigError."""
        for name, own in self.tensors().items():
            saved = tensors.get(name)
            if saved is None or saved.shape != own.shape:
                what = "lacks" if saved is None else "has another shape for"
                what = f"The checkpoint {what} {name.removeprefix(_PREFIX)}, which is trained outside of the model."
                remedy = "Train with the loss that the checkpoint was written with, or start from the beginning."
                raise ConfigError(what, field="resume_from_checkpoint", value=url, remedy=remedy)
            own.copy_(saved)


_STEPPED_BEFORE = "Detected call of `lr_scheduler.step"
# They step after an evaluation, with its metric, and not after every optimizer step. By name: transformers has a
# GreedyLR and trainflow has another.
_METRIC_SCHEDULES = {"ReduceLROnPlateau", "GreedyLR"}


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether reading a tensor ``[...]`` waits for no device."""
    return tensor.device.type == "cpu"


def follows_metric(schedule: Any) -> bool:
    """Whether a schedule steps with the metric of an evaluation: our own, or one that the user made."""
    return not _METRIC_SCHEDULES.isdisjoint([kind.__name__ for kind in type(schedule).__mro__])


def resolve_arguments(args: TrainingArguments) -> TrainingArguments:
    """The arguments with what configuration files decide, a copy if they decide anything. Raises ConfigError."""
    file = args.accelerator_config
    if isinstance(file, str):
        args = copy.copy(args)
        args.accelerator_config = AcceleratorConfig.from_file(file)
    if args.deepspeed is None:
        return args
    from trainer_lib.strategies.deepspeed.zero_config import resolve_config

    args = copy.copy(args)
    resolve_config(args)
    return args


def create_strategy(args: TrainingArguments, world: World) -> Strategy:
    """The strategy for these arguments and this world; only its own file is imported."""
    device, comm = world.device, world.comm
    if args.deepspeed is not None and plan(args).stage:  # stage 0 shards nothing
        from trainer_lib.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

        return DeepSpeedStrategy(device, comm, args)
    layout = read_layout(args)
    if layout is not None and (layout.tensor > 1 or layout.expert > 1):
        from trainer_lib.strategies.tensor.tensor_strategy import TensorStrategy

        return TensorStrategy(device, comm, args)
    if layout is not None and layout.sequence > 1:
        from trainer_lib.strategies.sequence import SequenceStrategy, ShardedSequenceStrategy

        kind = SequenceStrategy if layout.shard == 1 else ShardedSequenceStrategy
        return kind(device, comm, args)
    if args.fsdp or (layout is not None and layout.shard > 1):
        from trainer_lib.strategies.fsdp import FsdpStrategy

        return FsdpStrategy(device, comm, args)
    if comm.world_size > 1:
        from trainer_lib.strategies.ddp import DdpStrategy

        return DdpStrategy(device, comm, args)
    return Strategy(device, comm)


class Engine:
    """Owner of the Trainer's `model_wrapped`, `optimizer` and `lr_scheduler`, and of all changes to weights."""

    strategy: Strategy
    precision: Precision  # of forward passes, and how gradients are scaled

    def __init__(self, trainer: Trainer, events: Events) -> None:
        self._trainer = trainer
        self._events = events
        self.given_optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None)  # and schedule, of the user
        self.outside = OutsideParameters(trainer)
        self._has_trained = False
        self._measures_norm = False
        self._others: list[nn.Parameter] = []
        self._held = -1
        self._prepared: nn.Module | None = None  # wrapped before training, because the user asked for it
        self._unscaled = False  # the gradients of the step under way are unscaled already
        self.last_norm: torch.Tensor | None = None  # [] of the gradients at the newest step, before clipping

    def set_up(self, args: TrainingArguments, world: World) -> None:
        """Choose strategy and precision."""
        self.strategy = create_strategy(args, world)
        self.precision = self.strategy.precision(args)

    # -- what trains --------------------------------------------------------------------------------------------------

    def take_optimizers(self, given: tuple[torch.optim.Optimizer | None, Any]) -> None:
        """Use the optimizer and the schedule that the user gave, for this and every later training."""
        self.given_optimizers = given
        self.use_optimizers(*given)

    def use_optimizers(self, optimizer: torch.optim.Optimizer | None, schedule: Any) -> None:
        """Make these the Trainer's."""
        self._trainer.optimizer, self._trainer.lr_scheduler = optimizer, schedule

    def use_wrapped(self, model: nn.Module) -> None:
        """Make `model` the module whose forward is called."""
        self._trainer.model_wrapped = model

    def prepare_model(self) -> nn.Module:
        """Wrap the Trainer's model for training, once; for code that prepares it before `train`."""
        trainer = self._trainer
        wrapped = trainer.model_wrapped
        is_wrapped = wrapped is not trainer.model and self.strategy.unwrap(wrapped) is trainer.model
        if not trainer.is_in_train and not is_wrapped:
            if trainer.place_model_on_device:
                trainer._move_model_to_device(trainer.model, self.strategy.device)
            wrapped = trainer._wrap_model(trainer.model, training=True)
            self.use_wrapped(wrapped)
        self._prepared = wrapped  # the next training keeps it
        return wrapped

    def prepare_to_train(self) -> None:
        """Wrap the Trainer's model for training, and connect an optimizer that exists to it."""
        trainer = self._trainer
        prepared, self._prepared = self._prepared, None
        if prepared is None or self.strategy.unwrap(prepared) is not trainer.model:
            self.use_wrapped(trainer._wrap_model(trainer.model, training=True))
        if trainer.optimizer is not None:
            self.strategy.adopt_optimizer(trainer.optimizer, trainer.model_wrapped)
        trainer.model_wrapped.train()
        if isinstance(trainer.compute_loss_func, nn.Module) and trainer.place_model_on_device:
            trainer.compute_loss_func.to(self.strategy.device)

    def unwrap_optimizers(self) -> None:
        """Take optimizer and schedule out of what `accelerator.prepare` made of them."""
        self.use_optimizers(unwrap_prepared(self._trainer.optimizer), unwrap_prepared(self._trainer.lr_scheduler))

    def resolve(self) -> None:
        """Turn the complete model and the complete optimizer into what the strategy trains with."""
        wrapped, optimizer = self.strategy.resolve(self._trainer.model_wrapped, self.ready_optimizer())
        self.use_wrapped(wrapped)
        self._trainer.optimizer = optimizer
        self.outside.find(optimizer, self.strategy)
        self._trainer.model.zero_grad()  # an error may have cut the newest step of an earlier training short
        for param in self.outside.named.values():
            param.grad = None

    def reset(self) -> None:
        """Drop what an earlier `train` made; what the user gave is kept."""
        self.strategy.release()
        self.use_optimizers(*self.given_optimizers)

    def start_training(self, *, measures_norm: bool) -> None:
        """Before a training: drop what the one before it made; `measures_norm`: a subclass measures the norm."""
        self._measures_norm, self._held = measures_norm, -1
        self._unscaled = False  # an error may have cut the newest step short
        self.precision.forget_step()
        if self._has_trained:
            self.reset()
        self._has_trained = True

    # -- optimizer and schedule ---------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, made from the arguments unless it exists."""
        trainer = self._trainer
        if trainer.optimizer is None:
            target = model or trainer.model
            chosen = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args, target)
            trainer.optimizer = optim.build_optimizer(
                trainer.args, target, cls_and_kwargs=chosen, decay_names=trainer.get_decay_parameter_names(target)
            )
            for group in self.outside.groups_of_loss(target, trainer.args.weight_decay):
                trainer.optimizer.add_param_group(group)
        return trainer.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None) -> Any:
        """The Trainer's schedule, made from the arguments or DeepSpeed's configuration unless it exists."""
        trainer = self._trainer
        if trainer.lr_scheduler is None:
            target = unwrap_prepared(optimizer or trainer.optimizer)
            if target is None:
                remedy = "Call create_optimizer before."
                raise ConfigError("A schedule needs an optimizer.", field="optimizer", remedy=remedy)
            if trainer.args.deepspeed is not None:
                from trainer_lib.strategies.deepspeed.deepspeed_strategy import create_schedule

                trainer.lr_scheduler = create_schedule(trainer.args, target, num_training_steps)
            if trainer.lr_scheduler is None:
                trainer.lr_scheduler = optim.create_scheduler(trainer.args, target, num_training_steps)
        return trainer.lr_scheduler

    def ready_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. Raises ConfigError when it does not exist yet."""
        optimizer = self._trainer.optimizer
        if optimizer is None:
            remedy = "Call create_optimizer or train."
            raise ConfigError("The optimizer does not exist yet.", field="optimizer", remedy=remedy)
        return optimizer

    def optimizer_classes(self) -> list[str]:
        """Names of the optimizer's class and its bases; empty under DeepSpeed, whose own class holds its state."""
        kinds = () if self.strategy.name == "deepspeed" else type(self._trainer.optimizer).__mro__
        return [kind.__name__ for kind in kinds if kind not in torch.optim.Optimizer.__mro__]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer holds, by name."""
        return {**self.strategy.named_parameters(self._trainer.model_wrapped), **self.outside.named}

    def clipped_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are clipped: the optimizer's, and trained ones of the model besides it."""
        held = [param for group in self.ready_optimizer().param_groups for param in group["params"]]
        if self.outside.named:  # as in transformers, only the model's gradients are clipped
            outside = {id(param) for param in self.outside.named.values()}
            held = [param for param in held if id(param) not in outside]
        if len(held) != self._held:  # at the first step, and when a callback has added a group
            self._held, known = len(held), {id(param) for param in held}
            # DeepSpeed's optimizer holds parts of the parameters, and takes care of all gradients.
            own = () if self.strategy.name == "deepspeed" else self._trainer.model_wrapped.parameters()
            self._others = [param for param in own if param.requires_grad and id(param) not in known]
        return held + self._others if self._others else held

    def set_optimizer_mode(self, mode: str) -> None:
        """Switch an optimizer that has modes to "train" or "eval": schedule-free ones keep two sets of weights."""
        switch = getattr(self._trainer.optimizer, mode, None)
        if callable(switch):
            switch()

    # -- the step -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Backpropagate `loss` ``[]``, scaled as the precision asks; `gradient` ``[]``: the objective's (default 1)."""
        scaler = self.precision.scaler
        self.strategy.backward(loss if scaler is None else scaler.scale(loss), gradient)

    def step(self, model: nn.Module, run: TrainingRun) -> torch.Tensor:
        """Clip, step if gradients are finite, advance the schedule. Returns the model's norm before clipping, ``[]``.

        The norm is NaN when a gradient outside of the model is not finite: the step is skipped and counted.
        """
        trainer, fire, scaler = self._trainer, self._events.fire, self.precision.scaler
        optimizer = self.ready_optimizer()
        if self.outside.named:
            self.outside.average_gradients(self.strategy)
        if scaler is not None:
            self.unscale_gradients()  # `max_grad_norm` is meant for gradients without the loss scale
        norm = trainer._clip_grad_norm(model)
        if self._measures_norm:  # an override may return None or a number
            norm = torch.as_tensor(trainer._get_grad_norm(model, grad_norm=norm), dtype=torch.float32)
        if self.outside.named:  # clipping leaves them out, and they decide too: 0 is added, or NaN
            others = total_norm(self.outside.named.values(), None)
            norm = norm + (others - others)
        self.last_norm = norm
        fire("on_pre_optimizer_step")
        self._step_if_finite(optimizer, norm)
        fire("on_optimizer_step")
        rate = trainer._get_learning_rate()  # of this step: below, the schedule goes on to the next, in the same tensor
        run.rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
        schedule = trainer.lr_scheduler
        if schedule is not None and not follows_metric(schedule):
            schedule.step()
        optimizer.zero_grad()
        for other in self._others:
            other.grad = None
        return norm

    def skip_step(self, run: TrainingRun) -> None:
        """Advance the schedule by a step that is counted and not trained."""
        run.rate = self._trainer._get_learning_rate()
        self.advance_schedule(1)

    def advance_schedule(self, steps: int) -> None:
        """Advance the schedule without the optimizer."""
        schedule = self._trainer.lr_scheduler
        if schedule is not None and not follows_metric(schedule):
            warnings.filterwarnings("ignore", message=_STEPPED_BEFORE)
            for _ in range(steps):
                schedule.step()

    def unscale_gradients(self) -> None:
        """Divide the gradients by the loss scale, once per step; nothing without a scaler."""
        if self.precision.scaler is not None and not self._unscaled:
            self.precision.scaler.unscale_(self.ready_optimizer())
            self._unscaled = True

    def _step_if_finite(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> None:
        """Step the optimizer unless the gradients' norm is NaN or infinite.

        On an accelerator, optimizers with `found_inf` (torch's fused ones) get the answer on the device and skip there:
        the host does not wait. The others need it on the host, which then waits for the device once per step. On the
        CPU there is nothing to wait for, and reading the norm is cheaper.
        """
        if not is_on_host(norm) and getattr(optimizer, "_step_supports_amp_scaling", False):
            found = norm - norm  # 0, or NaN when the norm is NaN or infinite; only NaN differs from itself
            optimizer.found_inf = found.ne_(found).float()  # type: ignore[attr-defined]
            # None, since the gradients are unscaled already; torch reads both attributes in its fused step.
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        elif math.isfinite(norm.item()):
            optimizer.step()
        else:
            # If this is the first step, torch would warn that the schedule stepped before the optimizer.
            warnings.filterwarnings("ignore", message=_STEPPED_BEFORE)
        if self.precision.scaler is not None:
            # `scaler.step` is never called: `update` needs only the overflows that `unscale_` found.
            self.precision.scaler.update()
            self._unscaled = False

    def step_metric_schedule(self, metrics: dict[str, float]) -> None:
        """Advance a schedule that follows a metric. Raises ConfigError when the metric is missing."""
        trainer = self._trainer
        if not follows_metric(trainer.lr_scheduler):
            return
        name = str(trainer.args.metric_for_best_model or "loss")  # a schedule of the user's may come without a name
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            what = f"The schedule follows it, but the evaluation gave only {', '.join(metrics)}."
            raise ConfigError(what, field="metric_for_best_model", value=name, remedy="Name one of them.")
        trainer.lr_scheduler.step(metrics[name])
