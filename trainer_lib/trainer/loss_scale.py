"""What a loss is, as far as it is known before it is computed: some authors scale theirs for the step themselves.

A subclass states it by `loss_is_scaled_for_ga`, or by setting `model_accepts_loss_kwargs`. Without a statement, a loss
counts as scaled when the code that computes it reads the number of micro-batches of a step, or when the subclass gives
a `compute_loss_func` that cannot be called: that switches scaling off in the transformers Trainer. Every other loss is
taken for a mean over its target items, unless it used `num_items_in_batch`, which is noted when it is computed.
"""

from __future__ import annotations

import dis
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_lib.errors import ConfigError
from trainer_lib.trainer.overrides import is_set, own_classes
from trainer_lib.trainer.weighting import LossScale

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)
_STEPS = frozenset({"current_gradient_accumulation_steps", "gradient_accumulation_steps"})
_RANKS = frozenset({"num_processes", "world_size"})


@dataclass(frozen=True)
class LossRule:
    """What losses are.

    Attributes:
        undivided: a loss that did not use `num_items_in_batch`.
        divided: a loss that an override divided by `num_items_in_batch`.
        passes_items: `compute_loss` is given `num_items_in_batch`.
        model_takes_items: the model is given it, whatever its forward declares.
    """

    undivided: LossScale = LossScale.MEAN
    divided: LossScale = LossScale.SHARE
    passes_items: bool = True
    model_takes_items: bool = False

    @classmethod
    def of(cls, trainer: Trainer, *, computes_own: bool) -> LossRule:
        """Find the rule of a Trainer; `computes_own`: a subclass overrides `compute_loss`.

        Raises:
            ConfigError: the loss function that would be called cannot be called.
        """
        func: Any = trainer.compute_loss_func  # some subclasses give text, to switch scaling off
        stated = trainer.loss_is_scaled_for_ga
        accepts = trainer.model_accepts_loss_kwargs if is_set(trainer, "model_accepts_loss_kwargs") else None
        passes = func is not None or accepts is not False
        given: dict[str, Any] = {"passes_items": passes, "model_takes_items": accepts is True}
        if stated is not None:
            scale = LossScale.STEP if stated else LossScale.BATCH
            return cls(scale, scale, **given)
        if func is not None and not callable(func) and not computes_own:
            raise ConfigError(
                "The loss function cannot be called.",
                field="compute_loss_func",
                value=type(func).__name__,
                remedy="Give a function of (outputs, labels, num_items_in_batch).",
            )
        names = set(_names_read([func], type(trainer)))
        if computes_own:
            names |= set(_names_read(_overrides(trainer, "compute_loss"), type(trainer)))
        divided = LossScale.STEP if computes_own and names & _RANKS else LossScale.SHARE
        if found := names & _STEPS:
            _log.info(
                "The loss counts as scaled for the step, because its code reads %s; loss_is_scaled_for_ga = False on "
                "the Trainer states the opposite.",
                ", ".join(sorted(found)),
            )
        scaled = computes_own and ((func is not None and not callable(func)) or accepts is True)
        scale = LossScale.STEP if scaled else LossScale.BATCH if not passes else LossScale.MEAN
        if found:  # one that reads the number of ranks may have left dummy batches out by itself
            scale = LossScale.STEP if names & _RANKS else LossScale.PART
        return cls(scale, divided, **given)


def _overrides(one: object, name: str) -> list[Any]:
    """The versions of a method in subclasses, and the function that replaces it on this Trainer."""
    versions = [vars(each)[name] for each in own_classes(type(one)) if name in vars(each)]
    return [*versions, *([vars(one)[name]] if name in vars(one) else [])]


def _names_read(functions: list[Any], cls: type) -> Iterator[str]:
    """The names of attributes and globals that functions read, and the methods of `cls` that they call on `self`."""
    waiting, seen = [code for each in functions for code in _code_of(each)], set[CodeType]()
    while waiting:
        code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        yield from code.co_names
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        for name in _called_on_self(code):
            waiting += [each for owner in own_classes(cls) for each in _code_of(vars(owner).get(name))]


def _code_of(function: Any) -> Iterator[CodeType]:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        function = function.forward
    plain: Callable[..., Any] = getattr(function, "__wrapped__", None) or getattr(function, "__func__", function)
    instance: Any = vars(type(plain)).get("__call__")  # of an object that can be called
    code = getattr(plain, "__code__", None) or getattr(instance, "__code__", None)
    if isinstance(code, CodeType):
        yield code


def _called_on_self(code: CodeType) -> Iterator[str]:
    before = None
    for step in dis.get_instructions(code):
        if before is not None and before.argval == "self" and before.opname.startswith("LOAD"):
            yield str(step.argval)
        before = step
