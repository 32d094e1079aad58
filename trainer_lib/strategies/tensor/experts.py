"""Divide a mixture model's experts over processes: each computes its experts' part for the samples of its group.

An experts module of transformers holds parameters ``[experts, ...]``. Here they become `DTensor`s, of which a process
holds the rows of its experts. Its forward sends what the router chose elsewhere to the place that transformers keeps
for absent experts; the outputs are summed over the group, as are the gradients of what enters. Routers and all other
layers are whole and see all tokens, so router losses are those of one process. No token is dropped.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer_lib.errors import ConfigError
from trainer_lib.strategies.tensor.layers import Group, divide, sum_gradients, sum_outputs

_FIELD = "parallelism.expert"
_STYLE = "ep_dispatch_experts"


def plan_experts(model: nn.Module, parts: int) -> list[str]:
    """Return the names of the modules whose experts are divided into `parts`.

    Raises:
        ConfigError: the model has none, or their number cannot be divided.
    """
    patterns = [
        re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        for pattern, style in (getattr(model, "ep_plan", None) or {}).items()
        if style == _STYLE
    ]
    experts = {
        name: module
        for name, module in model.named_modules()
        if any(pattern.fullmatch(name) for pattern in patterns) and hasattr(module, "_is_expert_parallel")
    }
    if not experts:
        raise ConfigError(
            f"The model {type(model).__name__} has no experts that can be divided (ep_plan).",
            field=_FIELD,
            value=parts,
            remedy="Use shard, or a mixture model of transformers such as Mixtral or Qwen3-MoE.",
        )
    for module in experts.values():
        number = int(module.num_experts)
        if number % parts:
            possible = next(size for size in range(parts, 0, -1) if number % size == 0)
            raise ConfigError(
                f"The model's {number} experts cannot be divided among {parts} processes.",
                field=_FIELD,
                value=parts,
                remedy=f"Give {possible}.",
            )
    return list(experts)


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters ``[experts, ...]`` of an experts module that is whole."""
    number = module.num_experts
    own = module._parameters
    return {name: each for name, each in own.items() if each is not None and each.ndim > 1 and len(each) == number}


def divide_experts(model: nn.Module, names: list[str], mesh: DeviceMesh) -> None:
    """Divide the experts over the processes of a mesh of one dimension. No collective, as `divide_layers`."""
    group = Group(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    for name in names:
        module: Any = model.get_submodule(name)
        for key, whole in expert_parameters(module).items():
            module._parameters[key] = divide(whole, mesh, 0)
        # What transformers' own division sets: its kernels then skip the choice `num_experts`, an absent expert.
        module.num_experts //= group.size
        module._is_expert_parallel = True
        _run_on_part(module, group)


def _run_on_part(module: Any, group: Group) -> None:
    """Run the module's own forward on this process's experts, and sum over the group."""
    forward, number = module.forward, module.num_experts
    first = group.rank * number

    @functools.wraps(forward)
    def on_part(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        own = module._parameters
        parts = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in own.items()}
        hidden, weights = sum_gradients(hidden, group), sum_gradients(weights, group)
        absent = (chosen < first) | (chosen >= first + number)
        module.__dict__["_parameters"] = parts
        try:
            output = forward(hidden, (chosen - first).masked_fill(absent, number), weights.masked_fill(absent, 0))
        finally:
            module.__dict__["_parameters"] = own
        if torch.is_grad_enabled() and not output.requires_grad:
            # No token came to these experts: the gradients are zeros, and the backward still takes part in the sums.
            for each in (hidden, weights, *parts.values()):
                if each is not None:
                    output = output + each[:0].sum().to(output.dtype)
        return sum_outputs(output, group)

    module.forward = on_part
