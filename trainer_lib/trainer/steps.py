"""Forward and backward of one micro-batch, and one batch of predictions. Every method may be overridden."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trainer_lib.data.items import MAPPINGS, SEQUENCES
from trainer_lib.trainer.base import TrainerBase


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
        """A batch ready for the model, on the device.

        Raises:
            DataError: the batch is empty.
        """
        return self._trainflow.forward.prepare_inputs(inputs)

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
            internals.engine.set_optimizer_mode("train")
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
            ignore_keys: outputs that are not logits; default: the configuration's ``keys_to_ignore_at_inference``.

        Returns:
            The mean loss, 0-dim; the outputs without the loss and without `ignore_keys`, ``[batch, ...]``, a tuple of
            them when there are several; the labels ``[batch, ...]``, a tuple when there are several.
        """
        return self._trainflow.forward.predict(model, inputs, prediction_loss_only, ignore_keys)
