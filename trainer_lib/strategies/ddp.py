"""Replicas that average their gradients: torch's own DistributedDataParallel, unwrapped by nothing else."""

from __future__ import annotations

import inspect
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_lib.distributed import Communicator
from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.strategies.base import StrategySettings
from trainer_lib.strategies.single import SingleStrategy

# Newer versions of torch have another name for it, and warn of the old one.
_BUFFERS = "forward_sync_buffers"
if _BUFFERS not in inspect.signature(DistributedDataParallel.__init__).parameters:
    _BUFFERS = "broadcast_buffers"


class DdpStrategy(SingleStrategy):
    """Every rank holds the whole model; backward averages gradients over ranks.

    Because gradients are *averaged*, the trainer scales each rank's loss by the world size.
    """

    name = "ddp"

    def __init__(self, device: torch.device, comm: Communicator, args: StrategySettings) -> None:
        super().__init__(device, comm)
        if not dist.is_initialized() or dist.get_world_size() < 2:
            raise InfrastructureError(
                "Replicated training was asked for, but no group of processes is formed.",
                remedy="Start through torchrun, which sets RANK and WORLD_SIZE.",
            )
        self._options = _options(args)

    def setup_model(self, model: nn.Module) -> nn.Module:
        """The model in DistributedDataParallel; rank 0's parameters and buffers are given to all."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                "No parameter of the model requires a gradient.",
                field="model",
                value=type(model).__name__,
                remedy="Unfreeze what is to be trained.",
            )
        # Said once by torch when the search finds nothing; the search was our choice, so the user cannot act on it.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, **self._options)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside."""
        return super().unwrap(model.module if isinstance(model, DistributedDataParallel) else model)

    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        """The module inside: the wrapper broadcasts buffers in forward, which would hang uneven ranks."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Keep gradients local for this micro-step."""
        if not isinstance(model, DistributedDataParallel):
            raise InfrastructureError("The model in training is not the replicated one.", field="model_wrapped")
        return model.no_sync()

    def sync_gradients(self, model: nn.Module) -> None:
        """Average them over ranks; a parameter used on some ranks only counts as zero on the others."""
        parameters = [each for each in model.parameters() if each.requires_grad]
        present = torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32, device=self.device)
        used = self.comm.sum_tensor(present).tolist()
        gradients = [_gradient(each) for each, count in zip(parameters, used, strict=True) if count]
        for gradient in gradients:
            gradient.div_(self.comm.world_size)
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()
        if isinstance(model, DistributedDataParallel):
            model.require_forward_param_sync = True  # else buffers, too, would stay local from now on

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        return self.comm.sum_tensor(tensor)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _options(args: StrategySettings) -> dict[str, Any]:
    # As the reference decides: models with unused parameters train, except where recomputation would break the search.
    find_unused = args.ddp_find_unused_parameters
    options: dict[str, Any] = {
        "find_unused_parameters": not args.gradient_checkpointing if find_unused is None else find_unused
    }
    if args.ddp_bucket_cap_mb is not None:
        options["bucket_cap_mb"] = args.ddp_bucket_cap_mb
    if args.ddp_broadcast_buffers is not None:
        options[_BUFFERS] = args.ddp_broadcast_buffers
    if args.ddp_static_graph is not None:
        options["static_graph"] = args.ddp_static_graph
    return options
