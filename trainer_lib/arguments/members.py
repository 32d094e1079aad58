"""What `TrainingArguments` answers besides its fields: ranks, device, batch sizes, log levels.

Ranks come from the environment that a launcher sets. The device and the barrier come from `trainer_lib.distributed`,
which is imported when asked for: arguments live below it, and stay free of torch.
"""

from __future__ import annotations

import importlib
import logging
import math
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from trainer_lib.arguments import environment
from trainer_lib.arguments.enums import ParallelMode
from trainer_lib.arguments.groups import ArgumentGroups

if TYPE_CHECKING:
    import torch

_LEVELS = {
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class ArgumentMembers(ArgumentGroups):
    """Derived values; none of them is stored."""

    default_optim: ClassVar[str] = "adamw_torch_fused"

    @property
    def world_size(self) -> int:
        """Processes that train together, as the launcher's environment says; else 1."""
        return environment.read().world_size

    @property
    def process_index(self) -> int:
        """This process's number in the whole job, as the launcher's environment says; else 0."""
        return environment.read().rank

    @property
    def local_process_index(self) -> int:
        """This process's number on its machine, as the launcher's environment says; else `local_rank`; else 0."""
        found = environment.read()
        return found.local_rank if found is not environment.ALONE else max(self.local_rank, 0)

    @property
    def device(self) -> torch.device:
        """The device this process trains on."""
        chosen: torch.device = _distributed().choose_device(use_cpu=self.use_cpu)
        return chosen

    @property
    def n_gpu(self) -> int:
        """Accelerators this process uses: 1, or 0 on the CPU. Several are used by several processes."""
        return 0 if self.device.type == "cpu" else 1

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether several processes train together."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model; override to return False in a subclass that places it itself."""
        return True

    @property
    def train_batch_size(self) -> int:
        """Samples that this process trains on at a time."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples that this process evaluates at a time."""
        return self.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as the type that torch.distributed takes."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def is_torch_greater_or_equal_than_2_8(self) -> bool:
        """Whether the installed torch is 2.8 or newer (found without importing it)."""
        major, minor = metadata.version("torch").split(".")[:2]
        return (int(major), int(minor)) >= (2, 8)

    @property
    def should_log(self) -> bool:
        """Whether this process writes the main log."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes files that are written once."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    def get_process_log_level(self) -> int:
        """The `logging` level of this process: `log_level` on the main one, `log_level_replica` on the others.

        "passive" is info on the main process and warning on the others.
        """
        if self.should_log:
            return _LEVELS.get(self.log_level, logging.INFO)
        return _LEVELS.get(self.log_level_replica, logging.WARNING)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of warm-up: `warmup_steps`, or that share of `num_training_steps`, rounded up."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """A context that the main process enters alone, while the others wait until it has left.

        Args:
            local: wait for the main process of this machine; False = of the whole job (for shared disks).
            desc: what is done, for the log.
        """
        logging.getLogger(__name__).debug("%s: waiting for the main process to do %s", self.process_index, desc)
        context: AbstractContextManager[None] = _distributed().main_process_first(self, local=local)
        return context


def _distributed() -> Any:
    return importlib.import_module("trainer_lib.distributed")
