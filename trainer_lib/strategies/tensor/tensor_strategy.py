"""Layers or experts divided over processes, by themselves or inside of FSDP's shards and of replicas.

The tensor or expert dimension is the innermost of the mesh: layers are divided first, and `fully_shard` then divides
the parts in rows, or copies them (a shard of one process), over the processes that train on different samples.

An experts module of transformers holds parameters ``[experts, ...]``. They become `DTensor`s, of which a process holds
the rows of its experts (transformers' `all_to_all`). Processes have other samples: every token is sent to the processes
that hold its experts, and their outputs are sent back. No token is dropped. All other parameters are shards over the
group.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from trainer_lib.arguments.configs.parallelism_config import read_layout
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import ConfigError
from trainer_lib.strategies.base import cannot_predict_alone
from trainer_lib.strategies.fsdp import FsdpStrategy
from trainer_lib.strategies.tensor.layers import (
    Change,
    DividedLoss,
    Group,
    divide,
    divide_layers,
    exchange,
    find_divided_head,
    find_modules,
    plan_layers,
    require_divisible,
)

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments

_Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
_EXPERTS = "parallelism.expert"
_STYLE = "ep_dispatch_experts"


class TensorStrategy(FsdpStrategy):
    """Every rank of a group computes a part of every layer, or some experts, for the same samples."""

    name = "tensor"

    def __init__(self, device: torch.device, comm: Communicator, args: TrainingArguments) -> None:
        super().__init__(device, comm, args)
        # Torch warns of every gathering over two dimensions; what is summed has one collective here.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        layout = read_layout(args)
        self._plan = None if layout is None else layout.plan
        self._by_mesh: GroupsByMesh | None = None

    @override
    def check_model(self, model: nn.Module) -> None:
        if not self.is_divided(model):
            if (parts := self.mesh.sizes["expert"]) > 1:
                plan_experts(model, parts)
            else:
                plan_layers(model, self._plan, self.mesh.sizes["tensor"])
            super().check_model(model)

    @override
    def is_divided(self, model: nn.Module) -> bool:
        # Shards that are gathered are plain tensors.
        return super().is_divided(model) or any(isinstance(param, DTensor) for param in model.parameters())

    @override
    def _divide_layers(self, model: nn.Module) -> None:
        if (parts := self.mesh.sizes["expert"]) > 1:
            divide_experts(model, plan_experts(model, parts), self.mesh.along("expert"))
            return
        styles = plan_layers(model, self._plan, self.mesh.sizes["tensor"])
        mesh = self.mesh.along("tensor")
        divide_layers(model, styles, mesh)
        if head := find_divided_head(model, styles):
            DividedLoss(model, head, Group.of(mesh))

    @override
    def divided_loss(self, model: nn.Module) -> DividedLoss | None:
        loss = getattr(self.unwrap(model), "loss_function", None)
        return loss if isinstance(loss, DividedLoss) else None

    @override
    def _units_of_shards(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if module.__dict__.get("trainflow_dispatched")]

    @override
    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with super().no_sync(model) if self.mesh.data_size > 1 else contextlib.nullcontext():
            yield

    @override
    def resolve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return both as they are; the optimizer now steps on parameters of one mesh at a time."""
        self.release()
        self._by_mesh = GroupsByMesh(optimizer)
        return super().resolve(model, optimizer)

    @override
    def release(self) -> None:
        if self._by_mesh is not None:
            self._by_mesh.remove()
            self._by_mesh = None

    @override
    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        if alone and self.is_divided(self.unwrap(model)):
            raise cannot_predict_alone("parallelism", self.mesh.describe())
        return super().inference_model(model, alone=alone)

    @override
    def describe(self) -> dict[str, Any]:
        sizes = {name: size for name, size in self.mesh.sizes.items() if size > 1}
        return {"strategy": self.name, "fsdp": self.settings.mode, "layout": sizes}


class GroupsByMesh:
    """Splits an optimizer's groups by the mesh of their parameters while it steps.

    Torch's foreach and fused steps take tensors of one mesh. Schedules, callbacks and checkpoints see the groups that
    the user made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups: list[dict[str, Any]] | None = None
        self._parts: dict[int, list[list[Any]]] = {}
        self._handles = [optimizer.register_step_pre_hook(self._split), optimizer.register_step_post_hook(self._join)]

    def remove(self) -> None:
        """Stop splitting."""
        for handle in self._handles:
            handle.remove()

    def _split(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = self._groups or optimizer.param_groups  # a step that failed has left the split ones
        self._groups, split = groups, []
        for group in groups:
            parts = self._parts.get(id(group), [])
            if sum(map(len, parts)) != len(group["params"]):
                by_mesh: dict[Any, list[Any]] = {}
                for param in group["params"]:
                    by_mesh.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
                parts = self._parts[id(group)] = list(by_mesh.values())
            split += [{**group, "params": part} for part in parts or [[]]]
        optimizer.param_groups = split

    def _join(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._groups is None:
            return
        number = 0
        for group in self._groups:
            stepped = optimizer.param_groups[number]
            group.update({name: value for name, value in stepped.items() if name != "params"})
            number += max(1, len(self._parts.get(id(group), ())))
        optimizer.param_groups, self._groups = self._groups, None


def plan_experts(model: nn.Module, parts: int) -> list[str]:
    """Return the names of the modules whose experts are divided into `parts`. Raises ConfigError."""
    experts: dict[str, Any] = {}
    for pattern, style in (getattr(model, "ep_plan", None) or {}).items():
        if style == _STYLE:
            found = find_modules(model, pattern)
            experts |= {name: module for name, module in found.items() if hasattr(module, "_is_expert_parallel")}
    if not experts:
        what = f"The model {type(model).__name__} has no experts that can be divided (ep_plan)."
        remedy = "Use shard, or a mixture model of transformers such as Mixtral or Qwen3-MoE."
        raise ConfigError(what, field=_EXPERTS, value=parts, remedy=remedy)
    for module in experts.values():
        require_divisible(int(module.num_experts), "experts", parts, _EXPERTS)
    return list(experts)


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters ``[experts, ...]`` of an experts module that is whole."""
    number = module.num_experts
    own = module._parameters
    return {name: param for name, param in own.items() if param is not None and param.ndim > 1 and len(param) == number}


def divide_experts(model: nn.Module, names: list[str], mesh: DeviceMesh) -> None:
    """Divide the named modules of experts over a mesh of one dimension. No collective, as `divide_layers`."""
    group = Group.of(mesh)
    for name in names:
        module: Any = model.get_submodule(name)
        for key, whole in expert_parameters(module).items():
            module._parameters[key] = divide(whole, mesh, 0)
        # What transformers' own division sets.
        module.num_experts //= group.size
        module._is_expert_parallel = True
        module.__dict__["trainflow_dispatched"] = True
        on_sent = functools.partial(_run_on_sent, module.forward, module, group)
        module.forward = functools.wraps(module.forward)(on_sent)


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
    with _local_parameters(module, 1 / group.size):  # gradients are sums over the group, and a mean is wanted
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
def _local_parameters(module: nn.Module, share: float) -> Iterator[None]:
    """Let a module of experts have its part of its parameters as plain tensors, whose gradients `share` multiplies."""
    own = module._parameters
    parts = {name: param.to_local() if isinstance(param, DTensor) else param for name, param in own.items()}
    module.__dict__["_parameters"] = {
        name: None if param is None else exchange(param, lambda part: part.view_as(part), lambda grad: grad * share)
        for name, param in parts.items()
    }
    try:
        yield
    finally:
        module.__dict__["_parameters"] = own
