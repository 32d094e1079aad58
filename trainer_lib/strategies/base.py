"""The protocol between the trainer and a strategy. The name of a backend stands in its own file only.

The trainer sequences, a strategy computes. A trainer that asks "is this X?" shows that this protocol lacks a method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from trainer_lib.distributed.communicator import Communicator
from trainer_lib.distributed.precision import Precision

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments


class StrategySettings(Protocol):
    """The arguments that strategies read, among those of `TrainingArguments`."""

    ddp_find_unused_parameters: bool | None
    ddp_bucket_cap_mb: int | None
    ddp_broadcast_buffers: bool | None
    ddp_static_graph: bool | None
    gradient_checkpointing: bool | None


class Strategy(Protocol):
    """One way of training a model. Returned tensors stay on the device, and nothing here waits for it.

    Attributes:
        name: in checkpoints and logs.
        places_model: whether it moves the model to the device itself, in pieces, since the whole may not fit there.
        forward_communicates: whether ranks compute a forward together; a rank without a batch then needs a dummy batch.
        skips_micro_steps: whether a micro-step may be left out where no other rank waits for it.
        plugins: what `trainer.accelerator.state` offers to code written for accelerate, by accelerate's names.
    """

    name: str
    device: torch.device
    comm: Communicator
    places_model: bool
    forward_communicates: bool
    skips_micro_steps: bool
    plugins: Mapping[str, Any]

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that `make` builds; on some ranks perhaps without values, which `setup_model` fills in."""

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError for a model that cannot be trained this way."""

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward trains, on the device: `model` itself or a wrapper around it."""

    def precision(self, args: TrainingArguments) -> Precision:
        """Return how forward passes are computed, and how gradients are scaled."""

    def resolve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the module and the optimizer to train with, made of what `setup_model` returned and its optimizer."""

    def release(self) -> None:
        """Release what `resolve` made, before another training or at the end."""

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Make an optimizer that the user built before `setup_model` hold the parameters that the model has now."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""

    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        """Return the module to predict with.

        Its forward must not communicate unless `forward_communicates`: ranks may have different numbers of batches.

        Args:
            alone: other ranks do not predict at all, so the forward must not communicate in any case.

        Raises:
            ConfigError: `alone`, and the forward cannot do without the other ranks.
        """

    def after_inference(self, model: nn.Module) -> None:
        """Release what only prediction needed."""

    def named_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer holds, by their names in the user's module."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for micro-steps that only accumulate gradients: nothing is exchanged in it."""

    def sync_gradients(self, model: nn.Module) -> None:
        """Exchange gradients that were all computed under `no_sync`, as a backward outside of it does."""

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Backpropagate `loss`, of shape `[]`.

        Args:
            gradient: gradient of the objective with respect to `loss`, of shape `[]`; None stands for 1.
        """

    def numel(self, parameter: nn.Parameter) -> int:
        """Return the number of elements of the whole parameter, over all ranks that share it."""

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Return the global L2 norm of the gradients, `[]` on the device; scale them to a positive `max_norm`."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of a tensor of any shape `[...]`, as a new tensor on the same device."""

    def local_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name, without wrappers' prefixes; sharded ones stay sharded.

        Each has its own shape `[...]`. Tied weights stand under each of their names, with the same values (and the same
        object when sharded).
        """

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the tensors whole: sharded ones on the CPU of rank 0, and without values ("meta") on other ranks.

        Each has its whole shape `[...]`. A tensor is gathered when it is read, so every rank reads the same names in
        the same order.
        """

    def model_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return all of `local_state`, gathered to whole shapes `[...]`. Collective."""

    def checkpoint_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what a checkpoint is written from: `[...]` shards if all ranks write, else whole. Collective."""

    def load_model_state(
        self, model: nn.Module, state: Mapping[str, torch.Tensor], *, keep: Collection[str] = ()
    ) -> None:
        """Copy `state` into the model. Collective.

        Args:
            state: tensors of the whole shapes `[...]`.
            keep: names that may be absent from `state`; these tensors stay as they are.

        Raises:
            ConfigError: names the tensors that are missing, unexpected or of another shape.
        """

    def describe(self) -> dict[str, Any]:
        """Return the part of a checkpoint's metadata that describes the strategy, as JSON."""


def total_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Clip the gradients in place, and return their global L2 norm, `[]`, computed as by `clip_grad_norm_`."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradient if parameter.grad is not None]
    limit = max_norm if max_norm is not None and max_norm > 0 else None
    if _alike(gradients):  # torch sorts them by device and dtype, twice, which here takes longer than the arithmetic
        with torch.no_grad():
            norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            if limit is not None:
                # 1e-6 as in torch's own clipping, which the other branch calls.
                torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm
    norm = nn.utils.get_total_norm(gradients)
    if limit is not None:
        nn.utils.clip_grads_with_norm_(with_gradient, limit, norm)
    return norm


def _alike(gradients: list[torch.Tensor]) -> bool:
    """Return whether all are plain dense tensors of one device and dtype."""
    if not gradients:
        return False
    device, dtype = gradients[0].device, gradients[0].dtype
    if device.type not in ("cpu", "cuda"):
        return False
    return all(
        # A subclass of Tensor may define these operators its own way.
        type(each) is torch.Tensor and each.device == device and each.dtype == dtype and each.layout is torch.strided
        for each in gradients
    )
