"""Forward and backward of one micro-batch, and one batch of predictions. Every method may be overridden."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trainer_lib import optim
from trainer_lib.arguments import TrainingArguments
from trainer_lib.data.loading.items import MAPPINGS, SEQUENCES
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.trainer.api.base import TrainerBase
from trainer_lib.trainer.overrides import keep_taken


class StepMethods(TrainerBase):
    """Inputs, loss, backward, prediction."""

    def _prepare_input(self, data: Any) -> Any:
        """Move a tensor, or every tensor in a nested structure, to the device."""
        if isinstance(data, torch.Tensor):
            world = self._trainflow.world
            return data.to(world.device, non_blocking=world.batching.non_blocking)
        if isinstance(data, MAPPINGS):
            moved = {name: self._prepare_input(value) for name, value in data.items()}
            # The class is kept: code that expects a BatchEncoding may use its methods.
            return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
        if isinstance(data, SEQUENCES):
            parts = [self._prepare_input(value) for value in data]
            # A named tuple takes its values one by one.
            return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
        return data

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch on the device, with the memory of the last one (`past_index`). Raises DataError for an empty one."""
        internals = self._trainflow
        if isinstance(inputs, MAPPINGS) and not inputs:
            columns = internals.facts.columns
            what = f"A batch has nothing that the model takes ({', '.join(columns or ()) or 'no parameter'})."
            remedy = "Name the columns like the parameters of the model's forward, or give a data_collator."
            raise DataError(what, field="train_dataset", remedy=remedy)
        inputs, past = self._prepare_input(inputs), internals.forward.past
        if past is not None and isinstance(inputs, MAPPINGS):
            inputs = {**inputs, "mems": past}  # transformers' Trainer passes it under this name
        return inputs

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Callable[[], AbstractContextManager[None]], Any]:
        """An empty context and the batch as it is: no sequence is split over processes."""
        return nullcontext, inputs

    def _activate_neftune(self, model: nn.Module) -> nn.Module:
        """Add the noise of `neftune_noise_alpha` to the model's embedding, unless training has added it; the model."""
        self._trainflow.model.add_noise(model)
        return model

    def _deactivate_neftune(self, model: nn.Module) -> None:
        """Remove the noise of `neftune_noise_alpha`."""
        self._trainflow.model.remove_noise()

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The context in which a loss is computed: that of mixed precision."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Mixed precision, when the arguments ask for it; `cache_enabled` keeps casts of weights in the context."""
        return self._trainflow.engine.precision.autocast(cache_enabled=bool(cache_enabled))

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch.

        Args:
            model: the wrapped model.
            inputs: the micro-batch, tensors ``[batch, ...]`` by name.
            num_items_in_batch: target items of the whole step, over all ranks.

        Returns:
            The micro-batch's contribution to the step's loss, 0-dim, detached, on the device. Summed over the
            micro-batches of a step and averaged over ranks, contributions are the mean loss over all target items of
            the global batch; `weighting` proves it.
        """
        internals = self._trainflow
        if not self.model.training:  # a callback or an override left it in evaluation mode
            model.train()
        internals.engine.set_optimizer_mode("train")  # an override may have evaluated
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = internals.forward.training_loss(model, inputs, num_items_in_batch)
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # a weight such as 1/3 has too few digits in 16 bits
        run = internals.run
        weight = 1.0 if run is None else run.weights.weight(internals.forward.scale)
        detached = loss.detach()
        # A non-finite loss must not leave finite gradients: NaN flows back to every parameter, on every rank.
        gradient = torch.full_like(detached, weight).add_(detached, alpha=0)
        internals.engine.backward(loss, gradient)
        return detached if weight == 1.0 else detached * weight

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch: the model's own, or `compute_loss_func`'s, or the label smoother's.

        Args:
            model: the module to call.
            inputs: the batch, tensors ``[batch, ...]`` by name.
            return_outputs: also return the model's outputs.
            num_items_in_batch: target items of the whole step; passed to a model whose forward takes it and to
                `compute_loss_func`. Both may ignore it.

        Returns:
            The loss, 0-dim; or (loss, outputs).

        Raises:
            ConfigError: the outputs hold no loss.
        """
        loss, outputs = self._trainflow.forward.compute_loss(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, logits and labels of one batch, detached; None for each that is missing.

        Args:
            model: the module to call.
            inputs: the batch, tensors ``[batch, ...]`` by name.
            prediction_loss_only: return the loss alone.
            ignore_keys: outputs that are not logits; default: the configuration's ``keys_to_ignore_at_inference``, else
                the keys and values of a transformers model.

        Returns:
            The mean loss, 0-dim; the outputs without the loss and without `ignore_keys`, ``[batch, ...]``, a tuple of
            them when there are several; the labels ``[batch, ...]``, a tuple when there are several.
        """
        return self._trainflow.forward.predict(model, inputs, prediction_loss_only, ignore_keys)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set up the optimizer and the schedule, unless they were given."""
        self.create_optimizer()
        # A schedule on a wrapper would not see that the optimizer in it steps.
        self._trainflow.engine.unwrap_optimizers()
        given = keep_taken(self.create_scheduler, {"optimizer": self.optimizer})
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
        return sum(numel(param) for param in self.model.parameters() if param.requires_grad)

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
            if any(param is wanted for param in group["params"]):
                return group
        remedy = "Give one that is trained."
        raise ConfigError("The optimizer does not hold the parameter.", field="param", value=str(param), remedy=remedy)

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
        if not training:
            return model
        module: Any = model
        if self.args.torch_compile:
            backend = self.args.torch_compile_backend or "inductor"
            module = torch.compile(model, backend=backend, mode=self.args.torch_compile_mode)
        return self._trainflow.engine.strategy.setup_model(module)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model to the device; an override may leave it where it is."""
        model.to(device)
