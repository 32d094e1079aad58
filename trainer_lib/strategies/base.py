"""What the trainer asks of a strategy. A backend's name stands in its own file only.

The trainer sequences, a strategy computes: were the trainer to ask "is this X?", this protocol would lack a method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from trainer_lib.distributed import Communicator
from trainer_lib.precision import Precision, PrecisionSettings


class StrategySettings(Protocol):
    """The arguments strategies read (`TrainingArguments` has them)."""

    ddp_find_unused_parameters: bool | None
    ddp_bucket_cap_mb: int | None
    ddp_broadcast_buffers: bool | None
    ddp_static_graph: bool | None
    gradient_checkpointing: bool | None


class Strategy(Protocol):
    """One way of training a model. Tensors it returns stay on the device: nothing here waits for it.

    Attributes:
        name: as checkpoints and logs say it.
        places_model: whether it moves the model to the device itself, piece by piece: the whole may not fit there.
        forward_communicates: whether ranks compute a forward together; one without a batch then computes along.
        skips_micro_steps: whether a micro-step may be left out where no other rank waits for it.
        plugins: what `trainer.accelerator.state` offers of it to code written for accelerate, by accelerate's name.
    """

    name: str
    device: torch.device
    comm: Communicator
    places_model: bool
    forward_communicates: bool
    skips_micro_steps: bool
    plugins: Mapping[str, Any]

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model that `make` builds; on some ranks perhaps without values, which `setup_model` then gives it."""

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError for a model that cannot be trained this way."""

    def setup_model(self, model: nn.Module) -> nn.Module:
        """The module whose forward trains: `model` itself or a wrapper around it, on the device."""

    def precision(self, args: PrecisionSettings) -> Precision:
        """How forward passes are computed, and how gradients are scaled."""

    def schedule(self, optimizer: torch.optim.Optimizer, num_training_steps: int) -> Any:
        """The learning-rate schedule that this way of training brings along; None leaves it to the arguments."""

    def settle(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module and the optimizer to train with, from what `setup_model` gave and an optimizer over it."""

    def release(self) -> None:
        """Let go of what `settle` made: another training begins, or none."""

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Let an optimizer that the user made before `setup_model` hold the parameters that the model has now."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module again."""

    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        """The module to predict with. Unless `forward_communicates`, its forward must not: ranks may have unequally
        many batches. `alone`: it must not in any case; ConfigError when it cannot do without."""

    def after_inference(self, model: nn.Module) -> None:
        """Predicting is over for now: let go of what only that needed."""

    def named_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer holds, by the names they have in the user's module."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around micro-steps whose gradients are only accumulated: nothing is exchanged."""

    def sync_gradients(self, model: nn.Module) -> None:
        """Exchange gradients that were all computed under `no_sync`, as a backward outside of it would have."""

    def backward(self, loss: torch.Tensor, seed: torch.Tensor | None = None) -> None:
        """Backpropagate `loss`; `seed` is the gradient of the objective with respect to it (1 when None)."""

    def numel(self, parameter: nn.Parameter) -> int:
        """Elements of the whole parameter."""

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Global L2 norm of the gradients, 0-dim on the device; scales them to `max_norm` when that is positive."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, a new tensor on the same device."""

    def local_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's parameters and persistent buffers by name, without wrappers' prefixes; divided ones as they are.

        Tied weights: each of their names, with the same values (and the same object, where they are divided).
        """

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The same, whole: divided ones on the CPU of rank 0, elsewhere without values (on "meta").

        Gathered when asked for: every rank asks for the same names in the same order.
        """

    def model_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All of `local_state`, gathered. Collective."""

    def checkpoint_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a checkpoint is written from: divided where every rank writes its part, else gathered. Collective."""

    def load_model_state(
        self, model: nn.Module, state: Mapping[str, torch.Tensor], *, keep: Collection[str] = ()
    ) -> None:
        """Copy `state` into the model; tensors named in `keep` may be absent from it and stay as they are. Collective.

        Raises ConfigError naming missing, unexpected or reshaped tensors.
        """

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
