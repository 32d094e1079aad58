"""The derived values of `TrainingArguments`: ranks, device, batch sizes, log levels.

Ranks come from the environment that a launcher sets. The device and the barrier come from
`trainer_lib.distributed.communicator`, which is imported on demand, because it stands above the arguments and imports
torch.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from trainer_lib.arguments import environment
from trainer_lib.arguments.configs import deepspeed_config, fsdp_config
from trainer_lib.arguments.enums import ParallelMode
from trainer_lib.arguments.groups import ArgumentGroups
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    import torch

# "detail" is transformers' name: debug, with file and line.
_LEVELS = {"DETAIL": logging.DEBUG, **logging.getLevelNamesMapping()}


class ProcessState:
    """The part of `accelerate.PartialState` that code reads from the arguments.

    Making one of accelerate's would join a process group, select a device and set variables; this one only looks.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The members of `_PROCESS`."""

    def __init__(self, args: ArgumentMembers) -> None:
        self._args = args

    @property
    def distributed_type(self) -> str:
        """The kind of parallelism, by accelerate's names: "NO", "MULTI_GPU", "DEEPSPEED", "FSDP", …"""
        if self._args.deepspeed:
            return "DEEPSPEED"
        if self._args.fsdp:
            return "FSDP"
        if not self.use_distributed:
            return "NO"
        return {"cuda": "MULTI_GPU"}.get(self.device.type, f"MULTI_{self.device.type.upper()}")

    def wait_for_everyone(self) -> None:
        """Wait until every process is here. Collective; without effect before the Trainer has formed the group."""
        if self.use_distributed and _group_is_formed():
            importlib.import_module("torch.distributed").barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that the first process of the job enters first."""
        return self._args.main_process_first(local=False)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that the first process of each machine enters first."""
        return self._args.main_process_first(local=True)

    def print(self, *values: Any, **settings: Any) -> None:
        """Print on the first process of each machine."""
        if self.is_local_main_process:
            print(*values, **settings)  # noqa: T201 - what it is for


#: Member of `accelerate.PartialState` that is read off the arguments.
_PROCESS: Mapping[str, Callable[[ProcessState], Any]] = {
    "num_processes": lambda state: state._args.world_size,
    "process_index": lambda state: state._args.process_index,
    "local_process_index": lambda state: state._args.local_process_index,
    "device": lambda state: state._args.device,
    "use_distributed": lambda state: state._args.world_size > 1,
    "is_main_process": lambda state: state._args.process_index == 0,
    "is_local_main_process": lambda state: state._args.local_process_index == 0,
    "is_last_process": lambda state: state._args.process_index == state._args.world_size - 1,
    # The processes can communicate, which a single one always can.
    "initialized": lambda state: state._args.world_size == 1 or _group_is_formed(),
}
for _name, _read in _PROCESS.items():
    setattr(ProcessState, _name, property(_read))


@dataclass(frozen=True)
class ZeroPlugin:
    """The resolved configuration, read-only: `trainer.accelerator.state.deepspeed_plugin`, for code of accelerate."""

    zero_stage: int  # 0, 1, 2 or 3
    # Returns DeepSpeed's configuration, without sizes that follow from the model.
    read_config: Callable[[], dict[str, Any]]

    @property
    def zero3_init_flag(self) -> bool:
        """Whether models are sharded while they are built."""
        return self.zero_stage == 3

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are sharded while they are built, as a method of accelerate's name."""
        return self.zero3_init_flag

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration, without sizes that follow from the model."""
        return self.read_config()


class ArgumentMembers(ArgumentGroups):
    """Values that follow from the arguments and the environment; none of them is stored."""

    default_optim: ClassVar[str] = "adamw_torch_fused"
    is_torch_greater_or_equal_than_2_8: ClassVar[bool] = True  # 2.11 is the oldest that is installed
    #: Fields that a command line may give as JSON; a subclass adds its own.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    ]

    @property
    def world_size(self) -> int:
        """Number of processes that train together, from the launcher's environment; 1 without a launcher."""
        return environment.read().world_size

    @property
    def process_index(self) -> int:
        """Number of this process in the whole job, from the launcher's environment; 0 without a launcher."""
        return environment.read().rank

    @property
    def local_process_index(self) -> int:
        """Number of this process on its machine, from the launcher's environment; without one, `local_rank` or 0."""
        found = environment.read()
        # -1 is the default of `local_rank`, and means that no launcher passed one.
        return found.local_rank if found is not environment.ALONE else max(self.local_rank, 0)

    @property
    def device(self) -> torch.device:
        """The device that this process trains on."""
        chosen: torch.device = _distributed().choose_device(use_cpu=self.use_cpu)
        return chosen

    @property
    def _setup_devices(self) -> torch.device:
        """The device, by the name that transformers' own Trainer reads."""
        return self.device

    @property
    def _no_sync_in_gradient_accumulation(self) -> bool:
        """True where gradients may stay on their rank between micro-batches, which DeepSpeed does not allow."""
        return self.deepspeed is None

    @property
    def distributed_state(self) -> ProcessState:
        """This process among the others, by the names of `accelerate.PartialState`. Reading it starts nothing."""
        return ProcessState(self)

    @property
    def deepspeed_plugin(self) -> Any:
        """The resolved configuration of DeepSpeed, by the names of accelerate's plugin; None without `deepspeed`."""
        if self.deepspeed is None:
            return None
        return ZeroPlugin(deepspeed_config.plan(self).stage, lambda: deepspeed_config.read(self.deepspeed))

    @property
    def fsdp_plugin_args(self) -> dict[str, Any] | None:
        """The settings of accelerate's FSDP plugin that mean what `fsdp` and `fsdp_config` do; None without `fsdp`."""
        settings = fsdp_config.read_settings(self)
        return None if settings is None else fsdp_config.as_plugin_settings(settings)

    @property
    def n_gpu(self) -> int:
        """Number of accelerators that this process uses: 1, or 0 on the CPU. More of them need more processes."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        """DISTRIBUTED when several processes train together, else NOT_PARALLEL."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def place_model_on_device(self) -> bool:
        """True when the Trainer moves the model to its device; a subclass that places it itself returns False."""
        return True

    @property
    def train_batch_size(self) -> int:
        """Number of samples that this process trains on at a time."""
        # The reference multiplies by the devices of the process; here a process uses one.
        return int(self.per_device_train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Number of samples that this process evaluates at a time."""
        return self.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` (seconds) as the type that torch.distributed takes."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def should_log(self) -> bool:
        """True for the process that writes the main log."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """True for the process that writes the files of which there is one."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    def get_process_log_level(self) -> int:
        """The `logging` level of this process: `log_level` on the main one, else `log_level_replica`.

        "passive" is the level that TRANSFORMERS_VERBOSITY names, else info on the main process and warning on others.
        """
        level, usual = (self.log_level, logging.INFO) if self.should_log else (self.log_level_replica, logging.WARNING)
        passive = _LEVELS.get(os.environ.get("TRANSFORMERS_VERBOSITY", "").upper(), usual)
        return _LEVELS.get(level.upper(), passive)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the optimizer steps of the warm-up: `warmup_steps`, or that share of all steps, rounded up."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Return a context that the main process enters first; the others enter when it has left.

        Args:
            local: the main process of each machine enters first; False = that of the whole job, for shared disks.
            desc: the work that is done inside, for the log.
        """
        logging.getLogger(__name__).debug("%s: waiting for the main process to do %s", self.process_index, desc)
        context: AbstractContextManager[None] = _distributed().main_process_first(self, local=local)
        return context


# By name: the module stands above the arguments and imports torch, so no import statement may name it here.
def _distributed() -> Any:
    return importlib.import_module("trainer_lib.distributed.communicator")


def fill_accelerate_state(args: ArgumentMembers) -> None:
    """Fill in accelerate's state where it is loaded and empty and this process trains alone: its loggers need it."""
    known = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    with contextlib.suppress(ConfigError):  # about the launcher's variables; the Trainer raises it
        if known is None or known._shared_state or args.world_size > 1:
            return
        known._shared_state.update(
            _cpu=args.device.type == "cpu",
            device=args.device,
            backend=None,
            debug=False,
            distributed_type=sys.modules["accelerate.state"].DistributedType.NO,
            fork_launched=False,
            num_processes=1,
            process_index=0,
            local_process_index=0,
        )


def _group_is_formed() -> bool:
    group = importlib.import_module("torch.distributed")
    return bool(group.is_available() and group.is_initialized())
