"""accelerate's process-wide state, filled in from the world and the engine instead of found out a second time.

`PartialState`, `AcceleratorState` and `GradientState` share one dictionary per process among all their instances. Built
by accelerate itself, they could form a process group, choose a device or set the number of threads. Filled in here,
they do none of that, and libraries that ask them get the Trainer's answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, TorchDynamoPlugin, parse_flag_from_env

from trainer_lib.errors import ConfigError
from trainer_lib.strategies.base import Strategy

if TYPE_CHECKING:
    from trainer_lib.trainer.engine import Engine
    from trainer_lib.trainer.world import World

#: Attribute of a prepared loader: the loader that was given to `prepare`.
ORIGINAL = "_trainflow_original"
_OURS = "_trainflow_filled"
#: accelerate's names of dimensions; those of experts are transformers'.
_MESH_NAMES = {"replicate": "dp_replicate", "shard": "dp_shard", "expert": "ep", "sequence": "sp", "tensor": "tp"}


def distributed_type(world: World, strategy: Strategy) -> Any:
    """accelerate's word for how the processes work together."""
    by_strategy = {"deepspeed": DistributedType.DEEPSPEED, "fsdp": DistributedType.FSDP}
    if strategy.name in by_strategy:
        return by_strategy[strategy.name]
    kind = world.device.type
    if world.comm.world_size == 1:
        return DistributedType.NO
    return DistributedType["MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"]


def parallelism_config(world: World) -> Any:
    """The sizes of the mesh as accelerate's ParallelismConfig; None where the processes are plain replicas."""
    sizes = world.mesh.sizes
    if world.mesh.size == sizes["replicate"]:
        return None
    config = ParallelismConfig()  # set afterwards: it refuses sizes that are served here
    config.dp_replicate_size, config.dp_shard_size = sizes["replicate"], sizes["shard"]
    config.tp_size, config.sp_size = sizes["tensor"], sizes["sequence"]
    return config


def device_mesh(strategy: Strategy) -> Any:
    """The mesh of a strategy under accelerate's names, on its groups; None where the processes are plain replicas."""
    mesh: Any = getattr(strategy, "mesh", None)
    if mesh is None or mesh.size == mesh.sizes["replicate"]:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    whole = mesh.along(*(name for name, size in mesh.sizes.items() if size > 1))
    groups = [whole.get_group(name) for name in whole.mesh_dim_names]
    names = tuple(_MESH_NAMES[name] for name in whole.mesh_dim_names)
    return DeviceMesh.from_group(groups, whole.device_type, mesh=whole.mesh, mesh_dim_names=names)


def precision_name(engine: Engine) -> str:
    """accelerate's word for the precision of forward passes: "no", "bf16" or "fp16"."""
    name = engine.precision.name
    return "no" if name == "fp32" else name


def process_facts(world: World, strategy: Strategy) -> dict[str, Any]:
    """The values of `PartialState`: this process among the others."""
    comm = world.comm
    formed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "_cpu": world.device.type == "cpu",
        "backend": torch.distributed.get_backend() if formed else None,
        "debug": parse_flag_from_env("ACCELERATE_DEBUG_MODE"),
        "device": world.device,
        "distributed_type": distributed_type(world, strategy),
        "fork_launched": parse_flag_from_env("FORK_LAUNCHED", 0),
        "local_process_index": comm.local_rank,
        "num_processes": comm.world_size,
        "process_index": comm.rank,
    }


def accelerator_facts(world: World, engine: Engine) -> dict[str, Any]:
    """The values of `AcceleratorState`: the facts of the process, the precision and the plugins in use."""
    plugins = engine.strategy.plugins
    return {
        **process_facts(world, engine.strategy),
        "_mixed_precision": precision_name(engine),
        "deepspeed_plugins": plugins.get("deepspeed_plugin"),
        "fsdp_plugin": plugins.get("fsdp_plugin"),
        "torch_tp_plugin": None,
        "parallelism_config": parallelism_config(world),
        "device_mesh": None,
        "dynamo_plugin": TorchDynamoPlugin(backend="no"),  # the engine compiles, so `prepare` never does
        _OURS: True,
    }


def publish_state(world: World, engine: Engine) -> None:
    """Fill in the state of this process. An `AcceleratorState` of an Accelerator that the user made stays as it is."""
    PartialState._shared_state.update(process_facts(world, engine.strategy))
    shared = AcceleratorState._shared_state
    if not shared or _OURS in shared:
        shared.clear()
        shared.update(accelerator_facts(world, engine))


def own_state(world: World, engine: Engine) -> Any:
    """An `AcceleratorState` of one Trainer alone: other Trainers of this process may have other precisions."""
    state = AcceleratorState.__new__(AcceleratorState)
    state.__dict__ = accelerator_facts(world, engine)
    return state


def unwrap(prepared: Any) -> Any:
    """The original of a prepared loader, optimizer or schedule; anything else as it is. Raises ConfigError."""
    if isinstance(prepared, AcceleratedOptimizer):
        return unwrap(prepared.optimizer)
    if isinstance(prepared, AcceleratedScheduler):
        return unwrap(prepared.scheduler)
    # `type`, since a prepared loader claims the class of the loader in it.
    if not issubclass(type(prepared), DataLoaderShard | DataLoaderDispatcher):
        return prepared
    given = vars(prepared).get(ORIGINAL)
    if given is None and PartialState().num_processes > 1:
        what = "Another Accelerator has divided this loader among the processes, and the Trainer would divide it again."
        remedy = "Return the plain DataLoader, or call self.accelerator.prepare."
        raise ConfigError(what, field="get_train_dataloader", value=type(prepared).__name__, remedy=remedy)
    return prepared if given is None else given


class LiveGradientState(GradientState):  # type: ignore[misc]  # accelerate ships no types
    """`GradientState` whose `sync_gradients` is that of the training under way."""

    __slots__ = ("_weights",)  # the instance's dictionary is shared by all gradient states of the process

    def __init__(self, weights: Any) -> None:
        self._weights = weights
        super().__init__()

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are exchanged after the micro-batch under way; it can be set outside of training."""
        weights = self._weights()
        return bool(self.__dict__["sync_gradients"] if weights is None else weights.syncs)

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.__dict__["sync_gradients"] = value
