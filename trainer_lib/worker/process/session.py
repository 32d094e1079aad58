"""One rank of one request: set up, run the verb, leave a result or a typed failure behind."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NoReturn, TypeVar

from typing_extensions import override

from trainer_lib import recipes
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import to_record
from trainer_lib.base.suggestions import counted
from trainer_lib.errors import (
    ConfigError,
    InfrastructureError,
    Preempted,
    TrainflowError,
    is_collective_timeout,
    is_full_disk,
    is_lost_peer,
)
from trainer_lib.guard import GUARD, OWNER, Process, descendants, is_alive, send_signal
from trainer_lib.launch.run_dir import WARM_SOCKET, RunDir
from trainer_lib.protocol.recipe_functions import user_error
from trainer_lib.protocol.requests import Request, read_request

# A rank's flight recorder, written where the launch's owner asks for stacks: which collectives it has entered.
#
# torch records the newest 2,000 collectives of each process group by itself (``TORCH_FR_BUFFER_SIZE``), over gloo as
# well as NCCL. The file holds torch's own JSON, by backend.


PARENT_S = 1.0
POLL_S = 0.25  # an owner waits two seconds for stacks and traces
# Private names of torch, which has no public ones; NCCL has a recorder of its own.
_RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


def _await_stacks_request(run_dir: RunDir, rank: int) -> None:
    """Write this rank's collective trace as soon as the owner asks for stacks; in a thread, which needs no other."""
    while not run_dir.has_stacks_request():
        time.sleep(POLL_S)
    with suppress(OSError):  # the owner may be gone, and the run directory with it
        run_dir.write(f"trace-{rank}.json", json.dumps(read_trace(rank)))


def read_trace(rank: int) -> dict[str, Any]:
    """Return what torch has recorded in this process, by backend; nothing where no collective was entered."""
    recorders = {}
    if "torch.distributed" in sys.modules:
        module = importlib.import_module("torch._C._distributed_c10d")
        for backend, name in _RECORDERS.items():
            with suppress(AttributeError, RuntimeError, ValueError, TypeError):  # a build of torch without it
                recorded = parse_json(getattr(module, name)())
                if recorded.get("pg_status") or recorded.get("entries"):
                    recorders[backend] = recorded
    return {"rank": rank, "recorders": recorders}


class ParentWatch(threading.Thread):
    """Stops this process when its parent changes (torchrun died) or the guard is gone: SIGTERM, `grace_s`, SIGKILL.

    A guard that was stopped (SIGSTOP) cannot see that the owner is gone: it is woken, and then does.
    """

    def __init__(self, grace_s: float) -> None:
        super().__init__(name="trainflow-parent-watch", daemon=True)
        self._grace_s = grace_s
        self._parent = os.getppid()
        self._guard, self._owner = _recorded(GUARD), _recorded(OWNER)
        self._done = threading.Event()

    @override
    def run(self) -> None:
        while not self._done.wait(PARENT_S):
            if self._guard is not None and self._owner is not None and not is_alive(self._owner):
                send_signal(self._guard, signal.SIGCONT)
            if os.getppid() != self._parent or (self._guard is not None and not is_alive(self._guard)):
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._done.wait(self._grace_s):
                    for process in descendants(os.getpid()):
                        send_signal(process, signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                return

    def close(self) -> None:
        """Stop watching: this process is about to end anyway."""
        self._done.set()


def _recorded(variable: str) -> Process | None:
    pid, _, start = os.environ.get(variable, "").partition(":")
    return Process(int(pid), start) if pid.isdigit() else None


# How long exit handlers may take, after a failure and after success.
FAILED_EXIT_S = 10.0
EXIT_S = 60.0
# How long the ranks have to write their stacks and traces.
STACKS_S = 1.0
QUIET_S = 0.5  # the least time between two signs of life


class Events:
    """Progress events of this rank: of rank 0 appended to ``events.jsonl``, or given to `sink`; of others dropped."""

    def __init__(self, path: Path, rank: int, sink: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._path = path
        self._rank = rank
        self._sink = sink
        self._is_torn = False  # a full disk has cut the newest line

    def emit(self, event: str, **fields: Any) -> None:
        """Report that something happened. Fields that are None are left out."""
        if self._rank != 0:
            return
        known = {key: value for key, value in fields.items() if value is not None}
        record = {"t": time.time(), "event": event, **known}
        if self._sink is not None:
            self._sink(record)
            return
        line = json.dumps(record).encode() + b"\n"
        try:
            with self._path.open("ab") as file:
                file.write(b"\n" + line if self._is_torn else line)
            self._is_torn = False
        except OSError as error:
            if not is_full_disk(error):
                raise
            self._is_torn = True  # progress that is not shown is not worth the work


class Pace:
    """Lets signs of life through, at most one every `QUIET_S` seconds."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def is_due(self) -> bool:
        """Whether it is time for one; if so, none is for a while."""
        now = time.monotonic()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + QUIET_S
        return True


Q = TypeVar("Q", bound=Request[Any])
R = TypeVar("R")


@dataclass(frozen=True)
class Work(Generic[Q]):
    """The inputs of a verb on one rank."""

    request: Q
    recipe: recipes.Recipe
    rank: int
    world_size: int
    events: Events

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """The prepared data of a request that works with a model, as a record."""
        request: Any = self.request
        return to_record(request.data)


def main(argv: list[str]) -> int:
    """Run one rank to its end. Returns the exit code: 0, or that of the failure."""
    verb, path = argv  # the verb only names the process in a list of processes: the request holds it
    if WARM_SOCKET in os.environ:
        _await_launch(verb)
    run_dir = RunDir(Path(path))
    # Each of a machine's tasks has an agent that knows only itself: the launcher says which one it is.
    local, _, world = os.environ.get("TRAINFLOW_LOCAL_RANK", "").partition("/")
    if local:
        os.environ.update({"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": world})
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run_dir.record_process(f"worker-{rank}", os.getpid())
    _leaving.begin()
    _set_up_streams(rank)
    _set_up_signals(run_dir, rank)
    watch = ParentWatch(float(os.environ.get("TRAINFLOW_GRACE_S", "60")))
    watch.start()
    if world_size > 1:  # a process alone enters no collective
        threading.Thread(target=_await_stacks_request, args=(run_dir, rank), daemon=True).start()
    work = None
    try:
        # `accelerate launch --cpu --num_processes 2` silently starts one process.
        if (asked := int(os.environ.get("TRAINFLOW_WORLD_SIZE", world_size))) != world_size:
            what = f"The launcher started {counted(world_size, 'process', 'processes')}."
            remedy = "Set train.launch.kind=torchrun, or correct the launcher's configuration file."
            raise ConfigError(what, field="train.launch.processes", value=asked, remedy=remedy)
        request = read_request(run_dir.read_json("request.json"))
        work = _make_work(request, run_dir, rank, world_size, Events(run_dir.path / "events.jsonl", rank))
        result = _run_verb(work)
    except BaseException as error:
        # Nothing may interrupt the record of the failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        return _leaving.within(FAILED_EXIT_S, _fail(run_dir, rank, world_size, error, work))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # done: there is nothing left to stop
    if rank == 0:
        run_dir.write_json("result.json", to_record(result))
    watch.close()
    return _leaving.within(EXIT_S, 0)


def _await_launch(verb: str) -> None:
    """Import what the verb will need, and wait for the variables of the launch, as `launch.warm` sends them."""
    # The first optimizer step imports torch's compiler, and pyarrow's first conversion of a list imports pandas.
    first_step = ("torch._dynamo",) if verb in ("train", "probe") else ()
    for name in (f"trainer_lib.worker.{verb}", *first_step, "pandas"):
        with suppress(ModuleNotFoundError):  # a verb of another package; pandas is optional
            importlib.import_module(name)
    with socket.socket(fileno=int(os.environ[WARM_SOCKET])) as channel:
        data, held, _, _ = socket.recv_fds(channel, 1 << 16, 8)
        while more := channel.recv(1 << 16):
            data += more
    if not data:  # the owner has ended, or will launch nothing more
        os._exit(1)
    for number in held:
        os.set_inheritable(number, True)  # as where the guard hands them on
    guard = os.environ[GUARD]
    os.environ.clear()
    os.environ.update({**parse_json(data, dict), GUARD: guard})


class _Leaving:
    """The end of the process: exit handlers run (trackers send what they hold), then it ends at once.

    Taking torch apart module by module costs more than a second, and a process group whose peers are gone may never
    end. Exit handlers run last in, first out, and this one is registered before torch is imported. It does nothing in a
    process that is not a worker.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def begin(self) -> None:
        """Make this process a worker, whose exit code is 1 until `within` sets another."""
        self._code = 1

    def within(self, seconds: float, code: int) -> int:
        """Remember the exit code and return it; whatever the exit handlers wait for, wait no longer than `seconds`."""
        self._code = code
        timer = threading.Timer(seconds, self._leave)
        timer.daemon = True
        timer.start()
        return code

    def _leave(self) -> None:
        if self._code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._code)


_leaving = _Leaving()


def run_here(request: Request[R], run_dir: RunDir, on_event: Callable[[dict[str, Any]], None]) -> R:
    """Carry a request out in the calling process, as its only rank. Raises its typed failure."""
    work = None
    try:
        work = _make_work(request, run_dir, 0, 1, Events(run_dir.path / "events.jsonl", 0, on_event))
        result: R = _run_verb(work)
        return result
    except (KeyboardInterrupt, TrainflowError):
        raise
    except BaseException as error:
        raise user_error(error, work.recipe.root if work else run_dir.path) from error


def _make_work(request: Q, run_dir: RunDir, rank: int, world_size: int, events: Events) -> Work[Q]:
    if (file := request.recipe) is None:
        recipe = recipes.Recipe(ModuleType("_trainflow_no_recipe"), run_dir.path, run_dir.path, ())
    else:
        recipe = recipes.load(file.path, file.root, needs=request.functions, fallback=file.fallback)
    return Work(request, recipe, rank, world_size, events)


def _run_verb(work: Work[Any]) -> Any:
    verb = work.request.verb
    work.events.emit("start", message=verb)
    return importlib.import_module(f"{work.request.home}.{verb}").run(work)


def _set_up_streams(rank: int) -> None:
    """Write whole lines at once, so that the output of ranks does not mix; ranks above 0 prefix theirs."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if rank == 0:
            stream.reconfigure(line_buffering=True, write_through=False)
        else:
            prefixed = _Prefixed(stream.fileno(), rank)
            setattr(sys, name, io.TextIOWrapper(prefixed, "utf-8", "replace", line_buffering=True))


class _Prefixed(io.BufferedIOBase):
    """A byte stream that puts ``[rank 1] `` before each line and passes on whole lines only."""

    def __init__(self, descriptor: int, rank: int) -> None:
        self._descriptor = descriptor
        self._prefix = f"[rank {rank}] ".encode()
        self._partial = b""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        *lines, self._partial = (self._partial + bytes(data)).split(b"\n")
        if lines:
            os.write(self._descriptor, b"".join(self._prefix + line + b"\n" for line in lines))
        return len(data)


def _set_up_signals(run_dir: RunDir, rank: int) -> None:
    """SIGTERM and SIGUSR2 stop the verb (training in its own, agreed way); SIGUSR1 and crashes show the stacks."""

    def stop(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Preempted("Asked to stop.", remedy="The same command continues with what is already committed.")

    signal.signal(signal.SIGTERM, stop)
    _take_slurms_notice()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides what Ctrl-C means
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, (run_dir.path / f"stack-{rank}.txt").open("w"), all_threads=True)


def _take_slurms_notice() -> None:
    """Take SIGUSR2 for SIGTERM. Slurm sends it to every process of a step; those that this one starts outlive it.

    A program that is executed, as a spawned data worker is, loses a handler and keeps what is blocked. So the signal is
    blocked before there is a thread, and one thread waits for it. The handler serves threads of earlier imports.
    """
    own = os.getpid()  # a data worker that is forked later inherits the handler
    main_thread = threading.get_ident()

    def wait() -> None:
        while True:
            signal.sigwait({signal.SIGUSR2})
            # By os.kill, another thread may get it, and main sleeps on.
            signal.pthread_kill(main_thread, signal.SIGTERM)

    signal.signal(signal.SIGUSR2, lambda *_: os.kill(own, signal.SIGTERM) if os.getpid() == own else None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    threading.Thread(target=wait, name="trainflow-notice", daemon=True).start()


def _fail(run_dir: RunDir, rank: int, world_size: int, error: BaseException, work: Work[Any] | None) -> int:
    """Record the failure, end every process that this rank started, and return the exit code."""
    root = work.recipe.root if work is not None else run_dir.path
    # Only a consequence: the rank that failed first reports the cause.
    secondary = world_size > 1 and is_lost_peer(error)
    typed = user_error(error, root)
    if secondary:
        what, remedy = f"Rank {rank} lost contact with the others.", "The same command continues from the last save."
        typed = InfrastructureError(what, remedy=remedy, details=typed.details)
    if world_size > 1 and typed.rank is None:
        typed.rank = rank
    timed_out = secondary and is_collective_timeout(error)
    if timed_out:
        with suppress(OSError):  # one of this machine's ranks stands still: all write their stacks and traces
            run_dir.ask_workers_for_stacks()
            time.sleep(STACKS_S)
    with suppress(OSError):  # the owner may be gone, and the run directory with it
        record = {**typed.to_record(), "time": time.time(), "secondary": secondary, "timed_out": timed_out}
        run_dir.write_json(f"error-rank{rank}.json", record)
    for process in descendants(os.getpid()):  # data workers, and whatever the recipe started
        send_signal(process, signal.SIGKILL)
    return typed.exit_code
