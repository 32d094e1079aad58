"""What the trainer asks of a strategy. A backend's name stands in its own file only.

The trainer sequences, a strategy computes: were the trainer to ask "is this X?", this protocol would lack a method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from trainer_lib.distributed import Communicator


class StrategySettings(Protocol):
    """The arguments strategies read (`TrainingArguments` has them)."""

    ddp_find_unused_parameters: bool | None
    ddp_bucket_cap_mb: int | None
    ddp_broadcast_buffers: bool | None
    ddp_static_graph: bool | None
    gradient_checkpointing: bool | None


class Strategy(Protocol):
    """One way of training a model. Tensors it returns stay on the device: nothing here waits for it."""

    name: str
    device: torch.device
    comm: Communicator

    def setup_model(self, model: nn.Module) -> nn.Module:
        """The module whose forward trains: `model` itself or a wrapper around it, on the device."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module again."""

    def inference_model(self, model: nn.Module) -> nn.Module:
        """The module to predict with: its forward must not communicate, for ranks may have unequally many batches."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around micro-steps whose gradients are only accumulated: nothing is exchanged."""

    def sync_gradients(self, model: nn.Module) -> None:
        """Exchange gradients that were all computed under `no_sync`, as a backward outside of it would have."""

    def backward(self, loss: torch.Tensor, seed: torch.Tensor | None = None) -> None:
        """Backpropagate `loss`; `seed` is the gradient of the objective with respect to it (1 when None)."""

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Global L2 norm of the gradients, 0-dim on the device; scales them to `max_norm` when that is positive."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, a new tensor on the same device."""

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """The whole model's parameters and persistent buffers by name, without wrappers' prefixes."""

    def load_model_state(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Copy `state` into the model. Raises ConfigError naming missing, unexpected or reshaped tensors."""

    def describe(self) -> dict[str, Any]:
        """What a checkpoint's metadata says about the strategy, JSON."""


def total_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Global L2 norm of the gradients present, clipping them in place; same arithmetic as `clip_grad_norm_`."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradient if parameter.grad is not None]
    limit = max_norm if max_norm is not None and max_norm > 0 else None
    if _alike(gradients):  # torch sorts them by device and dtype, twice, which here takes longer than the arithmetic
        with torch.no_grad():
            norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            if limit is not None:
                torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm
    norm = nn.utils.get_total_norm(gradients)
    if limit is not None:
        nn.utils.clip_grads_with_norm_(with_gradient, limit, norm)
    return norm


def _alike(gradients: list[torch.Tensor]) -> bool:
    """Whether they are plain dense tensors of one device and dtype."""
    if not gradients:
        return False
    device, dtype = gradients[0].device, gradients[0].dtype
    if device.type not in ("cpu", "cuda"):
        return False
    return all(
        type(each) is torch.Tensor and each.device == device and each.dtype == dtype and each.layout is torch.strided
        for each in gradients
    )
