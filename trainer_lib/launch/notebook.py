"""A function of a notebook, run here or by several forked processes. Torch-free until the function imports it.

A notebook's functions live in its own process and can be given to others by forking only: what they close over need not
be importable. Forking is possible as long as this process has not used a GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from trainer_lib.arguments.environment import Ranks
from trainer_lib.errors import ConfigError, InfrastructureError, TrainflowError, from_exception, from_record
from trainer_lib.guard import PR_SET_PDEATHSIG, prctl
from trainer_lib.launch.config import LaunchConfig, resolve_config
from trainer_lib.launch.failures import signal_name
from trainer_lib.launch.in_process import set_environment
from trainer_lib.launch.variables import free_port, thread_variables, threads_of

LOOPBACK = "127.0.0.1"
PATIENCE_S = 5.0  # for the others to notice that one has failed
GRACE_S = 30.0


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 1,
    mixed_precision: str = "no",
    use_cpu: bool = False,
) -> Any:
    """Call ``function(*args)`` on `num_processes` processes that train together.

    Build model, data and Trainer inside of the function. One process: it is this one. Several: they are forked, as
    ranks of a group on this machine, and end with this call.

    Args:
        mixed_precision: "no", "bf16" or "fp16"; merged with the arguments as by `accelerate launch`.
        use_cpu: the processes use the CPU although there are devices.

    Returns:
        What rank 0's call returned; with several processes as far as JSON can say it, else None.

    Raises:
        ConfigError: more processes than devices or cores, no fork here, or a GPU that this process has used already.
        TrainflowError: with several processes, the typed failure of the first rank that failed.
    """
    variables = {"ACCELERATE_MIXED_PRECISION": mixed_precision} | ({"ACCELERATE_USE_CPU": "true"} if use_cpu else {})
    if num_processes == 1:
        with set_environment(variables):
            return function(*args)
    config = resolve_config(LaunchConfig(kind="torchrun", processes=num_processes), use_cpu=use_cpu)
    _refuse_used_process(num_processes)
    master = (LOOPBACK, free_port())
    variables |= thread_variables(threads_of(config, os.environ))
    variables |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    context = multiprocessing.get_context("fork")
    children: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        for rank in range(num_processes):
            ours, theirs = context.Pipe(duplex=False)
            ranked = {**variables, **Ranks(rank, num_processes, rank, num_processes, master).variables()}
            child = context.Process(target=_child, args=(theirs, ranked, os.getpid(), function, args))
            child.start()
            theirs.close()
            children[ours] = (rank, child)
        return _collect(children)
    finally:
        _end([child for _, child in children.values()])
        for connection in children:
            connection.close()


def _refuse_used_process(processes: int) -> None:
    torch = sys.modules.get("torch")
    problem = None
    if not hasattr(os, "fork"):
        problem = "this system cannot fork a process."
    elif torch is not None and torch.cuda.is_initialized():
        problem = "this process has used a GPU already, which forked processes cannot share."
    elif torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        problem = "this process is part of a group already."
    if problem is not None:
        raise ConfigError(
            problem,
            field="num_processes",
            value=processes,
            remedy="Restart the notebook and touch devices inside of the function only, or use torchrun with a script.",
        )


def _child(
    answer: Connection, variables: Mapping[str, str], parent: int, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    os.environ.update(variables)
    torch = sys.modules.get("torch")
    if (
        torch is not None
    ):  # the pool of threads that the parent may have used was not forked along: waiting for it hangs
        torch.set_num_threads(1)
    try:
        value = function(*args)
    except BaseException as error:
        typed = from_exception(error, rank=int(variables["RANK"]))
        answer.send_bytes(json.dumps({"error": typed.to_record(), "time": time.time()}).encode())
        os._exit(typed.exit_code)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    answer.send_bytes(_json(value))
    os._exit(0)  # what the notebook registered to happen at exit is the parent's to do


def _json(value: Any) -> bytes:
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError):
        return json.dumps({"value": None}).encode()


def _collect(children: Mapping[Connection, tuple[int, BaseProcess]]) -> Any:
    """Rank 0's value, once all have one; the first failure once every rank had time to say its own."""
    waiting, value, deadline = dict(children), None, None
    failures: list[tuple[bool, float, TrainflowError]] = []
    while waiting:
        ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in [each for each in waiting if each in ready]:
            rank, child = waiting.pop(connection)
            result = _receive(connection)
            if result is not None and "error" not in result:
                value = result["value"] if rank == 0 else value
                continue
            error = _silent(rank, child) if result is None else from_record(result["error"])
            # That a rank lost contact is a consequence; that one died without a result is not.
            consequence = result is not None and isinstance(error, InfrastructureError)
            failures.append((consequence, time.time() if result is None else result["time"], error))
            deadline = deadline or time.monotonic() + PATIENCE_S
    if failures:
        raise min(failures, key=lambda failure: failure[:2])[2]
    return value


def _receive(connection: Connection) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return result


def _silent(rank: int, child: BaseProcess) -> InfrastructureError:
    child.join(PATIENCE_S)
    code = child.exitcode or 0
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code} and left no reason"
    return InfrastructureError(f"Rank {rank} {how}.", rank=rank, remedy="Look at what it printed last.")


def _end(children: Sequence[BaseProcess]) -> None:
    """No child outlives the call: those that still run are asked to stop, then killed."""
    for child in children:
        if child.is_alive():
            child.terminate()
    deadline = time.monotonic() + (GRACE_S if sys.exc_info()[0] is KeyboardInterrupt else PATIENCE_S)
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
