"""Divide a mixture model's experts over processes: they compute their experts' parts for the samples of its group.

An experts module of transformers holds parameters ``[experts, ...]``. Here they become `DTensor`s, of which a process
holds the rows of its experts. No token is dropped. There are two forms, as at transformers:

- `expert` (there `all_reduce`): the group has the same samples. A forward sends what the router chose elsewhere to the
  place that transformers keeps for absent experts; the outputs are summed, as are the gradients of what enters.
- `dispatch` (there `all_to_all`): all processes have other samples. Every token is sent to the processes that hold its
  experts, and their outputs are sent back. All other parameters are shards over the group.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer_lib.errors import ConfigError
from trainer_lib.strategies.tensor.layers import Change, Group, divide, exchange, sum_gradients, sum_outputs

_Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
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
    return {name: param for name, param in own.items() if param is not None and param.ndim > 1 and len(param) == number}


def divide_experts(model: nn.Module, names: list[str], mesh: DeviceMesh, *, sends: bool) -> None:
    """Divide the experts over the processes of a mesh of one dimension. No collective, as `divide_layers`.

    Args:
        model: the experts' own.
        names: of the modules of experts.
        mesh: the group.
        sends: the processes have other samples, and send their tokens to the experts.
    """
    group = Group(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    for name in names:
        module: Any = model.get_submodule(name)
        for key, whole in expert_parameters(module).items():
            module._parameters[key] = divide(whole, mesh, 0)
        # What transformers' own division sets: its kernels then skip the choice `num_experts`, an absent expert.
        module.num_experts //= group.size
        module._is_expert_parallel = True
        module.__dict__["trainflow_dispatched"] = sends
        on_part = functools.partial(_run_on_sent if sends else _run_on_part, module.forward, module, group)
        module.forward = functools.wraps(module.forward)(on_part)


def dispatched_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules of experts that tokens are sent to."""
    return [module for module in model.modules() if module.__dict__.get("trainflow_dispatched")]


def _run_on_part(run: _Forward, module: Any, group: Group, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run the module's own forward on this process's experts, and sum over the group: ``[tokens, width]``."""
    number = module.num_experts
    first = group.rank * number
    hidden, weights = sum_gradients(hidden, group), sum_gradients(weights, group)
    absent = (chosen < first) | (chosen >= first + number)
    chosen, weights = (chosen - first).masked_fill(absent, number), weights.masked_fill(absent, 0)
    with _local_parameters(module) as parts:
        output = run(hidden, chosen, weights)
    if torch.is_grad_enabled() and not output.requires_grad:
        # No token came to these experts: the gradients are zeros, and the backward still takes part in the sums.
        for tensor in (hidden, weights, *parts.values()):
            if tensor is not None:
                output = output + tensor[:0].sum().to(output.dtype)
    return sum_outputs(output, group)


def _run_on_sent(run: _Forward, module: Any, group: Group, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Send tokens ``[tokens, width]`` to their experts, and weigh the outputs that come back."""
    experts = chosen.flatten()
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=group.size * module.num_experts).view(group.size, -1)
    counts_here = torch.empty_like(counts)
    dist.all_to_all_single(counts_here, counts, group=group.processes)
    sent, received = torch.stack([counts.sum(1), counts_here.sum(1)]).tolist()
    send, send_back = _send(group, sent, received), _send(group, received, sent)
    rows = exchange(hidden[order // chosen.shape[1]], send, send_back)
    local = torch.arange(module.num_experts, device=rows.device).repeat(group.size)
    local = local.repeat_interleave(counts_here.flatten(), output_size=sum(received))
    if not sum(received):  # kernels take no empty input, and the backward still takes part in the exchanges
        rows, local = nn.functional.pad(rows, (0, 0, 0, 1)), local.new_zeros(1)
    with _local_parameters(module, 1 / group.size):
        output = run(rows, local[:, None], torch.ones_like(local[:, None], dtype=rows.dtype))
    output = exchange(output[: sum(received)], send_back, send)
    output = torch.empty_like(output).index_copy(0, order, output).view(*chosen.shape, -1)
    return (output * weights[..., None].to(output.dtype)).sum(1)


def _send(group: Group, sizes: list[int], received: list[int]) -> Change:
    """Return the exchange of rows ``[sum(sizes), width]`` for ``[sum(received), width]``. Collective when called."""

    def swap(rows: Tensor) -> Tensor:
        swapped = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(swapped, rows.contiguous(), received, sizes, group=group.processes)
        return swapped

    return swap


@contextlib.contextmanager
def _local_parameters(module: nn.Module, share: float | None = None) -> Iterator[dict[str, Tensor | None]]:
    """Let the module have this process's part of its parameters as plain tensors.

    Args:
        module: of experts.
        share: multiplies the gradients, if they are sums over a group of which a mean is wanted.
    """
    own = module._parameters
    parts: dict[str, Tensor | None] = {
        name: param.to_local() if isinstance(param, DTensor) else param for name, param in own.items()
    }
    if share is not None:
        parts = {name: None if param is None else _scale_gradient(param, share) for name, param in parts.items()}
    module.__dict__["_parameters"] = parts
    try:
        yield parts
    finally:
        module.__dict__["_parameters"] = own


def _scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    return exchange(tensor, lambda part: part.view_as(part), lambda gradient: gradient * factor)
