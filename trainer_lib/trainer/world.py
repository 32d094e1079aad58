"""This process among the others: its rank, its device, and the ranks that it saves with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainer_lib import distributed
from trainer_lib.agreement import run_on_all_ranks
from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.accelerator_config import BatchSettings
from trainer_lib.trainer.node_view import NodeView

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process computes, and with which others.

    Attributes:
        comm: all ranks.
        save_group: the ranks that share output_dir: all of them or, with `save_on_each_node`, those of this machine.
        device: the device of this process.
        batching: what `accelerator_config` asks for.
    """

    comm: distributed.Communicator
    save_group: distributed.Communicator
    device: torch.device
    batching: BatchSettings

    @classmethod
    def form(cls, args: TrainingArguments) -> World:
        """Join the process group that the environment describes; a single process has a world of one rank."""
        batching = BatchSettings.of(args.accelerator_config)
        formed = torch.distributed.is_available() and torch.distributed.is_initialized()
        # Before the group is formed: afterwards it cannot be seen who formed it.
        batching.check_state(world_size=distributed.ranks_from_environment().world_size, formed=formed)
        comm = distributed.init(args)
        save_group: distributed.Communicator = NodeView(comm) if args.save_on_each_node else comm
        return cls(comm, save_group, distributed.choose_device(use_cpu=args.use_cpu), batching)

    def train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of one micro-batch of this process, as the arguments give it."""
        # The ranks that share the data, which need not be all ranks.
        shares = self.comm.data_parallel.size
        return self.batching.share(args.train_batch_size, shares, field="per_device_train_batch_size")

    def eval_batch_size(self, args: TrainingArguments) -> int:
        """Samples that this process evaluates at a time."""
        shares = self.comm.data_parallel.size
        return self.batching.share(args.eval_batch_size, shares, field="per_device_eval_batch_size")

    def run_on_main_process(self, work: Callable[[], T]) -> T | None:
        """`work()` on rank 0, or with `save_on_each_node` on one rank of each machine; None on the others.

        Collective. Every rank raises what `work` raises on any of them.
        """
        return run_on_all_ranks(self.comm, lambda: work() if self.save_group.rank == 0 else None)
