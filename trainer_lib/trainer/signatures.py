"""What each override of a subclass takes. Subclasses written over five years have five ages of signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer_hooks import TrainerHooks


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters by name; empty when the signature cannot be read, as for some builtins."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` accepts the keyword `name`, by name or through ``**kwargs``."""
    parameters = parameters_of(function)
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def takes_positionals(function: Callable[..., Any], count: int) -> bool:
    """Whether a (bound) function accepts that many positional arguments."""
    kinds = [parameter.kind for parameter in parameters_of(function).values()]
    # Counted, not named: an override may give its parameters other names.
    places = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return places >= count or inspect.Parameter.VAR_POSITIONAL in kinds


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Whether `model_init` takes a search's trial: its first parameter has no default, or is named so."""
    first = next(iter(parameters_of(model_init).values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD, first.VAR_POSITIONAL):
        return False
    return first.default is first.empty or first.name == "trial"


@dataclass(frozen=True)
class Signatures:
    """What the methods of one Trainer take, found once when it is built and not at every step.

    Attributes:
        compute_loss_is_default: no subclass overrides `compute_loss`.
        compute_loss_takes_items: `compute_loss` takes `num_items_in_batch`.
        compute_loss_takes_outputs: `compute_loss` takes `return_outputs`.
        training_step_takes_items: `training_step` takes a third positional argument.
        log_takes_start: `log` takes a second positional argument, the start time.
        loss_func_takes_items: `compute_loss_func` takes `num_items_in_batch`.
        train_sampler_takes_dataset: `_get_train_sampler` takes the dataset.
    """

    compute_loss_is_default: bool
    compute_loss_takes_items: bool
    compute_loss_takes_outputs: bool
    training_step_takes_items: bool
    log_takes_start: bool
    loss_func_takes_items: bool
    train_sampler_takes_dataset: bool

    @classmethod
    def of(cls, trainer: TrainerHooks, *, default_loss: Callable[..., Any]) -> Signatures:
        """Read the signatures of a Trainer; `default_loss` is the function of the library's own `compute_loss`."""
        func = trainer.compute_loss_func
        return cls(
            compute_loss_is_default=getattr(type(trainer), "compute_loss", None) is default_loss,
            compute_loss_takes_items=takes(trainer.compute_loss, "num_items_in_batch"),
            compute_loss_takes_outputs=takes(trainer.compute_loss, "return_outputs"),
            training_step_takes_items=takes_positionals(trainer.training_step, 3),
            log_takes_start=takes_positionals(trainer.log, 2),
            loss_func_takes_items=func is not None and takes(func, "num_items_in_batch"),
            train_sampler_takes_dataset=takes_positionals(trainer._get_train_sampler, 1),
        )
