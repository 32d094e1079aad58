"""Optimizer, schedule, and the one place where parameters change."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from trainer_lib import optim
from trainer_lib.arguments import TrainingArguments
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.base import TrainerBase

METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")


class OptimizationMixin(TrainerBase):
    """Optimizer and schedule. Every public method may be overridden."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set up the optimizer and the schedule, unless they were given."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Set up the optimizer, unless one was given."""
        if self.optimizer is None:
            target = model or self.model
            cls_and_kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, target)
            self.optimizer = optim.build_optimizer(
                self.args, target, cls_and_kwargs=cls_and_kwargs, decay_names=self.get_decay_parameter_names(target)
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Set up the schedule over `num_training_steps` optimizer steps, unless one was given."""
        if self.lr_scheduler is None:
            target = optimizer or self.optimizer
            if target is None:
                raise ConfigError("is needed before a schedule.", field="optimizer", remedy="Call create_optimizer.")
            own = self.strategy.schedule(target, num_training_steps)
            self.lr_scheduler = optim.create_scheduler(self.args, target, num_training_steps) if own is None else own
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The optimizer's class and settings that the arguments ask for."""
        return optim.create_optimizer_cls_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to: no biases, no norm layers."""
        return optim.get_decay_parameter_names(model)

    def get_num_trainable_parameters(self) -> int:
        """Number of parameters that are trained."""
        return sum(self.strategy.numel(each) for each in self.model.parameters() if each.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._ready_optimizer().param_groups]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """The parameter group that holds `param` (a parameter, or its name); without it, every group's parameters.

        Raises ConfigError when the optimizer does not hold it.
        """
        groups = self._ready_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        for group in groups:
            if any(each is wanted for each in group["params"]):
                return group
        raise ConfigError("is not in the optimizer.", field="param", value=str(param), remedy="Give a trained one.")

    def _get_learning_rate(self) -> Any:
        """The learning rate that is logged: the first group's, a number or (some optimizers) a tensor on the device."""
        return self._ready_optimizer().param_groups[0]["lr"]

    def _ready_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigError("There is no optimizer yet.", field="optimizer", remedy="Call create_optimizer or train.")
        return self.optimizer

    def _reset_optimizer(self) -> None:
        """Forget what an earlier `train` made; what the user gave is kept."""
        self.strategy.release()
        self.optimizer, self.lr_scheduler = self._given_optimizers

    def _settle_optimizer(self) -> None:
        """Model and optimizer, both complete, become what trains."""
        self.model_wrapped, self.optimizer = self.strategy.settle(self.model_wrapped, self._ready_optimizer())

    def _optimizer_mode(self, mode: str) -> None:
        # Schedule-free optimizers keep two sets of weights and have to be told which one is wanted.
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    # -- the step -----------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`; their norm before that, 0-dim on the device."""
        parameters = [each for group in self._ready_optimizer().param_groups for each in group["params"]]
        return self.strategy.clip_grad_norm(parameters, self.args.max_grad_norm)

    def _unscale(self) -> None:
        if self.precision.scaler is not None:
            self.precision.scaler.unscale_(self._ready_optimizer())

    def _step_if_finite(self, norm: torch.Tensor) -> None:
        """Step the optimizer unless the gradients' norm is NaN or infinite.

        Optimizers with `found_inf` (torch's fused ones) are told on the device and skip there: the host does not wait.
        Others have to be asked first, which on a GPU waits for the device once per step.
        """
        optimizer = self._ready_optimizer()
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            found = norm - norm  # 0, or NaN when it is NaN or infinite; NaN alone differs from itself
            optimizer.found_inf = found.ne_(found).float()  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        elif bool(torch.isfinite(norm)):
            optimizer.step()
        else:
            # torch would warn that the schedule stepped before the optimizer, if this was the very first step.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        if self.precision.scaler is not None:
            self.precision.scaler.update()

    def _step_schedule(self) -> None:
        if self.lr_scheduler is not None and str(self.args.lr_scheduler_type) not in METRIC_SCHEDULES:
            self.lr_scheduler.step()

    def _step_metric_schedule(self, metrics: dict[str, float]) -> None:
        """Schedules that follow a metric step when there is one."""
        if str(self.args.lr_scheduler_type) not in METRIC_SCHEDULES or self.lr_scheduler is None:
            return
        name = str(self.args.metric_for_best_model)
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(
                f"The schedule follows it, but the evaluation gave only {', '.join(metrics)}.",
                field="metric_for_best_model",
                value=name,
                remedy="Name one of them.",
            )
        self.lr_scheduler.step(metrics[name])
