"""`TrainingArguments.distributed_state`: this process among the others, by the names of `accelerate.PartialState`."""

from __future__ import annotations

import contextlib
import importlib
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from trainer_lib.arguments.members import ArgumentMembers


class ProcessState:
    """The part of `accelerate.PartialState` that code reads from the arguments.

    Making one of accelerate's would join a process group, select a device and set variables; this one only looks.
    """

    def __init__(self, args: ArgumentMembers) -> None:
        self._args = args

    @property
    def num_processes(self) -> int:
        """Number of processes that train together."""
        return self._args.world_size

    @property
    def process_index(self) -> int:
        """Number of this process in the whole job."""
        return self._args.process_index

    @property
    def local_process_index(self) -> int:
        """Number of this process on its machine."""
        return self._args.local_process_index

    @property
    def device(self) -> torch.device:
        """The device that this process trains on."""
        return self._args.device

    @property
    def distributed_type(self) -> str:
        """How the processes share the work, by accelerate's names: "NO", "MULTI_GPU", "DEEPSPEED", "FSDP", …"""
        if self._args.deepspeed:
            return "DEEPSPEED"
        if self._args.fsdp:
            return "FSDP"
        if not self.use_distributed:
            return "NO"
        return {"cuda": "MULTI_GPU"}.get(self.device.type, f"MULTI_{self.device.type.upper()}")

    @property
    def use_distributed(self) -> bool:
        """True when several processes train together."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """True for the first process of the job."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True for the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True for the last process of the job."""
        return self.process_index == self.num_processes - 1

    @property
    def initialized(self) -> bool:
        """True when the processes can communicate, which a single one always can."""
        return not self.use_distributed or _group_is_formed()

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


def fill_accelerate_state(args: ArgumentMembers) -> None:
    """Fill in accelerate's state of this process where accelerate is loaded and has none: its loggers need it.

    Only of a process that trains alone: the state of several comes with their process group.
    """
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
