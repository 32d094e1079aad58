"""Processes that train together: who they are, how they talk, which device each one uses.

Ranks come from the environment that a launcher sets (`trainer_lib.arguments.environment`); nothing here starts a
process. Control messages are JSON or raw bytes carried as ``uint8`` CPU tensors over gloo: no pickled collectives,
so bytes from a peer are never unpickled, and a control message never waits for an accelerator's queue.

Glossary: *rank* = number of a process in the whole job, *local rank* = its number on this machine, *world* = all ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

from trainer_lib import devices, exits
from trainer_lib.arguments import environment
from trainer_lib.arguments.environment import Ranks
from trainer_lib.errors import ConfigError, InfrastructureError, TrainflowError, from_record

_log = logging.getLogger(__name__)


class DistributedSettings(Protocol):
    """The arguments this module reads (`TrainingArguments` has them)."""

    use_cpu: bool
    ddp_backend: str | None
    ddp_timeout: int


class DataParallel(NamedTuple):
    """Which share of the data this process works on; batches, data order and loss weights follow it, not the world.

    Both are equal to the rank and the size of the world until several processes work on the same samples (tensor or
    context parallelism).

    Attributes:
        rank: number of this process's share, from 0.
        size: number of shares.
    """

    rank: int
    size: int


class Pending(Protocol):
    """A collective under way; `result` waits for it (host side only)."""

    def result(self) -> bool:
        """Whether the flag was true on any rank."""


@runtime_checkable
class Communicator(Protocol):
    """What ranks say to each other outside of the gradients. Every method is collective: all ranks call it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    data_parallel: DataParallel

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def gather_json(self, obj: Any) -> list[Any] | None:
        """Every rank's object, in rank order, on rank 0; None elsewhere."""

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes, in rank order, on rank 0; None elsewhere."""

    def broadcast_json(self, obj: Any) -> Any:
        """Rank 0's object on every rank (a copy that went through JSON, so equal everywhere)."""

    def agree(self, error: TrainflowError | None) -> None:
        """Every rank raises the first failing rank's error, or none does."""

    def any(self, flag: bool) -> bool:
        """True on every rank when it is true on one."""

    def any_later(self, flag: bool) -> Pending:
        """Like `any`, answered later: the message travels while the caller computes."""

    def sum_ints(self, values: list[int]) -> list[int]:
        """Element-wise sum over ranks of a few integers, without touching a device."""

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, as a new tensor on the same device."""

    def twin(self, timeout_s: float) -> Communicator:
        """The same ranks over connections of their own: for one other thread, whose messages mix with none of ours."""


class _Known:
    """An answer that needed no message."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def result(self) -> bool:
        return self._value


class SingleProcess:
    """A world of one: every message is a plain return."""

    rank = 0
    world_size = 1
    local_rank = 0
    local_world_size = 1
    data_parallel = DataParallel(0, 1)

    def barrier(self) -> None:
        """Nothing to wait for."""

    def gather_json(self, obj: Any) -> list[Any] | None:
        """A list of one, through JSON as with many ranks, so that types agree."""
        return [json.loads(json.dumps(obj))]

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """A list of one."""
        return [data]

    def broadcast_json(self, obj: Any) -> Any:
        """The object, through JSON as with many ranks, so that types agree."""
        return json.loads(json.dumps(obj))

    def agree(self, error: TrainflowError | None) -> None:
        """Raise the error, if there is one."""
        if error is not None:
            raise error

    def any(self, flag: bool) -> bool:
        """The flag itself."""
        return flag

    def any_later(self, flag: bool) -> Pending:
        """The flag itself."""
        return _Known(flag)

    def sum_ints(self, values: list[int]) -> list[int]:
        """The values themselves."""
        return list(values)

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return tensor.detach().clone()

    def twin(self, timeout_s: float) -> Communicator:
        """Itself: nothing is sent."""
        return self


class _Flag:
    """An all-reduce of one integer under way."""

    def __init__(self, flag: bool, group: dist.ProcessGroup | None) -> None:
        self._value = np.array([int(flag)], dtype=np.int64)
        self._work = dist.all_reduce(torch.from_numpy(self._value), op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._value[0])


class ProcessGroup:
    """A world of several processes over a `torch.distributed` group, the default one (its CPU side is always gloo)."""

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_rank, self.local_world_size = ranks.local_rank, ranks.local_world_size
        self.data_parallel = DataParallel(ranks.rank, ranks.world_size)
        self._ranks, self._group = ranks, group
        self._twin: Communicator | None = None
        self.waited_s = 0.0
        "Seconds in `sum_ints`, which ranks call in every step: mostly waiting for the others."

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.all_reduce(torch.zeros(1, dtype=torch.int64), group=self._group)

    def gather_json(self, obj: Any) -> list[Any] | None:
        """Every rank's object on rank 0; None elsewhere."""
        gathered = self.gather_bytes(json.dumps(obj).encode())
        return None if gathered is None else [json.loads(data) for data in gathered]

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes on rank 0; None elsewhere. Nothing is padded to the longest."""
        sizes = np.zeros(self.world_size, dtype=np.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(torch.from_numpy(sizes), group=self._group)
        if self.rank != 0:
            if data:
                dist.send(_to_tensor(data), dst=0, group=self._group)
            return None
        gathered = [data]
        for peer in range(1, self.world_size):
            buffer = torch.empty(int(sizes[peer]), dtype=torch.uint8)
            if buffer.numel():
                dist.recv(buffer, src=peer, group=self._group)
            gathered.append(buffer.numpy().tobytes())
        return gathered

    def broadcast_json(self, obj: Any) -> Any:
        """Rank 0's object on every rank."""
        data = json.dumps(obj).encode() if self.rank == 0 else b""
        size = np.array([len(data)], dtype=np.int64)
        dist.broadcast(torch.from_numpy(size), src=0, group=self._group)
        buffer = _to_tensor(data) if self.rank == 0 else torch.empty(int(size[0]), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self._group)
        return json.loads(buffer.numpy().tobytes())

    def agree(self, error: TrainflowError | None) -> None:
        """Every rank raises the first failing rank's error, or none does. One small message when nobody failed."""
        if not self.any(error is not None):
            return
        if error is not None and error.rank is None:
            error.rank = self.rank
        gathered = self.gather_json(error.to_record() if error is not None else None)
        first = None if gathered is None else next(record for record in gathered if record is not None)
        record = self.broadcast_json(first)
        if error is not None and record["rank"] == self.rank:
            raise error
        raise from_record(record)

    def any(self, flag: bool) -> bool:
        """True on every rank when it is true on one."""
        return self.any_later(flag).result()

    def any_later(self, flag: bool) -> Pending:
        """Like `any`, answered later."""
        return _Flag(flag, self._group)

    def sum_ints(self, values: list[int]) -> list[int]:
        """Element-wise sum over ranks, on the CPU side of the group."""
        begun = time.perf_counter()
        total = np.array(values, dtype=np.int64)
        dist.all_reduce(torch.from_numpy(total), group=self._group)
        self.waited_s += time.perf_counter() - begun
        return [int(value) for value in total]

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, as a new tensor on the same device."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total

    def twin(self, timeout_s: float) -> Communicator:
        """A gloo group of its own, formed at the first call (collective) and ended with the job."""
        if self._twin is None:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._twin = ProcessGroup(self._ranks, group)
        return self._twin


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


ranks_from_environment = environment.ranks
choose_device = devices.choose_device
mention_idle_gpus = devices.mention_idle_gpus

_current: Communicator | None = None
_owned = False  # whether the process group is ours to end


def init(args: DistributedSettings) -> Communicator:
    """Join the job the environment describes, once per process; later calls return the same communicator.

    A process group that the caller had formed is used as it is, and left alone by `shutdown`.
    Raises InfrastructureError when the peers cannot be reached within ``ddp_timeout`` seconds.
    """
    global _current, _owned
    if _current is not None:
        return _current
    if dist.is_available() and dist.is_initialized():
        ranks = ranks_from_environment()
        _current = ProcessGroup(Ranks(dist.get_rank(), dist.get_world_size(), ranks.local_rank, ranks.local_world_size))
        return _current
    ranks = ranks_from_environment()
    if ranks.world_size == 1:
        return SingleProcess()
    device = choose_device(use_cpu=args.use_cpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.source != "RANK":  # torch, and every library beside us, knows torchrun's variables only
        os.environ.update(ranks.variables())
    if ranks.master is not None and (interface := environment.interface_towards(ranks.master[0])) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    exits.prepare(shutdown)
    try:
        dist.init_process_group(_backend(args.ddp_backend, device), timeout=timedelta(seconds=args.ddp_timeout))
    except ValueError as error:
        raise ConfigError(
            f"The process group cannot be formed: {error}", field="MASTER_ADDR", remedy="Start through torchrun."
        ) from error
    except (RuntimeError, dist.DistError) as error:
        raise InfrastructureError(
            f"The {ranks.world_size} processes did not find each other: {error}",
            rank=ranks.rank,
            remedy="Check that all were started and that MASTER_ADDR and MASTER_PORT can be reached.",
        ) from error
    _current, _owned = ProcessGroup(ranks), True
    return _current


def form_alone(device: torch.device) -> None:
    """A process group of this process alone, for what needs one; `shutdown` ends it."""
    global _owned
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_backend(None, device), store=store, rank=0, world_size=1)
        _owned = True


def shutdown() -> None:
    """Leave the job: end the process group if it was formed here. Harmless when there is none."""
    global _current, _owned
    if _owned and dist.is_initialized():
        dist.destroy_process_group()
    _current, _owned = None, False


def current() -> Communicator:
    """The communicator of this process; a world of one before `init`."""
    return _current or SingleProcess()


@contextlib.contextmanager
def main_process_first(args: DistributedSettings, *, local: bool = True) -> Iterator[None]:
    """Rank 0 (of each machine when `local`) runs the block before the others: it fills a cache that they then read."""
    comm = init(args)
    first = (comm.local_rank if local else comm.rank) == 0
    if not first:
        comm.barrier()
    try:
        yield
    finally:
        if first:
            comm.barrier()


def _backend(asked: str | None, device: torch.device) -> str:
    """The backend string; whatever serves the device, gloo serves CPU tensors (control messages)."""
    if device.type == "cpu":
        if asked not in (None, "gloo", "mpi"):
            raise ConfigError("cannot serve CPU tensors.", field="ddp_backend", value=asked, remedy="Use gloo on CPU.")
        return asked or "gloo"
    return f"cpu:gloo,{device.type}:{asked or 'nccl'}" if asked != "gloo" else "gloo"
