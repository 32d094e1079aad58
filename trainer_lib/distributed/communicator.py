"""Processes that train together: their ranks, their process group, and the control messages between them.

Ranks come from the environment that a launcher sets (`trainer_lib.arguments.environment`); nothing here starts a
process. Control messages are JSON or raw bytes, carried as ``uint8`` CPU tensors over gloo. No collective pickles, so
bytes from a peer are never unpickled, and a control message never waits for an accelerator's queue.

Glossary: *rank* = number of a process in the whole job, *local rank* = its number on this machine, *world* = all ranks,
*data parallel* = the ranks that work on different samples.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from trainer_lib.arguments import environment
from trainer_lib.arguments.environment import Ranks
from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError, InfrastructureError, TrainflowError, from_exception, from_record

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
_failed = False  # whether an exception that the program did not catch is ending it


def report_failures() -> None:
    """Report what ends this process to torchrun, besides the usual traceback. Later calls change nothing."""
    if getattr(sys.excepthook, "ours", False):
        return
    before = sys.excepthook

    def report(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        # First, so that the traceback is printed even if the report fails.
        before(cls, error, trace)
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # where torchrun reads it, which prints "exitcode 1" otherwise
            return
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # the handler records the exception that is being handled
        except BaseException:
            with contextlib.suppress(OSError):
                get_error_handler().record_exception(error)

    report.ours = True  # type: ignore[attr-defined]
    sys.excepthook = report


class DataParallel(NamedTuple):
    """This process's share of the data; batches, data order and loss weights follow it, not the world.

    Both are equal to the rank and the size of the world until several processes work on the same samples (tensor or
    context parallelism).
    """

    rank: int
    size: int


class Communicator(Protocol):
    """Messages between ranks other than gradients. Every method is collective: all ranks call it, in the same order.

    The bodies are those of a world of one: each message is a plain return, through JSON where several ranks would use
    it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    data_parallel: DataParallel

    def barrier(self) -> None:
        """Wait until every rank is here."""
        return

    def gather_json(self, obj: Any) -> list[Any] | None:
        """Return every rank's object on rank 0, in rank order; None elsewhere."""
        return [parse_json(json.dumps(obj))]

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Return every rank's bytes on rank 0, in rank order; None elsewhere. Nothing is padded to the longest."""
        return [data]

    def broadcast_json(self, obj: Any) -> Any:
        """Return rank 0's object on every rank. It went through JSON on rank 0 as well, so all are equal."""
        return parse_json(json.dumps(obj))

    def agree(self, error: TrainflowError | None) -> None:
        """Raise the error of the lowest rank that has one, on every rank; return when no rank has one."""
        if error is not None:
            raise error

    def any(self, flag: bool) -> bool:
        """Return True on every rank when `flag` is true on one."""
        return flag

    def any_later(self, flag: bool) -> Callable[[], bool]:
        """Start `any`, and return what waits for its answer: the message travels while the caller computes."""
        return lambda: flag

    def sum_ints(self, values: list[int]) -> list[int]:
        """Return the element-wise sum over ranks of a few integers, without touching a device."""
        return list(values)

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of a tensor of any shape `[...]`, as a new tensor on the same device."""
        return tensor.detach().clone()

    def gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor `[...]`, all of one shape, in the order of the ranks, on the same device."""
        return [tensor.detach().clone()]

    def twin(self, timeout_s: float) -> Communicator:
        """Return the same ranks over connections of their own, for the messages of one other thread."""
        return self


def sharers(comm: Communicator) -> int:
    """Return how many ranks work on the same samples."""
    return comm.world_size // comm.data_parallel.size


def leads(comm: Communicator) -> bool:
    """Return whether this is the first of the ranks that work on its samples: the one that reports them."""
    return comm.rank % sharers(comm) == 0


def sum_over_data(comm: Communicator, values: list[int]) -> list[int]:
    """Return the sums of a few integers that ranks with the same samples have equal, counted once. Collective."""
    return [total // sharers(comm) for total in comm.sum_ints(values)]


def run_on_all_ranks(comm: Communicator, work: Callable[[], Result]) -> Result:
    """Run `work` on every rank, and return its result or raise the error of the lowest rank that failed. Collective."""
    failure: TrainflowError | None = None
    result: Result | None = None
    try:
        result = work()
    except Exception as error:
        failure = from_exception(error, rank=comm.rank)
    # Every rank comes here, also one whose work failed: none waits for a message that never arrives.
    comm.agree(failure)
    return cast("Result", result)


# -- tensors of collectives that a thread of gloo may still hold -------------------------------------------------------
#
# A thread of gloo that has finished a collective drops its tensors a moment after the caller went on, and a tensor that
# Python has seen is dropped under the interpreter's lock. A thread that is late, on a busy machine, asks for that lock
# when the interpreter is already ending, and the process is aborted ("terminate called without an active exception")
# after all its work is done. Ending the process group does not help while `DistributedDataParallel` keeps it alive.
# So a program waits, as the last thing it does, until the threads have dropped what they held.
#
# Nor may the group end while a thread holds something: `DistributedDataParallel` ends the group that it is the last to
# hold under the interpreter's lock, which the thread waits for, while the end waits for the thread. So a group is ended
# after this wait.

_MAX_BYTES = 65_536  # larger tensors are not kept alive for this: a later small one follows every large one
_PAUSE_S = 0.02
_LATE_S = 0.05

# A thread holds the tensors of one collective at a time, so those that it may hold are among the newest.
_recent: deque[torch.Tensor] = deque(maxlen=64)
_any_collective = False


def remember(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` `[...]`, which is about to take part in a collective; the caller keeps no reference to it."""
    global _any_collective
    _any_collective = True
    if tensor.nbytes <= _MAX_BYTES:
        _recent.append(tensor)
    return tensor


def _share(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a remembered tensor `[...]` over the memory of `array`, in its shape."""
    return remember(torch.from_numpy(array))


def wait_until_released(timeout_s: float) -> bool:
    """Wait until no thread holds a remembered tensor, at most `timeout_s` seconds; return whether that is so."""
    if not _any_collective:
        return True
    # The collectives of other libraries are not known here: their threads get the interpreter's lock meanwhile.
    time.sleep(_PAUSE_S)
    began = time.monotonic()
    is_collected = False
    while _recent:
        # Two references: that of `_recent` and the argument. A thread that holds the tensor in C++ has a third.
        if sys.getrefcount(_recent[-1]) <= 2:
            _recent.pop()
        elif time.monotonic() >= began + timeout_s:
            return False
        elif not is_collected and time.monotonic() >= began + _LATE_S and dist.is_available() and dist.is_initialized():
            # The frames of an error that is over may hold it in a cycle. No group ends here: it is still initialized.
            is_collected = True
            gc.collect()
        else:
            time.sleep(0.001)
    return True


# -- worlds ------------------------------------------------------------------------------------------------------------


class SingleProcess(Communicator):
    """A world of one."""

    rank = 0
    world_size = 1
    local_rank = 0
    local_world_size = 1
    data_parallel = DataParallel(0, 1)


class ProcessGroup(Communicator):
    """Several processes over a `torch.distributed` group, by default the job's; its CPU side is always gloo.

    `device_group`: for tensors on other devices; `group` when not given.
    """

    def __init__(
        self, ranks: Ranks, group: dist.ProcessGroup | None = None, device_group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_rank, self.local_world_size = ranks.local_rank, ranks.local_world_size
        self.data_parallel = DataParallel(ranks.rank, ranks.world_size)
        self._ranks, self._group = ranks, group
        self._device_group = device_group or group
        self._twin: Communicator | None = None
        self.waited_s = 0.0
        "Seconds in `sum_ints`, which ranks call in every step: mostly waiting for the others."

    @override
    def barrier(self) -> None:
        # Not dist.barrier: with NCCL that would use the GPU, and wait for its queue.
        dist.all_reduce(remember(torch.zeros(1, dtype=torch.int64)), group=self._group)

    @override
    def gather_json(self, obj: Any) -> list[Any] | None:
        gathered = self.gather_bytes(json.dumps(obj).encode())
        return None if gathered is None else [parse_json(data) for data in gathered]

    @override
    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        sizes = np.zeros(self.world_size, dtype=np.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(_share(sizes), group=self._group)  # a sum of one non-zero entry per rank
        if self.rank != 0:
            if data:  # a rank without data sends nothing, and rank 0 knows that from the sizes
                dist.send(_to_tensor(data), dst=0, group=self._group)
            return None
        gathered = [data]
        for peer in range(1, self.world_size):
            buffer = torch.empty(int(sizes[peer]), dtype=torch.uint8)
            if buffer.numel():
                dist.recv(buffer, src=peer, group=self._group)
            gathered.append(buffer.numpy().tobytes())
        return gathered

    @override
    def broadcast_json(self, obj: Any) -> Any:
        data = json.dumps(obj).encode() if self.rank == 0 else b""
        size = np.array([len(data)], dtype=np.int64)
        dist.broadcast(_share(size), src=0, group=self._group)
        buffer = _to_tensor(data) if self.rank == 0 else torch.empty(int(size[0]), dtype=torch.uint8)
        dist.broadcast(remember(buffer), src=0, group=self._group)
        return parse_json(buffer.numpy().tobytes())

    @override
    def agree(self, error: TrainflowError | None) -> None:
        # One small message settles the usual case; the errors themselves travel only when there is one.
        if not self.any(error is not None):
            return
        if error is not None and error.rank is None:
            error.rank = self.rank
        gathered = self.gather_json(error.to_record() if error is not None else None)
        first = None if gathered is None else next(record for record in gathered if record is not None)
        record = self.broadcast_json(first)
        if error is not None and record["rank"] == self.rank:
            raise error  # the rank's own exception, which has the traceback
        raise from_record(record)

    @override
    def any(self, flag: bool) -> bool:
        return self.any_later(flag)()

    @override
    def any_later(self, flag: bool) -> Callable[[], bool]:
        value = np.array([int(flag)], dtype=np.int64)
        work = dist.all_reduce(_share(value), op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> bool:
            nonlocal work
            if work is not None:
                work.wait()
                work = None  # it holds the tensor (see `remember`)
            return bool(value[0])

        return wait

    @override
    def sum_ints(self, values: list[int]) -> list[int]:
        started = time.perf_counter()
        total = np.array(values, dtype=np.int64)
        dist.all_reduce(_share(total), group=self._group)
        self.waited_s += time.perf_counter() - started
        return [int(value) for value in total]

    @override
    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(remember(total), group=self._group_of(tensor))
        return total.detach()  # a tensor of its own over the same memory, which the caller may keep

    @override
    def gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = remember(tensor.detach().clone(memory_format=torch.contiguous_format))
        gathered = [remember(torch.empty_like(own)) for _ in range(self.world_size)]
        dist.all_gather(gathered, own, group=self._group_of(tensor))
        return [tensor.detach() for tensor in gathered]

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        return self._group if tensor.device.type == "cpu" else self._device_group

    @override
    def twin(self, timeout_s: float) -> Communicator:
        # Formed at the first call, by all ranks; `destroy_process_group` ends it with the job's group.
        if self._twin is None:
            timeout = timedelta(seconds=timeout_s)
            self._twin = ProcessGroup(self._ranks, dist.new_group(backend="gloo", timeout=timeout))
        return self._twin


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


ranks_from_environment = environment.ranks

_LEAVE_S = 10.0

_current: Communicator | None = None
_stores: dict[tuple[str | None, ...], tuple[Any, Iterator[int]]] = {}
_leaving = threading.Event()
_leaver: threading.Thread | None = None
_owned = False  # whether `init` or `form_alone` formed the process group, so that `shutdown` ends it


def init(args: TrainingArguments) -> Communicator:
    """Join the job that the environment describes, once per process; later calls return the same communicator.

    A process group that the caller has formed is used as it is, and `shutdown` leaves it alone. Whatever group still
    stands when the program ends is ended then. Raises ConfigError, and InfrastructureError for peers out of reach.
    """
    global _current, _owned
    if _current is not None:
        return _current
    if dist.is_available() and dist.is_initialized():
        report_failures()
        _prepare_to_leave()
        _current = _adopt_formed_group(args)
        return _current
    ranks = environment.ranks()
    if ranks.world_size == 1:
        _warn_of_machines(ranks)
        return SingleProcess()
    device = choose_device(use_cpu=args.use_cpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.source != "RANK":  # torch and other libraries know torchrun's variables only
        os.environ.update(ranks.variables())
    if ranks.master is not None:
        environment.use_interface(ranks.master[0])
    report_failures()
    backend = _backend(args.ddp_backend, device)  # its ConfigError is a ValueError: not one of torch's below
    try:
        _form_group(backend, ranks, timedelta(seconds=args.ddp_timeout))
    except ValueError as error:
        message = f"The process group cannot be formed: {error}"
        raise ConfigError(message, field="MASTER_ADDR", remedy="Start through torchrun.") from error
    except (RuntimeError, dist.DistError) as error:
        what = f"The {ranks.world_size} processes did not find each other: {error}"
        remedy = "Check that all were started and that MASTER_ADDR and MASTER_PORT can be reached."
        raise InfrastructureError(what, rank=ranks.rank, remedy=remedy) from error
    _current, _owned = ProcessGroup(ranks), True
    _prepare_to_leave()
    return _current


def _form_group(backend: str, ranks: Ranks, timeout: timedelta) -> None:
    """Form the group that torchrun's variables describe; after `shutdown` another one may follow it.

    All groups use one store, in which torch has one set of keys: the ranks of a second group would read the addresses
    of the first, and wait for ever. So each group has keys of its own, and the store stays open.
    """
    place = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), str(ranks.rank), str(ranks.world_size))
    if place not in _stores:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
        _stores[place] = store, itertools.count()
    store, numbers = _stores[place]
    store.set_timeout(timeout)
    own = dist.PrefixStore(f"trainflow/group-{next(numbers)}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)


def _warn_of_machines(ranks: Ranks) -> None:
    """Warn when a scheduler started this script on several machines and no launcher joined their processes."""
    machines = environment.find_machines() if ranks is environment.ALONE else None
    if machines is not None and machines.most > 1:
        _log.warning(
            "This process trains alone although the job has %s machines (%s): start the script through torchrun.",
            machines.nodes,
            machines.source,
        )


def _adopt_formed_group(args: TrainingArguments) -> ProcessGroup:
    """Use the group that the caller, or a library of the caller's, has formed."""
    found = environment.ranks()
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), found.local_rank, found.local_world_size)
    # accelerate forms a group without a CPU side on GPUs; messages then need one of their own.
    if any(part.startswith("cpu:") for part in dist.get_backend_config().split(",")):
        return ProcessGroup(ranks)
    timeout = timedelta(seconds=args.ddp_timeout)
    return ProcessGroup(ranks, dist.new_group(backend="gloo", timeout=timeout), dist.group.WORLD)


def form_alone(device: torch.device) -> None:
    """Form a process group of this process alone, for a library that needs one; `shutdown` ends it."""
    global _owned
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]  # in memory: no port is opened
        dist.init_process_group(_backend(None, device), store=store, rank=0, world_size=1)
        _owned = True
        _prepare_to_leave()


def shutdown() -> None:
    """Leave the job: end the process group if it was formed here. Harmless when there is none."""
    global _current, _owned, _leaver
    if _owned and dist.is_initialized():
        # Before: from here on a `DistributedDataParallel` may be the last that holds the group (see `remember`).
        wait_until_released(_LEAVE_S)
        dist.destroy_process_group()
    if _leaver is not None and not dist.is_initialized():  # nothing is left to end
        _leaving.set()
        _leaver.join()
        _leaver = None
        _leaving.clear()
    _current, _owned = None, False


def _end_group_at_exit() -> None:
    """End the process group that still stands, the caller's own as well, when the program ends in order.

    A program that fails leaves the group as it is: its peers may be gone, and ending the group could wait for them.
    In both cases the threads of gloo let go of the tensors of finished collectives before the interpreter ends.
    """
    wait_until_released(1.0 if _failed else _LEAVE_S)
    if dist.is_available() and dist.is_initialized() and not _failed and _leaver is not None:
        _leaving.set()
        _leaver.join(_LEAVE_S)


def _prepare_to_leave() -> None:
    """Start the thread that ends the group at exit, once: from Python 3.12 on none can be started that late.

    In a thread, with a limit: a backend that waits for a peer must not keep the program from ending.
    """
    global _leaver

    def leave() -> None:
        _leaving.wait()
        if dist.is_initialized():
            dist.destroy_process_group()

    if _leaver is None:
        _leaver = threading.Thread(target=leave, name="trainflow-leave", daemon=True)
        _leaver.start()


# Functions registered first run last: a program that ends its own group at exit, as it should, does so before.
atexit.register(_end_group_at_exit)


def current() -> Communicator:
    """Return the communicator of this process; a world of one before `init`."""
    return _current or SingleProcess()


@contextlib.contextmanager
def main_process_first(args: TrainingArguments, *, local: bool = True) -> Iterator[None]:
    """Run the block on rank 0 (of each machine when `local`) before the others, so that it fills a cache for them."""
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
    """Return the name of the backend. Whatever serves the device, gloo serves the CPU tensors of control messages."""
    if device.type == "cpu":
        if asked not in (None, "gloo", "mpi"):
            remedy = "Use gloo on CPU."
            raise ConfigError("This backend cannot serve CPU tensors.", field="ddp_backend", value=asked, remedy=remedy)
        return asked or "gloo"
    return f"cpu:gloo,{device.type}:{asked or 'nccl'}" if asked != "gloo" else "gloo"


def choose_device(*, use_cpu: bool) -> torch.device:
    """Choose the device of this process: its own GPU, MPS when alone, else the CPU.

    The n-th process of a machine takes the n-th of the visible GPUs (`CUDA_VISIBLE_DEVICES` selects and orders them).
    Where Slurm or Kubernetes shows each process only its own GPU, the process takes that one. Raises ConfigError.
    """
    ranks = environment.ranks()
    if use_cpu:
        return torch.device("cpu")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        # torchrun (RANK) shows every process all GPUs: a local rank beyond them is then an error.
        if count == 1 and ranks.source not in ("RANK", environment.ALONE.source):
            return torch.device("cuda", 0)
        if ranks.local_rank >= count:
            what = f"There are only {count} GPUs on this machine."
            remedy = f"Start at most {count} processes here, or set use_cpu=True."
            raise ConfigError(what, field="LOCAL_RANK", value=ranks.local_rank, remedy=remedy)
        return torch.device("cuda", ranks.local_rank)
    # torch_xla needs this variable: the user means a TPU, and must not train on the CPU without noticing it.
    if "PJRT_DEVICE" in os.environ and importlib.util.find_spec("torch_xla") is not None:
        remedy = "Unset the variable, or set use_cpu=True."
        raise ConfigError("XLA is not served.", field="PJRT_DEVICE", value=os.environ["PJRT_DEVICE"], remedy=remedy)
    if torch.backends.mps.is_available():
        if ranks.world_size > 1:
            remedy = "Start one process, or set use_cpu=True."
            raise ConfigError("MPS serves one process only.", field="WORLD_SIZE", value=ranks.world_size, remedy=remedy)
        return torch.device("mps")
    return torch.device("cpu")


def mention_idle_gpus(device: torch.device, world_size: int) -> None:
    """Log how to use the other GPUs of this machine when one process sees several: it uses only one."""
    count = torch.cuda.device_count() if device.type == "cuda" and world_size == 1 else 1
    if count > 1:
        script = sys.argv[0] or "script.py"
        _log.warning("One of %d GPUs is used. For all: torchrun --nproc-per-node %d %s", count, count, script)
