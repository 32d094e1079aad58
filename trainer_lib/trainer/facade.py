"""`trainer.accelerator`: what overridden steps of older code call, served by the strategy.

Our own loop does not go through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from trainer_lib.trainer.base import TrainerBase


class AcceleratorState:
    """The part of `accelerate.state.AcceleratorState` that is asked for: the plugins, None for those not in use."""

    def __init__(self, plugins: Mapping[str, Any]) -> None:
        self.fsdp_plugin: Any = plugins.get("fsdp_plugin")
        self.deepspeed_plugin: Any = plugins.get("deepspeed_plugin")


class AcceleratorFacade:
    """The part of `accelerate.Accelerator` that a subclass of the Trainer uses."""

    def __init__(self, trainer: TrainerBase) -> None:
        self._trainer = trainer

    @property
    def state(self) -> AcceleratorState:
        """The plugins in use."""
        return AcceleratorState(self._trainer.strategy.plugins)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._trainer.device

    @property
    def num_processes(self) -> int:
        """Ranks in all."""
        return self._trainer.comm.world_size

    @property
    def process_index(self) -> int:
        """This rank."""
        return self._trainer.comm.rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._trainer.comm.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self._trainer.comm.local_rank == 0

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Backpropagate the loss as it is given: scaling for accumulation is the caller's, as in the newest Trainer."""
        scaler = self._trainer.precision.scaler
        self._trainer.strategy.backward(loss if scaler is None else scaler.scale(loss))

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: int = 2) -> torch.Tensor:
        """Clip gradients to an L2 norm; returns the norm before."""
        return self._trainer.strategy.clip_grad_norm(list(parameters), max_norm)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The user's own module."""
        return self._trainer.strategy.unwrap(model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The whole model's state; where it is divided, with values on rank 0 only. Every rank calls it."""
        return self._trainer.strategy.model_state(model)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, concatenated along the first dimension; the shapes are equal on all ranks."""
        if self.num_processes == 1:
            return tensor
        gathered = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        torch.distributed.all_gather(gathered, tensor.contiguous())
        return torch.cat([part.reshape(-1) if part.ndim == 0 else part for part in gathered])

    gather_for_metrics = gather

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision's context."""
        return self._trainer.precision.autocast()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gradients stay local inside."""
        return self._trainer.strategy.no_sync(model)

    def wait_for_everyone(self) -> None:
        """Barrier."""
        self._trainer.comm.barrier()

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-step under way is the last of its step."""
        run = self._trainer._run
        return run is None or run.syncs
