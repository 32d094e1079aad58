"""Where a divided model's processes, tensors and values are: mesh, device, formats; building without values."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from trainer_lib.arguments.fsdp.fsdp_config import FsdpSettings
from trainer_lib.distributed import Communicator
from trainer_lib.errors import ConfigError

_log = logging.getLogger(__name__)


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers: those that a state_dict leaves out have values too."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def build_mesh(settings: FsdpSettings, device: torch.device, comm: Communicator) -> DeviceMesh:
    """Processes in rows that hold the same, and columns that share one copy."""
    world = comm.world_size
    if settings.mode in ("full_shard", "shard_grad_op"):
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    group = 1
    if settings.mode != "no_shard":
        group = settings.hybrid_group or comm.local_world_size
        if world % group:
            raise ConfigError(
                f"does not divide {world} processes into groups of one size.",
                field="fsdp_config.hybrid_group_size",
                value=group,
                remedy="Give a divisor of the number of processes.",
            )
        if group == world:
            _log.warning("FSDP %s with one group of processes is %s.", settings.mode, "full_shard, without copies")
    return init_device_mesh(device.type, (world // group, group), mesh_dim_names=("replicate", "shard"))


def mixed_precision(settings: FsdpSettings) -> MixedPrecisionPolicy:
    """What parameters are gathered and gradients exchanged in, as torch wants it."""
    param, reduce = settings.param_dtype, settings.reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=None if param is None else getattr(torch, param),
        reduce_dtype=None if reduce is None else getattr(torch, reduce),
    )


def offload_policy(settings: FsdpSettings, device: torch.device) -> OffloadPolicy:
    """Whether rows live on the host, as torch wants it."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.offload else OffloadPolicy()


def restore_class_name(part: nn.Module) -> None:
    """torch puts a class of its own in front of the module's: let it go by the user's name, as configurations will."""
    made, own = type(part), type(part).__mro__[2]
    made.__name__, made.__qualname__, made.__module__ = own.__name__, own.__qualname__, own.__module__


def place_tensors(model: nn.Module, ignored: Collection[nn.Parameter], device: torch.device, *, offload: bool) -> None:
    """Memory for what had no values, and the device for what sharding left where it was."""
    if any(tensor.is_meta for tensor in all_tensors(model).values()):
        model.to_empty(device="cpu" if offload else device)
    with torch.no_grad():
        for parameter in ignored:
            parameter.data = parameter.data.to(device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def build_without_values(make: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on "meta": shapes and no memory. `from_pretrained` of transformers has its own context for it."""
    try:
        with torch.device("meta"):
            return make()
    except RuntimeError as error:
        kind: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
        if kind is None or "from_pretrained" not in str(error):
            raise
    load = kind.__dict__["from_pretrained"]

    def shapes(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = load.__func__(cls, *args, **{**kwargs, "device_map": "meta"})
        model.__dict__.pop("hf_device_map", None)  # it is not spread over devices
        return model

    kind.from_pretrained = classmethod(shapes)
    try:
        return make()
    finally:
        kind.from_pretrained = load
