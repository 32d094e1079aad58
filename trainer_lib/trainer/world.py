"""This process among the others: its rank, its device, and the ranks that it saves with."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import BatchSettings
from trainer_lib.arguments.configs.parallelism_config import Grid, mesh_sizes
from trainer_lib.checkpoint.catalogue import is_resumable, list_checkpoints
from trainer_lib.checkpoint.layout import checkpoint_name
from trainer_lib.distributed import communicator as distributed
from trainer_lib.distributed.communicator import Communicator, run_on_all_ranks
from trainer_lib.errors import DataError
from trainer_lib.evaluation import nested
from trainer_lib.storage import Store
from trainer_lib.storage.commit import verify_files


class NodeView:
    """The ranks of one machine, by their local numbers, for `save_on_each_node`: checkpoints are on its local disk.

    They write and read one folder together, with the machine's main process as first rank. Every method is collective
    over *all* machines; a failure on one is raised on all.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank = self.local_rank = comm.local_rank
        self.world_size = self.local_world_size = comm.local_world_size
        self.data_parallel = comm.data_parallel
        # What these say concerns all machines.
        self.barrier, self.agree, self.any, self.any_later = comm.barrier, comm.agree, comm.any, comm.any_later
        self.sum_ints, self.sum_tensor, self.gather_tensor = comm.sum_ints, comm.sum_tensor, comm.gather_tensor
        self._node = str(comm.rank - comm.local_rank)  # the first rank of a machine stands for it

    def gather_json(self, obj: Any) -> list[Any] | None:
        """Every local rank's object on the machine's main process; None elsewhere."""
        everyone = self._comm.broadcast_json(self._comm.gather_json([self._node, self.rank, obj]))
        mine = sorted(((rank, held) for node, rank, held in everyone if node == self._node), key=lambda pair: pair[0])
        return [held for _, held in mine] if self.rank == 0 else None

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Every local rank's bytes on the machine's main process; None elsewhere."""
        # As text, because every message of this view is JSON.
        gathered = self.gather_json(data.hex())
        return None if gathered is None else [bytes.fromhex(text) for text in gathered]

    def broadcast_json(self, obj: Any) -> Any:
        """The object of the machine's main process on its ranks."""
        gathered = self._comm.gather_json([self._node, obj] if self.rank == 0 else None)
        everyone = self._comm.broadcast_json(gathered)
        return next(message[1] for message in everyone if message is not None and message[0] == self._node)

    def twin(self, timeout_s: float) -> Communicator:
        """A view like this one, over connections of its own."""
        return NodeView(self._comm.twin(timeout_s))


def newest_common(root: Store, comm: Communicator, *, skip: Collection[str] = ()) -> str | None:
    """The URL, on this machine, of the newest checkpoint that is whole on every machine; None without one. Collective.

    Sizes are compared here, digests when the checkpoint is loaded; names in `skip` are ignored.
    """

    def steps() -> list[int] | None:
        if comm.local_rank != 0:
            return None
        found = [info for info in list_checkpoints(root) if info.name not in skip]
        # As on one disk, one that holds only a model beats none: the error can then name what is missing.
        infos = [info for info in found if is_resumable(info)] or found
        return [info.step for info in infos if not verify_files(root.child(info.name), info.commit, digests=False)]

    found = comm.broadcast_json(comm.gather_json(run_on_all_ranks(comm, steps)))
    # A machine takes part by its first rank; the others answered None.
    common = set.intersection(*(set(own) for own in found if own is not None))
    return root.child(checkpoint_name(max(common))).url if common else None


def _bytes_of(leaf: Any) -> bytes:
    """The bytes of a tensor ``[...]``, a text or a number; empty for other objects, whose texts may be addresses."""
    if isinstance(leaf, torch.Tensor):
        values = leaf.detach().cpu().contiguous()
        return f"{values.dtype}{list(values.shape)}".encode() + values.reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr(leaf).encode() if isinstance(leaf, str | int | float) else b""


T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's device and its group."""

    comm: distributed.Communicator  # all ranks
    save_group: distributed.Communicator  # those that share output_dir; of one machine with `save_on_each_node`
    device: torch.device
    batching: BatchSettings  # what `accelerator_config` asks for
    mesh: Grid  # the coordinates of all processes; the groups along it are the strategy's

    @classmethod
    def form(cls, args: TrainingArguments) -> World:
        """Join the process group that the environment describes; a single process has a world of one rank."""
        batching = BatchSettings.of(args.accelerator_config)
        formed = torch.distributed.is_available() and torch.distributed.is_initialized()
        # Before the group is formed: afterwards it cannot be seen who formed it.
        batching.check_state(world_size=distributed.ranks_from_environment().world_size, formed=formed)
        comm = distributed.init(args)
        sizes = mesh_sizes(args, world_size=comm.world_size, local_world_size=comm.local_world_size)
        mesh = Grid(sizes, comm.rank)
        if mesh.shares_samples:
            comm = copy.copy(comm)  # another Trainer of this process may have another layout
            comm.data_parallel = distributed.DataParallel(mesh.data_rank, mesh.data_size)
        save_group: distributed.Communicator = NodeView(comm) if args.save_on_each_node else comm
        return cls(comm, save_group, distributed.choose_device(use_cpu=args.use_cpu), batching, mesh)

    def train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of one micro-batch of this process, as the arguments give it."""
        # The ranks that share the data, which need not be all ranks.
        shares = self.comm.data_parallel.size
        return self.batching.share(args.train_batch_size, shares, field="per_device_train_batch_size")

    def eval_batch_size(self, args: TrainingArguments) -> int:
        """Samples that this process evaluates at a time."""
        shares = self.comm.data_parallel.size
        return self.batching.share(args.eval_batch_size, shares, field="per_device_eval_batch_size")

    def check_samples(self, batches: list[Any]) -> None:
        """Raise DataError, on every rank, where ranks of one data coordinate have different samples. Collective."""
        if not self.mesh.shares_samples:
            return
        digest = hashlib.sha256()
        nested.map_tree(lambda leaf: digest.update(_bytes_of(leaf)), batches)
        digests = self.comm.broadcast_json(self.comm.gather_json(digest.hexdigest()))
        for rank, own in enumerate(digests):
            first = rank - rank % distributed.sharers(self.comm)
            if own != digests[first]:
                raise DataError(
                    "Two processes that compute parts of the same layers or rows have other samples: "
                    f"{self.mesh.describe(first)} and {self.mesh.describe(rank)}.",
                    field="train_dataset",
                    value=f"ranks {first} and {rank}",
                    remedy="Make the samples follow from the seed alone: not from the rank, the time or the machine.",
                )

    def run_on_main_process(self, work: Callable[[], T]) -> T | None:
        """`work()` on rank 0, or with `save_on_each_node` on one rank of each machine; None on the others.

        Collective. Every rank raises what `work` raises on any of them.
        """
        return run_on_all_ranks(self.comm, lambda: work() if self.save_group.rank == 0 else None)
