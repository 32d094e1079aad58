"""What each override of a subclass takes. Subclasses written over five years have five ages of signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer


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


def _is_ours(trainer: Trainer, name: str) -> bool:
    return str(getattr(_function(trainer, name), "__module__", "")).startswith("trainer_lib.")


@dataclass(frozen=True)
class Signatures:
    """What the methods of one Trainer take, found once when it is built and not at every step.

    Attributes:
        overridden: the methods of the reference that are not the library's own, on the class or on the instance.
        prediction_is_default: no subclass overrides `prediction_step` or `compute_loss`.
        compute_loss_takes_items: `compute_loss` takes `num_items_in_batch`.
        compute_loss_takes_outputs: `compute_loss` takes `return_outputs`.
        training_step_takes_items: `training_step` takes a third positional argument.
        log_takes_start: `log` takes a second positional argument, the start time.
        loss_func_takes_items: `compute_loss_func` takes `num_items_in_batch`.
        scheduler_takes_optimizer: `create_scheduler` takes `optimizer`.
        load_takes_model: `_load_from_checkpoint` takes a second positional argument, the model.
        samples_take_device: `get_batch_samples` takes a third positional argument, the device.
        report_takes: how many of the newest seven positional arguments `_maybe_log_save_evaluate` takes.
        report_takes_rate: it takes `learning_rate`.
    """

    overridden: frozenset[str]
    prediction_is_default: bool
    compute_loss_takes_items: bool
    compute_loss_takes_outputs: bool
    training_step_takes_items: bool
    log_takes_start: bool
    loss_func_takes_items: bool
    scheduler_takes_optimizer: bool
    load_takes_model: bool
    samples_take_device: bool
    report_takes: int
    report_takes_rate: bool

    @classmethod
    def of(cls, trainer: Trainer, defaults: Mapping[str, Any]) -> Signatures:
        """Read the signatures of a Trainer; `defaults`: the library's own functions by name."""
        func = trainer.compute_loss_func
        func = getattr(func, "forward", func)  # a module's `__call__` takes anything
        return cls(
            overridden=frozenset(name for name, own in defaults.items() if _function(trainer, name) is not own),
            prediction_is_default=all(_is_ours(trainer, name) for name in ("compute_loss", "prediction_step")),
            compute_loss_takes_items=takes(trainer.compute_loss, "num_items_in_batch"),
            compute_loss_takes_outputs=takes(trainer.compute_loss, "return_outputs"),
            training_step_takes_items=takes_positionals(trainer.training_step, 3),
            log_takes_start=takes_positionals(trainer.log, 2),
            loss_func_takes_items=func is not None and takes(func, "num_items_in_batch"),
            scheduler_takes_optimizer=takes(trainer.create_scheduler, "optimizer"),
            load_takes_model=takes_positionals(trainer._load_from_checkpoint, 2),
            samples_take_device=takes_positionals(trainer.get_batch_samples, 3),
            report_takes=_report_count(trainer._maybe_log_save_evaluate),
            report_takes_rate=takes(trainer._maybe_log_save_evaluate, "learning_rate"),
        )


def _report_count(report: Callable[..., Any]) -> int:
    # 7 since transformers 4.46, 6 (without the start time) since 4.38, 5 (without the gradient norm) before.
    return next((count for count in (7, 6, 5) if takes_positionals(report, count)), 7)


def _function(trainer: object, name: str) -> Any:
    found = getattr(trainer, name, None)
    return getattr(found, "__func__", found)
