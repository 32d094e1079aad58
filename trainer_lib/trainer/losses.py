"""Losses: found in a model's outputs, smoothed, disturbed; and whether one was divided by the global count already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.data.collators import IGNORED
from trainer_lib.errors import ConfigError


def plain_items(count: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The count as a 0-dim tensor; made on the device, for a copy to it would make the host wait."""
    if isinstance(count, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return count.as_subclass(torch.Tensor).to(device)
    return torch.full((), count, device=device)


class CountedItems(torch.Tensor):
    """`num_items_in_batch` as losses get it: a 0-dim tensor that notes whether anything was computed with it.

    A loss that divided by it is a sum over the global batch already; one that ignored it is a mean over its own
    micro-batch and has yet to be weighted. Both are common behind the same signature, in overrides and in models:
    nearly half of the model classes of transformers 5 take it among their ``**kwargs`` and do nothing with it.
    Looking at it (its device, its dtype) is no use of it, and neither is a copy, which notes in its stead.
    """

    _note: list[bool]

    @classmethod
    def of(cls, count: int | torch.Tensor, device: torch.device) -> CountedItems:
        """A fresh, unused count on the device."""
        return _counted(plain_items(count, device), [])

    @property
    def used(self) -> bool:
        """Whether it, or a copy of it, went into a computation."""
        return bool(self._note)

    def note(self) -> None:
        """It is used from here on."""
        self._note.append(True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the use, and compute with plain tensors."""
        notes: list[list[bool]] = []
        plain = [_plain(argument, notes) for argument in args]
        named = {name: _plain(argument, notes) for name, argument in (kwargs or {}).items()}
        result = func(*plain, **named)
        name = getattr(func, "__name__", "")
        if name in _LOOKING:
            return result
        if name in _COPYING and len(notes) == 1 and isinstance(result, torch.Tensor):
            return _counted(result, notes[0])
        for note in notes:
            note.append(True)
        return result


_LOOKING = {"__get__", "is_floating_point", "is_complex", "size", "dim", "ndimension", "numel", "stride", "get_device"}
_COPYING = {
    *("to", "type", "type_as", "float", "double", "int", "long", "half", "bfloat16", "cpu", "cuda", "detach", "clone"),
    *("contiguous", "clamp", "clamp_min", "view", "reshape", "unsqueeze", "squeeze", "expand", "requires_grad_"),
}


def _counted(plain: torch.Tensor, note: list[bool]) -> CountedItems:
    items = plain.as_subclass(CountedItems)
    items._note = note
    return items


def _plain(argument: Any, notes: list[list[bool]]) -> Any:
    if isinstance(argument, CountedItems):
        with torch._C.DisableTorchFunctionSubclass():
            notes.append(argument._note)
            return argument.as_subclass(torch.Tensor)
    return argument


class LabelSmoother:
    """Label-smoothed cross-entropy over the logits, mean over the labels that are not -100.

    Source: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def __call__(self, outputs: Any, labels: torch.Tensor, *, shifts: bool) -> torch.Tensor:
        """The loss of ``logits [..., classes]`` against ``labels [...]``."""
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if shifts:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        flat = logits.reshape(-1, logits.shape[-1])
        return nn.functional.cross_entropy(
            flat.float(), labels.reshape(-1), ignore_index=IGNORED, label_smoothing=self.epsilon
        )


def loss_of(outputs: Any, inputs: Any) -> torch.Tensor:
    """The loss in a model's outputs: under "loss" in a mapping, else the first element.

    Raises ConfigError when there is none, naming what there is instead.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(outputs, Mapping):
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs[0] if len(outputs) else None
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.ndim else loss
    given = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
    if isinstance(outputs, Mapping):
        got = "only " + ", ".join(map(str, outputs))
    else:
        got = f"a tensor of shape {tuple(loss.shape)} first" if isinstance(loss, torch.Tensor) else "none"
    raise ConfigError(
        f"The model returned no loss but {got}; it was given {given}.",
        field="model",
        remedy="Return the loss first when labels are given (and give labels), or pass compute_loss_func.",
    )


def neftune_hook(alpha: float) -> Any:
    """A forward hook that adds NEFTune's noise to an embedding while training (https://arxiv.org/abs/2310.05914)."""

    def add_noise(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        bound = alpha / (output.shape[-2] * output.shape[-1]) ** 0.5
        return output + torch.zeros_like(output).uniform_(-bound, bound)

    return add_noise
