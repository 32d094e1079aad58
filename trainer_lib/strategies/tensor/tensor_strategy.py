"""Layers or experts divided over processes, by themselves or inside of FSDP's shards and of replicas.

The tensor or expert dimension is the innermost of the mesh: layers are divided first, and `fully_shard` then divides
the parts in rows, or copies them (a shard of one process), over the processes that train on different samples.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from trainer_lib.arguments.configs.parallelism_config import read_layout
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import ConfigError
from trainer_lib.strategies.fsdp.fsdp_strategy import FsdpStrategy
from trainer_lib.strategies.tensor.experts import dispatched_experts, divide_experts, plan_experts
from trainer_lib.strategies.tensor.layers import Group, divide_layers, plan_layers
from trainer_lib.strategies.tensor.vocabulary import DividedLoss, find_divided_head

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments


class TensorStrategy(FsdpStrategy):
    """Every rank of a group computes a part of every layer, or some experts, for the same samples."""

    name = "tensor"

    def __init__(self, device: torch.device, comm: Communicator, args: TrainingArguments) -> None:
        """Form the mesh of processes. Raises ConfigError."""
        super().__init__(device, comm, args)
        # Torch warns of every gathering over two dimensions; what is summed has one collective here.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        layout = read_layout(args)
        self._plan = None if layout is None else layout.plan
        self._experts = "dispatch" if self.mesh.sizes["dispatch"] > 1 else "expert"
        self._by_mesh: GroupsByMesh | None = None

    @override
    def check_model(self, model: nn.Module) -> None:
        if not self.is_divided(model):
            if self.mesh.sizes[self._experts] > 1:
                plan_experts(model, self.mesh.sizes[self._experts])
            else:
                plan_layers(model, self._plan, self.mesh.sizes["tensor"])
            super().check_model(model)

    @override
    def is_divided(self, model: nn.Module) -> bool:
        # Shards that are gathered are plain tensors.
        return super().is_divided(model) or any(isinstance(param, DTensor) for param in model.parameters())

    @override
    def _divide_layers(self, model: nn.Module) -> None:
        if (parts := self.mesh.sizes[self._experts]) > 1:
            names = plan_experts(model, parts)
            divide_experts(model, names, self.mesh.along(self._experts), sends=self._experts == "dispatch")
            return
        styles = plan_layers(model, self._plan, self.mesh.sizes["tensor"])
        mesh = self.mesh.along("tensor")
        divide_layers(model, styles, mesh)
        if head := find_divided_head(model, styles):
            DividedLoss(model, head, Group(mesh.get_group(), mesh.get_local_rank(), mesh.size()))

    @override
    def divided_loss(self, model: nn.Module) -> DividedLoss | None:
        loss = getattr(self.unwrap(model), "loss_function", None)
        return loss if isinstance(loss, DividedLoss) else None

    @override
    def _units_of_shards(self, model: nn.Module) -> list[nn.Module]:
        return dispatched_experts(model) if self._experts == "dispatch" else []

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return super().no_sync(model) if self.mesh.data_size > 1 else contextlib.nullcontext()

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
            raise ConfigError(
                "The model's layers are divided over the processes, so none of them can predict by itself.",
                field="parallelism",
                value=self.mesh.describe(),
                remedy="Use predict(), or load the saved model into a Trainer without parallelism.",
            )
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
