"""Replicas that average their gradients, by torch's own DistributedDataParallel."""

from __future__ import annotations

import inspect
import warnings
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import InfrastructureError
from trainer_lib.strategies.base import Strategy, require_trainable

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments


# Newer versions of torch renamed this argument, and warn about the old name.
_BUFFERS = "forward_sync_buffers"
if _BUFFERS not in inspect.signature(DistributedDataParallel.__init__).parameters:
    _BUFFERS = "broadcast_buffers"


class DdpStrategy(Strategy):
    """Every rank holds the whole model. Backward *averages* gradients, so the trainer scales the ranks' losses."""

    name = "ddp"

    def __init__(self, device: torch.device, comm: Communicator, args: TrainingArguments) -> None:
        super().__init__(device, comm)
        # As in transformers: models with unused parameters train, except where recomputation would break the search.
        find_unused = args.ddp_find_unused_parameters
        options = {
            "find_unused_parameters": not args.gradient_checkpointing if find_unused is None else find_unused,
            "bucket_cap_mb": args.ddp_bucket_cap_mb,
            _BUFFERS: args.ddp_broadcast_buffers,
            "static_graph": args.ddp_static_graph,
        }
        self._options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}

    @override
    def setup_model(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DistributedDataParallel, which copies the parameters and buffers of rank 0 to all ranks."""
        require_trainable(model)
        # torch warns once when the search finds nothing; the search was our choice, so the user cannot act on it.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        # torch wants None for a module on the CPU.
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, **self._options)

    @override
    def unwrap(self, model: nn.Module) -> nn.Module:
        return super().unwrap(model.module if isinstance(model, DistributedDataParallel) else model)

    @override
    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        # The wrapper broadcasts buffers in forward: ranks with different numbers of batches would wait for each other.
        return model.module if isinstance(model, DistributedDataParallel) else model

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        if not isinstance(model, DistributedDataParallel):
            raise InfrastructureError("The model in training is not the replicated one.", field="model_wrapped")
        return model.no_sync()

    @override
    def sync_gradients(self, model: nn.Module) -> None:
        """Average the gradients over ranks; a parameter that only some ranks used counts as zero on the others."""
        parameters = [param for param in model.parameters() if param.requires_grad]
        present = torch.tensor([param.grad is not None for param in parameters], dtype=torch.int32, device=self.device)
        used = self.comm.sum_tensor(present).tolist()
        gradients = []
        for parameter, count in zip(parameters, used, strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad.div_(self.comm.world_size))
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()
        if isinstance(model, DistributedDataParallel):
            model.require_forward_param_sync = True  # otherwise buffers would stay local from now on
