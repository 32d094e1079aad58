"""The argument and the result of a function that chooses an optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_lib.arguments.enums import OptimizerNames

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments


@dataclass
class Served:
    """An optimizer's class and its keyword arguments."""

    cls: Any
    kwargs: dict[str, Any]


@dataclass
class OptimizerRequest:
    """An optimizer by name, with everything that its settings may depend on.

    Attributes:
        name: the optimizer.
        args: the training arguments.
        model: the model; None when it is not known.
        settings: the parsed `optim_args`.
        used: names of the settings that `take` returned; the others go to the optimizer's constructor as they are.
    """

    name: OptimizerNames
    args: TrainingArguments
    model: nn.Module | None
    settings: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def take(self, name: str, default: Any) -> Any:
        """Return a setting from `optim_args` (or its default) that the caller passes on itself, and mark it as used."""
        self.used.add(name)
        return self.settings.get(name, default)

    @property
    def lr(self) -> dict[str, Any]:
        """The learning rate as a keyword argument."""
        return {"lr": self.args.learning_rate}

    @property
    def betas(self) -> dict[str, Any]:
        """Adam's two decays as a keyword argument."""
        return {"betas": (self.args.adam_beta1, self.args.adam_beta2)}

    @property
    def adam(self) -> dict[str, Any]:
        """Learning rate, decays and epsilon as keyword arguments."""
        return {**self.lr, **self.betas, "eps": self.args.adam_epsilon}
