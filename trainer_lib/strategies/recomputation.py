"""Activations of a model's blocks: recomputed in the backward, for all blocks or some, and kept on the CPU.

torch does the work (`torch.utils.checkpoint` and `save_on_cpu`); this chooses the blocks and the operators.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

_FIELD = "gradient_checkpointing_kwargs"
#: Operators by the names that people use; kernels of attention are operators.
_OPERATORS = {
    "mm": ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"),
    "sdpa": tuple(
        f"aten._scaled_dot_product_{kernel}"
        for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    ),
}


@dataclass(frozen=True)
class Recomputation:
    """Settings by which blocks save memory."""

    every: int = 1  # recompute every n-th block; 0 recomputes none
    save: tuple[str, ...] = ()  # operators whose results recomputed blocks keep
    blocks: tuple[str, ...] = ()  # names of the blocks' classes; empty: the layers that the model repeats
    offload: bool = False  # what blocks keep for the backward is in the CPU's memory
    preserve_rng_state: bool = True  # draw the same random numbers again

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Self | None:
        """The settings in `gradient_checkpointing_kwargs`; None where the model chooses. Raises ConfigError."""
        given = dict(settings or {})
        if not given.keys() & {"every", "save", "blocks", "offload"}:
            return None
        if given.pop("use_reentrant", False):
            raise _error("use_reentrant", True, "Choices of blocks need the other variant.", "Remove it.")
        for name, value in given.items():
            if name not in cls.__dataclass_fields__:
                known = [*cls.__dataclass_fields__, "use_reentrant"]
                raise _error(name, value, "Recomputation of blocks has no such setting.", suggestion(name, known))
            if name == "every" and (type(value) is not int or value < 0):
                remedy = "Give 1 for all blocks, 2 for every other."
                raise _error(name, value, "This is not a number of blocks.", remedy)
            if name in ("offload", "preserve_rng_state") and not isinstance(value, bool):
                raise _error(name, value, "This is not a truth value.", "Give true or false.")
            if name in ("save", "blocks"):
                given[name] = _words(name, value)
        made = cls(**given)
        if made.every == 0 and not made.offload:
            raise _error("every", 0, "No block would be recomputed.", "Add offload: true, or give 1.")
        if made.every == 0 and made.save:
            raise _error("save", list(made.save), "No block is recomputed, so all is kept.", "Remove it.")
        _find_operators(made.save)
        return made


def _words(name: str, value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) for word in words):
        raise _error(name, value, "This is not a list of names.", 'Give a list such as ["mm", "sdpa"].')
    return tuple(words)


def _find_operators(names: tuple[str, ...]) -> list[Any]:
    """All overloads of the operators. Raises ConfigError for a name that torch does not know."""
    found: list[Any] = []
    for name in names:
        for path in _OPERATORS.get(name, (name,)):
            namespace, _, operator = path.rpartition(".")
            packet = getattr(getattr(torch.ops, namespace or "aten"), operator, None)
            if packet is not None:
                found += [getattr(packet, overload) for overload in packet.overloads()]
            elif name not in _OPERATORS:
                remedy = f'Give "mm", "sdpa", or a name such as "aten.mm"; {suggestion(operator, dir(torch.ops.aten))}'
                raise _error("save", name, "torch has no such operator.", remedy)
    return found


def find_blocks(model: nn.Module, settings: Recomputation) -> list[nn.Module]:
    """The modules that are recomputed or offloaded one by one, in the order of the model; none lies in another.

    Raises ConfigError where there is none, and for one that counts its batches and would count them twice.
    """
    blocks = list(_walk(model, settings.blocks))
    present = {type(block).__name__ for block in blocks}
    missing = next((name for name in settings.blocks if name not in present), None)
    if missing is not None or not blocks:
        inside = sorted({type(module).__name__ for module in model.modules() if module is not model})
        what = "The model has no such module." if missing else "The model repeats no layers in a list."
        remedy = suggestion(missing, inside) if missing else "Name the class of its layers."
        raise _error("blocks", missing or "none", what, remedy)
    for block in blocks if settings.every else ():
        if any(isinstance(module, _BatchNorm) and module.track_running_stats for module in block.modules()):
            what = "Its running statistics would take each batch twice."
            remedy = 'Name blocks without batch normalisation, or give {"every": 0, "offload": true}.'
            raise _error("blocks", type(block).__name__, what, remedy)
    return blocks


def _walk(module: nn.Module, classes: tuple[str, ...]) -> Iterator[nn.Module]:
    children = list(module.children())
    alike = len(children) > 1 and len({type(child) for child in children}) == 1
    repeats = not classes and (isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and alike))
    for child in children:
        container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        # A single operation would save nothing.
        if type(child).__name__ in classes or (repeats and not container and next(child.children(), None) is not None):
            yield child
        else:
            yield from _walk(child, classes)


def save_memory(model: nn.Module, settings: Recomputation) -> Callable[[], None]:
    """Apply the settings to the blocks of a model; return what takes them off."""
    undo = contextlib.ExitStack()
    for number, block in enumerate(find_blocks(model, settings), 1):
        undo.callback(wrap_forward(block, settings, again=settings.every > 0 and number % settings.every == 0))
    return undo.close


def wrap_forward(module: nn.Module, settings: Recomputation, *, again: bool = True) -> Callable[[], None]:
    """Make a module save memory in training, and recompute what it computes if `again`; return what undoes it.

    This wraps the forward alone, so the module's hooks, which gather its parameters, run outside the recomputation.
    """
    forward, before = module.forward, module.__dict__.get("forward")
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": settings.preserve_rng_state}
    if settings.save:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _find_operators(settings.save))

    @functools.wraps(forward)
    def saving(*args: Any, **kwargs: Any) -> Any:
        # Without gradients there is no backward that could recompute anything.
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if settings.offload else contextlib.nullcontext():
            return checkpoint(forward, *args, **options, **kwargs) if again else forward(*args, **kwargs)

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    module.forward = saving
    return undo


def _error(name: str, value: Any, what: str, remedy: str) -> ConfigError:
    return ConfigError(what, field=f"{_FIELD}.{name}", value=value, remedy=remedy)
