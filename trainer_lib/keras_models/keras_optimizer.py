"""A Keras optimizer and its schedule under torch's names, so that the Trainer's loop, log and checkpoints know them.

Keras owns the state: slots (momentum, velocity, …), the count of its steps, perhaps the learning rate. They are torch
tensors that Keras changes in place, so this module refers to them instead of copying: `state` has the slots of each
parameter, and the only parameter group has everything else. A restored checkpoint is copied into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from typing_extensions import override

from trainer_lib.errors import ConfigError
from trainer_lib.keras_models.keras_backend import placed_on

_COUNTED = ("iteration", "learning_rate")


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

    Args:
        keras: the package.
        optimizer: the Keras optimizer.
        variables: the model's trainable variables.
        device: of the model.

    Attributes:
        keras_optimizer: the Keras optimizer.

    Raises:
        ConfigError: the optimizer accumulates, averages or scales by itself, or was built for another model.
    """

    keeps_all_in_state = True

    def __init__(self, keras: Any, optimizer: Any, variables: Sequence[Any], device: torch.device) -> None:
        _refuse_own_loops(keras, optimizer)
        self.keras_optimizer = optimizer
        self._keras = keras
        self._device = device
        self._variables = list(variables)
        with placed_on(keras, device):
            if not optimizer.built:
                optimizer.build(self._variables)
        _refuse_other_model(optimizer, self._variables)
        for variable in optimizer.variables:
            variable.value.data = variable.value.data.to(device)  # the user may have built it for another device
        super().__init__([variable.value for variable in self._variables], {"lr": 0.0})
        slots, others = _divide(optimizer, self._variables)
        self.state: Any = _Live(slots)
        self.param_groups[0] = _Live({**self.param_groups[0], **others, "lr": self.rate()})

    def rate(self) -> torch.Tensor:
        """The learning rate of the next step ``[]``, as a copy."""
        with torch.no_grad(), placed_on(self._keras, self._device):
            rate: torch.Tensor = self._keras.ops.convert_to_tensor(self.keras_optimizer.learning_rate, dtype="float32")
        return rate.detach().clone()

    @override
    def step(self, closure: Any = None) -> Any:
        """Update the variables from their gradients. The group's "lr" is afterwards the rate of this step."""
        rate = self.rate()
        gradients = [variable.value.grad for variable in self._variables]
        with torch.no_grad(), placed_on(self._keras, self._device):
            self.keras_optimizer.apply(gradients, self._variables)
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


def use_schedule(keras: Any, optimizer: Any, schedule: Any) -> None:
    """Let a Keras optimizer follow a schedule that was given beside it.

    Raises:
        ConfigError: the optimizer has another schedule, or this is not a Keras schedule.
    """
    kind = keras.optimizers.schedules.LearningRateSchedule
    if not isinstance(schedule, kind):
        raise ConfigError(
            "The schedule of a Keras optimizer must be a Keras schedule.",
            field="optimizers",
            value=type(schedule).__name__,
            remedy="Give a keras.optimizers.schedules.LearningRateSchedule, or None.",
        )
    own = optimizer._learning_rate
    if isinstance(own, kind) and own is not schedule and own.get_config() != schedule.get_config():
        raise ConfigError(
            "The optimizer has another schedule than the one beside it.",
            field="optimizers",
            value=type(schedule).__name__,
            remedy="Give the optimizer that schedule as its learning_rate, or give (optimizer, None).",
        )
    if own is not schedule:
        optimizer.learning_rate = schedule


def _refuse_own_loops(keras: Any, optimizer: Any) -> None:
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    reasons = {
        "LossScaleOptimizer": (scaled, "Give the optimizer inside it, and set fp16=True."),
        "loss_scale_factor": (getattr(optimizer, "loss_scale_factor", None), "Remove it, and set fp16=True."),
        "gradient_accumulation_steps": (
            getattr(optimizer, "gradient_accumulation_steps", None),
            "Remove it, and set gradient_accumulation_steps in the arguments.",
        ),
        "use_ema": (getattr(optimizer, "use_ema", False), "Remove it, and average the weights in a callback."),
    }
    for name, (asked, remedy) in reasons.items():
        if asked:
            raise ConfigError(
                "The Keras optimizer does by itself what the Trainer does.",
                field="optimizers",
                value=name,
                remedy=remedy,
            )


def _refuse_other_model(optimizer: Any, variables: Sequence[Any]) -> None:
    # Keras' own check, which is made at its first step: here it is made before training.
    try:
        optimizer._check_variables_are_known(list(variables))
    except ValueError as error:
        raise ConfigError(
            "The Keras optimizer was built for the variables of another model.",
            field="optimizers",
            value=type(optimizer).__name__,
            remedy="Make a new optimizer for this model.",
        ) from error


def _divide(optimizer: Any, variables: Sequence[Any]) -> tuple[dict[Any, _Live], dict[str, torch.Tensor]]:
    """(parameter -> slots by name, all other variables by name) of a Keras optimizer that is built."""
    slots: dict[Any, _Live] = {variable.value: _Live() for variable in variables}
    others: dict[str, torch.Tensor] = {}
    for index, own in enumerate(optimizer.variables):
        for owner, slot in _owners(own, variables):
            if slot not in slots[owner.value]:
                slots[owner.value][slot] = own.value
                break
        else:
            others[own.name if own.name in _COUNTED else f"{index}.{len(own.shape)}d"] = own.value
    return slots, others


def _owners(own: Any, variables: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """The variables that a slot may belong to with the slot's name, the likeliest first.

    Keras names a slot ``<path of the variable, with underscores>_<slot>``.
    """
    fitting = []
    for variable in variables:
        prefix = f"{variable.path.replace('/', '_')}_"
        if own.name.startswith(prefix) and tuple(own.shape) == tuple(variable.shape):
            fitting.append((variable, own.name.removeprefix(prefix)))
    return iter(sorted(fitting, key=lambda pair: len(pair[1])))
