"""What a builder of an optimizer gets and gives."""

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
    """An optimizer by name, with everything its settings may follow from.

    Args:
        name: which one.
        args: the training arguments.
        model: the model, where it is known.
        settings: what `optim_args` says.
    """

    name: OptimizerNames
    args: TrainingArguments
    model: nn.Module | None
    settings: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def take(self, name: str, default: Any) -> Any:
        """A setting that the builder itself understands; what nobody takes goes to the optimizer's constructor."""
        self.used.add(name)
        return self.settings.get(name, default)

    @property
    def lr(self) -> dict[str, Any]:
        """The learning rate."""
        return {"lr": self.args.learning_rate}

    @property
    def betas(self) -> dict[str, Any]:
        """Adam's two decays."""
        return {"betas": (self.args.adam_beta1, self.args.adam_beta2)}

    @property
    def adam(self) -> dict[str, Any]:
        """Learning rate, decays and epsilon."""
        return {**self.lr, **self.betas, "eps": self.args.adam_epsilon}
