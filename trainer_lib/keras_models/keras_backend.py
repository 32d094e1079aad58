"""Keras on torch: its first import, the names of a model's parameters, a Keras optimizer under torch's names.

Keras owns the state of an optimizer: slots (momentum, velocity, …), the count of its steps, perhaps the learning rate.
They are torch tensors that Keras changes in place, so `KerasOptimizer` refers to them: `state` has the slots of the
parameters, and the only parameter group has everything else. A restored checkpoint is copied into them.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from trainer_lib.arguments import TrainingArguments
from trainer_lib.errors import ConfigError, MissingExtraError

_VARIABLE = "KERAS_BACKEND"
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
_PARAMETERS = "_torch_params"  # under this name, Keras registers a layer's variables with torch
_COUNTED = ("iteration", "learning_rate")


def choose_torch() -> None:
    """Let Keras run on torch when it is imported, unless the environment chooses a backend."""
    if "keras" not in sys.modules:
        os.environ.setdefault(_VARIABLE, "torch")


def import_keras() -> Any:
    """The package keras, on torch.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: it runs on another backend.
    """
    choose_torch()
    chosen = os.environ.get(_VARIABLE, "torch")
    try:
        keras = importlib.import_module("keras")
        chosen = keras.config.backend()
    except ImportError as error:
        if chosen == "torch":
            raise MissingExtraError(f"Keras cannot be imported: {error}.", field="model", extra="keras") from error
    if chosen != "torch":
        raise ConfigError(
            "A TFTrainer trains Keras models that run on torch.",
            field=_VARIABLE,
            value=chosen,
            remedy="Set KERAS_BACKEND=torch in the environment, or import TFTrainer before keras.",
        )
    return keras


def is_keras_model(model: object) -> bool:
    """Whether a model is a `keras.Model`; keras is not imported for it."""
    kind = getattr(sys.modules.get("keras"), "Model", None)
    return isinstance(kind, type) and isinstance(model, kind)


def placed_on(device: torch.device) -> AbstractContextManager[None]:
    """A block in which Keras creates and converts tensors on `device`: it chooses a GPU itself, even with `use_cpu`."""
    block: AbstractContextManager[None] = import_keras().device(str(device))
    return block


def register_parameters(model: Any) -> None:
    """Register a built model's variables with torch once each, under names that do not depend on the process.

    Keras numbers layers without a name through the whole process: a second model of the same code has ``dense_2`` where
    the first one has ``dense``, and a checkpoint of the first would not fit it. Here the numbers of every kind of layer
    start at 0, as in a new process.
    """
    tensors: dict[str, Any] = {}
    for name, variable in zip(_process_independent(model), model.variables, strict=True):
        # Layers of one model may share a name, and so their variables; every parameter needs its own.
        same = sum(known.partition("~")[0] == name for known in tensors)
        tensors[f"{name}~{same}" if same else name] = variable.value
    for module in list(model.modules()):
        if hasattr(type(module), "torch_params"):  # a layer of Keras: without any, it would register its own again
            module._modules.pop(_PARAMETERS, None)
            module.register_module(_PARAMETERS, nn.ParameterDict(tensors if module is model else {}))


def _process_independent(model: Any) -> list[str]:
    """The paths of the variables, with the numbers of generated names counted from 0."""
    kinds = {_snake_case(type(layer).__name__) for layer in model._flatten_layers()} | {"seed_generator"}
    paths = [[_split(part) for part in str(variable.path).split("/")] for variable in model.variables]
    first: dict[str, int] = {}
    for kind, number, _ in (part for path in paths for part in path):
        if kind in kinds:
            first[kind] = min(number, first.get(kind, number))

    def renamed(kind: str, number: int, text: str) -> str:
        shifted = number - first.get(kind, number)
        return text if kind not in first else f"{kind}_{shifted}" if shifted else kind

    return ["/".join(renamed(*part) for part in path) for path in paths]


def _split(part: str) -> tuple[str, int, str]:
    match = _NUMBERED.fullmatch(part)
    return (part, 0, part) if match is None else (match[1], int(match[2] or 0), part)


def _snake_case(name: str) -> str:
    # Keras' own rule for the names that it generates.
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


# -- the optimizer -----------------------------------------------------------------------------------------------------


class _Live(dict[Any, Any]):
    """A mapping whose tensors belong to Keras: setting one copies into it."""

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        present = self.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and present is not value:
            with torch.no_grad():
                present.copy_(value)
        elif isinstance(present, _Live) and isinstance(value, dict):
            for name in value.keys() & present.keys():
                present[name] = value[name]
        else:
            super().__setitem__(key, value)

    @override
    def clear(self) -> None:
        """Set the tensors to zero, and keep them."""
        with torch.no_grad():
            for part in self.values():
                part.clear() if isinstance(part, _Live) else part.zero_()


class KerasOptimizer(torch.optim.Optimizer):
    """A Keras optimizer over a model's trainable variables; attributes that torch has not are the Keras optimizer's.

    Attributes:
        keras_optimizer: the Keras optimizer.

    Raises:
        ConfigError: the optimizer accumulates, averages or scales by itself, or was built for another model.
    """

    keeps_all_in_state = True

    def __init__(self, optimizer: Any, variables: Sequence[Any], device: torch.device) -> None:
        _refuse_own_loops(optimizer)
        self.keras_optimizer = optimizer
        self._device = device
        self._variables = list(variables)
        with placed_on(device):
            if not optimizer.built:
                optimizer.build(self._variables)
        try:  # Keras' own check, which it makes at its first step: here it is made before training
            optimizer._check_variables_are_known(self._variables)
        except ValueError as error:
            message = "The Keras optimizer was built for the variables of another model."
            raise _refusal(message, type(optimizer).__name__, "Make a new optimizer for this model.") from error
        for variable in optimizer.variables:
            variable.value.data = variable.value.data.to(device)  # the user may have built it for another device
        super().__init__([variable.value for variable in self._variables], {"lr": 0.0})
        slots, others = _divide(optimizer, self._variables)
        self.state: Any = _Live(slots)
        self.param_groups[0] = _Live({**self.param_groups[0], **others, "lr": self.rate()})

    def rate(self) -> torch.Tensor:
        """The learning rate of the next step ``[]``, as a copy."""
        with torch.no_grad(), placed_on(self._device):
            rate: torch.Tensor = import_keras().ops.convert_to_tensor(self.keras_optimizer.learning_rate, "float32")
        return rate.detach().clone()

    @override
    def step(self, closure: Any = None) -> Any:
        """Update the variables from their gradients. The group's "lr" is afterwards the rate of this step."""
        rate = self.rate()
        with torch.no_grad(), placed_on(self._device):
            self.keras_optimizer.apply([variable.value.grad for variable in self._variables], self._variables)
        self.param_groups[0]["lr"] = rate
        return None

    @override
    def state_dict(self) -> dict[str, Any]:
        """Copies of the Keras optimizer's variables ``[...]``, in its order."""
        return {"variables": [variable.value.detach().clone() for variable in self.keras_optimizer.variables]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the variables ``[...]`` of `state_dict` in."""
        with torch.no_grad():
            for variable, value in zip(self.keras_optimizer.variables, state_dict["variables"], strict=True):
                variable.value.copy_(value)

    def __getattr__(self, name: str) -> Any:
        # Called for names that are not found otherwise; before `__init__` has run there is nothing to ask.
        if "keras_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.keras_optimizer, name)


class KerasSchedule:
    """The schedule inside a Keras optimizer, with the methods that the Trainer calls on a schedule."""

    def __init__(self, optimizer: KerasOptimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, step: Any) -> float:
        """The learning rate of the step with that number, counted from 0."""
        schedule = self._optimizer.keras_optimizer._learning_rate
        is_schedule = callable(schedule) and hasattr(schedule, "get_config")
        return float(schedule(step) if is_schedule else self._optimizer.rate())

    def step(self, metric: Any = None) -> None:
        """Do nothing: the Keras optimizer counts its own steps."""

    def get_last_lr(self) -> list[float]:
        """The learning rate of the newest step."""
        return [float(self._optimizer.param_groups[0]["lr"])]

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's count of its steps, which is all that a schedule depends on."""
        return {"iterations": int(self._optimizer.keras_optimizer.iterations)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the count is restored with the optimizer."""


def use_schedule(optimizer: Any, schedule: Any) -> None:
    """Let a Keras optimizer follow a schedule that was given alongside it.

    Raises:
        ConfigError: the optimizer has another schedule, or this is not a Keras schedule.
    """
    kind, present = import_keras().optimizers.schedules.LearningRateSchedule, optimizer._learning_rate
    if not isinstance(schedule, kind):
        message = "The schedule of a Keras optimizer must be a Keras schedule."
        remedy = "Give a keras.optimizers.schedules.LearningRateSchedule, or None."
        raise _refusal(message, type(schedule).__name__, remedy)
    if isinstance(present, kind) and present is not schedule and present.get_config() != schedule.get_config():
        message = "The optimizer has another schedule than the given one."
        remedy = "Give the optimizer that schedule as its learning_rate, or give (optimizer, None)."
        raise _refusal(message, type(schedule).__name__, remedy)
    if present is not schedule:
        optimizer.learning_rate = schedule


def default_optimizer(args: TrainingArguments, schedule: Any, steps: int, variables: Any, decayed: set[int]) -> Any:
    """Adam or, with weight decay, AdamW.

    Args:
        schedule: that it follows; None for a polynomial decay to 0 of power `poly_power` after the warm-up.
        steps: optimizer steps of the training.
        variables: the model's trainable variables.
        decayed: ids of the tensors that decay.
    """
    keras, warmup = import_keras(), args.get_warmup_steps(steps)
    if schedule is None:
        power, decaying = getattr(args, "poly_power", 1.0), max(1, steps - warmup)
        schedule = keras.optimizers.schedules.PolynomialDecay(args.learning_rate, decaying, 0.0, power)
        schedule = _warm_up(keras, args.learning_rate, schedule, warmup) if warmup else schedule
    adam = {"beta_1": args.adam_beta1, "beta_2": args.adam_beta2, "epsilon": args.adam_epsilon}
    if not args.weight_decay:
        return keras.optimizers.Adam(schedule, **adam)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=args.weight_decay, **adam)
    whole = [variable for variable in variables if id(variable.value) not in decayed]
    optimizer.exclude_from_weight_decay(var_list=whole)
    return optimizer


def _warm_up(keras: Any, rate: float, decay: Any, steps: int) -> Any:
    """A schedule that rises from 0 to `rate` over so many steps, and then follows `decay`."""

    class WarmUp(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        def __call__(self, step: Any) -> Any:
            number = keras.ops.cast(step, "float32")
            share = number / steps
            return keras.ops.where(share < 1.0, rate * share, decay(number - steps))

        def get_config(self) -> dict[str, Any]:
            decays = keras.saving.serialize_keras_object(decay)
            return {"initial_learning_rate": rate, "decay_schedule_fn": decays, "warmup_steps": steps}

    return WarmUp()


def _refusal(message: str, value: Any, remedy: str) -> ConfigError:
    return ConfigError(message, field="optimizers", value=value, remedy=remedy)


def _refuse_own_loops(optimizer: Any) -> None:
    name, remedy = None, ""
    if isinstance(optimizer, import_keras().optimizers.LossScaleOptimizer):
        name, remedy = "LossScaleOptimizer", "Give the optimizer inside it, and set fp16=True."
    for attribute, remedy_of_it in (
        ("loss_scale_factor", "Remove it, and set fp16=True."),
        ("gradient_accumulation_steps", "Remove it, and set gradient_accumulation_steps in the arguments."),
        ("use_ema", "Remove it, and average the weights in a callback."),
    ):
        if name is None and getattr(optimizer, attribute, None):
            name, remedy = attribute, remedy_of_it
    if name is not None:
        raise _refusal("The Keras optimizer does by itself what the Trainer does.", name, remedy)


def _divide(optimizer: Any, variables: Sequence[Any]) -> tuple[dict[Any, _Live], dict[str, torch.Tensor]]:
    """(parameter -> slots by name, all other variables by name) of a Keras optimizer that is built."""
    slots: dict[Any, _Live] = {variable.value: _Live() for variable in variables}
    others: dict[str, torch.Tensor] = {}
    for index, kept in enumerate(optimizer.variables):
        for owner, slot in _owners(kept, variables):
            if slot not in slots[owner.value]:
                slots[owner.value][slot] = kept.value
                break
        else:
            others[kept.name if kept.name in _COUNTED else f"{index}.{len(kept.shape)}d"] = kept.value
    return slots, others


def _owners(kept: Any, variables: Sequence[Any]) -> list[tuple[Any, str]]:
    """The variables that a slot may belong to with the slot's name, the likeliest first.

    Keras names a slot ``<path of the variable, with underscores>_<slot>``.
    """
    fitting = []
    for variable in variables:
        prefix = f"{variable.path.replace('/', '_')}_"
        if kept.name.startswith(prefix) and tuple(kept.shape) == tuple(variable.shape):
            fitting.append((variable, kept.name.removeprefix(prefix)))
    return sorted(fitting, key=lambda pair: len(pair[1]))


# -- names of the older TFTrainer ------------------------------------------------------------------------------------


class LossSum:
    """The sum of the losses of a prediction step, as `eval_loss` of the older TFTrainer."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def update_state(self, value: Any) -> None:
        """Add losses of any shape ``[...]``."""
        added = torch.as_tensor(value).detach().sum()
        self._total = added if self._total is None else self._total + added

    def result(self) -> torch.Tensor | None:
        """The sum ``[]``; None when nothing was added."""
        return self._total

    def reset_state(self) -> None:
        """Forget the losses."""
        self._total = None

    reset_states = reset_state


class SummaryWriter:
    """Writes to a `tf.summary.SummaryWriter`, which stays open, by the methods of torch's writer."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._summary: Any = importlib.import_module("tensorflow").summary  # imported already: it made the writer

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write a number of one step."""
        with self._writer.as_default():
            self._summary.scalar(name, value, step=step)

    def add_text(self, name: str, text: str) -> None:
        """Write a text."""
        with self._writer.as_default():
            self._summary.text(name, text, step=0)

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()


def as_writer(writer: Any) -> Any:
    """A writer with the methods of torch's; one of TensorFlow is wrapped. Raises ConfigError for anything else."""
    if callable(getattr(writer, "add_scalar", None)):
        return writer
    if callable(getattr(writer, "as_default", None)):
        return SummaryWriter(writer)
    raise ConfigError(
        "It has neither add_scalar() nor as_default().",
        field="tb_writer",
        value=type(writer).__name__,
        remedy="Give a SummaryWriter of torch or of TensorFlow.",
    )
