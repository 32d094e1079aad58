"""Optimizer and schedule. Every method may be overridden."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trainer_lib import optim
from trainer_lib.arguments import TrainingArguments
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.base import TrainerBase
from trainer_lib.xla import move_module


class OptimizationMethods(TrainerBase):
    """Optimizer, schedule, clipping, wrapping."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set up the optimizer and the schedule, unless they were given."""
        self.create_optimizer()
        # A schedule on a wrapper would not see that the optimizer in it steps.
        self._trainflow.engine.unwrap_optimizers()
        takes_optimizer = self._trainflow.signatures.scheduler_takes_optimizer
        given = {"optimizer": self.optimizer} if takes_optimizer else {}
        self.create_scheduler(num_training_steps=num_training_steps, **given)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Set up the optimizer, unless one was given; an override sets `self.optimizer`."""
        return self._trainflow.engine.create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Set up the schedule over `num_training_steps` optimizer steps, unless one was given."""
        return self._trainflow.engine.create_scheduler(num_training_steps, optimizer)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The optimizer's class and settings that the arguments ask for."""
        return optim.create_optimizer_cls_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: all but biases and norm layers."""
        return optim.get_decay_parameter_names(model)

    def get_num_trainable_parameters(self) -> int:
        """Number of elements of all parameters that are trained."""
        numel = self._trainflow.engine.strategy.numel
        # A sharded parameter holds a part of its elements here, so the strategy counts.
        return sum(numel(each) for each in self.model.parameters() if each.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._trainflow.engine.ready_optimizer().param_groups]

    def get_tp_size(self) -> int:
        """Processes that share the tensors of one layer: 1."""
        return 1

    def get_cp_size(self) -> int:
        """Processes that share the context of one sequence: 1."""
        return 1

    def get_sp_size(self) -> int:
        """Processes that share one sequence: 1."""
        return 1

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """The parameter group that holds `param` (a parameter or its name); without it, every group's parameters.

        Raises:
            ConfigError: the optimizer does not hold it.
        """
        groups = self._trainflow.engine.ready_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        for group in groups:
            # By identity: `in` on a list of tensors compares their values.
            if any(each is wanted for each in group["params"]):
                return group
        raise ConfigError(
            "The optimizer does not hold the parameter.",
            field="param",
            value=str(param),
            remedy="Give one that is trained.",
        )

    def _get_learning_rate(self) -> Any:
        """The learning rate that is logged, of the first group: a number or, for some optimizers, a 0-dim tensor."""
        return self._trainflow.engine.ready_optimizer().param_groups[0]["lr"]

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`. Their L2 norm before that, 0-dim on the device."""
        engine = self._trainflow.engine
        return engine.strategy.clip_grad_norm(engine.clipped_parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        """The gradients' norm that is logged: `grad_norm`, or measured without clipping; 0-dim."""
        if grad_norm is not None:
            return grad_norm
        return self._trainflow.engine.strategy.clip_grad_norm(list(model.parameters()), float("inf"))

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """False: all gradients of a model are on one device mesh."""
        return False

    def _mixed_mesh_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the gradients to `max_norm`. Their L2 norm before that, 0-dim on the device."""
        return self._trainflow.engine.strategy.clip_grad_norm(list(model.parameters()), max_norm)

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        """An empty context: the strategy decides when gradients are exchanged."""
        return nullcontext()

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Do nothing: the strategy keeps parameters equal on all ranks."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The module whose forward is called in training: compiled and distributed as the arguments ask."""
        return self._trainflow.engine.wrap(model) if training else model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model to the device; an override may leave it where it is."""
        move_module(model, device)
