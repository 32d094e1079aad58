"""`trainer.accelerator`: what overridden steps of older code call, served by the strategy. Our own loop ignores it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals


class AcceleratorState:
    """The part of `accelerate.state.AcceleratorState` that subclasses read: the plugins, None for those not in use."""

    def __init__(self, plugins: Mapping[str, Any]) -> None:
        self.fsdp_plugin: Any = plugins.get("fsdp_plugin")
        self.deepspeed_plugin: Any = plugins.get("deepspeed_plugin")


class AcceleratorFacade:
    """The part of `accelerate.Accelerator` that a subclass of the Trainer uses."""

    def __init__(self, internals: Internals) -> None:
        self._internals = internals

    @property
    def state(self) -> AcceleratorState:
        """The plugins in use."""
        return AcceleratorState(self._internals.engine.strategy.plugins)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._internals.world.device

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self._internals.world.comm.world_size

    @property
    def process_index(self) -> int:
        """This rank."""
        return self._internals.world.comm.rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._internals.world.comm.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self._internals.world.comm.local_rank == 0

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Backpropagate a loss ``[]``; scaling it for accumulation is up to the caller, as in the newest Trainer."""
        self._internals.engine.backward(loss)

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: int = 2) -> torch.Tensor:
        """Clip gradients to an L2 norm. Returns the norm before clipping, ``[]`` on the device."""
        return self._internals.engine.strategy.clip_grad_norm(list(parameters), max_norm)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The user's own module."""
        return self._internals.engine.strategy.unwrap(model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The whole state, name -> tensor ``[...]``; of a sharded model with values on rank 0 only. Collective."""
        return self._internals.engine.strategy.model_state(model)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor ``[batch, ...]``, all of one shape, concatenated to ``[ranks * batch, ...]``."""
        if self.num_processes == 1:
            return tensor
        gathered = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        torch.distributed.all_gather(gathered, tensor.contiguous())
        # `cat` refuses 0-dim tensors.
        return torch.cat([part.reshape(-1) if part.ndim == 0 else part for part in gathered])

    gather_for_metrics = gather

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of mixed precision."""
        return self._internals.engine.precision.autocast()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which gradients stay on their rank."""
        return self._internals.engine.strategy.no_sync(model)

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here."""
        self._internals.world.comm.barrier()

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-step under way is the last of its step."""
        run = self._internals.run
        return run is None or run.weights.syncs
