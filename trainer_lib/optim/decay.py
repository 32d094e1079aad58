"""Weight decay applies to every parameter except biases and the scales of norm layers."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

_NORM_LAYERS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # batch and instance norms of every dimension
)
# The reference's patterns, and names with a number (norm1, layer_norm2), which it misses.
_NAMES = re.compile(r"bias|layernorm|layer_norm|rmsnorm|(^|\.)norm(\d*)($|\.)|_norm($|\.)", re.IGNORECASE)


def get_decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that decay, in the model's order.

    Left out are parameters whose name says bias or norm, and those of norm layers: torch's own, and classes whose name
    contains "norm", because many models bring their own.
    """
    in_norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NORM_LAYERS) or "norm" in type(module).__name__.lower()
        # Its own parameters only: a class such as PreNorm contains the whole layer.
        for name, _ in module.named_parameters(recurse=False)
    }
    return [name for name, _ in model.named_parameters() if name not in in_norms and not _NAMES.search(name)]


def parameter_groups(model: nn.Module, weight_decay: float, decay_names: Collection[str]) -> list[dict[str, Any]]:
    """Divide the trainable parameters into a group that decays and one that does not; leave out an empty group.

    Args:
        model: the model.
        weight_decay: decay of the first group, per optimizer step.
        decay_names: names of the parameters that decay.
    """
    wanted = set(decay_names)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[tuple[list[torch.nn.Parameter], float]] = [
        ([parameter for name, parameter in trainable if name in wanted], weight_decay),
        ([parameter for name, parameter in trainable if name not in wanted], 0.0),
    ]
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]
