"""The mesh, the devices and the number formats of a sharded model, and how it is built without values."""

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
    """Return parameters and all buffers by name, of any shape `[...]`; also buffers that a state_dict leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def build_mesh(settings: FsdpSettings, device: torch.device, comm: Communicator) -> DeviceMesh:
    """Return the mesh `[replicate, shard]` of processes, or `[shard]` where all of them share one copy.

    Raises:
        ConfigError: the processes cannot be divided into groups of the given size.
    """
    world = comm.world_size
    if settings.mode in ("full_shard", "shard_grad_op"):
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    group = 1
    if settings.mode != "no_shard":
        group = settings.hybrid_group or comm.local_world_size
        if world % group:
            raise ConfigError(
                f"This group size does not divide {world} processes evenly.",
                field="fsdp_config.hybrid_group_size",
                value=group,
                remedy="Give a divisor of the number of processes.",
            )
        if group == world:
            _log.warning("FSDP %s has a single group of processes, so it is full_shard without copies.", settings.mode)
    return init_device_mesh(device.type, (world // group, group), mesh_dim_names=("replicate", "shard"))


def mixed_precision(settings: FsdpSettings) -> MixedPrecisionPolicy:
    """Return torch's policy for the formats in which parameters are gathered and gradients exchanged."""
    param, reduce = settings.param_dtype, settings.reduce_dtype
    return MixedPrecisionPolicy(
        param_dtype=None if param is None else getattr(torch, param),
        reduce_dtype=None if reduce is None else getattr(torch, reduce),
    )


def offload_policy(settings: FsdpSettings, device: torch.device) -> OffloadPolicy:
    """Return torch's policy for keeping the rows on the CPU or on the device."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.offload else OffloadPolicy()


def restore_class_name(part: nn.Module) -> None:
    """Give the class that torch put in front of the module's the name of the user's, which configurations use."""
    # torch makes the class from FSDPModule and the user's: these are the second and third entry of its MRO.
    made, own = type(part), type(part).__mro__[2]
    made.__name__, made.__qualname__, made.__module__ = own.__name__, own.__qualname__, own.__module__


def place_tensors(model: nn.Module, ignored: Collection[nn.Parameter], device: torch.device, *, offload: bool) -> None:
    """Allocate tensors that had no values, and move those that are not sharded to the device."""
    if any(tensor.is_meta for tensor in all_tensors(model).values()):
        model.to_empty(device="cpu" if offload else device)
    with torch.no_grad():
        for parameter in ignored:
            # .data keeps the parameter object, which the optimizer may hold already.
            parameter.data = parameter.data.to(device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def build_without_values(make: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on "meta": shapes without memory.

    `from_pretrained` of transformers refuses torch's context for that, and gets `device_map="meta"` instead.
    """
    try:
        with torch.device("meta"):
            return make()
    except RuntimeError as error:
        # Not imported here: a model that needs it has imported it.
        kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        if kind is None or "from_pretrained" not in str(error):
            raise
    load = kind.__dict__["from_pretrained"]

    def shapes(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = load.__func__(cls, *args, **{**kwargs, "device_map": "meta"})
        model.__dict__.pop(
            "hf_device_map", None
        )  # the model is not spread over devices, though this attribute would claim it
        return model

    kind.from_pretrained = classmethod(shapes)
    try:
        return make()
    finally:
        kind.from_pretrained = load
