"""Run a function of a notebook in this process or in several forked ones. Imports no torch before the function does.

A notebook's function lives in the notebook's process and closes over objects that cannot be imported, so only forked
processes can run it. A process can fork until it has used a GPU.
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
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.restore_process import variables_kept
from trainer_lib.errors import ConfigError, InfrastructureError, TrainflowError, from_exception, from_record
from trainer_lib.guard import PR_SET_PDEATHSIG, prctl
from trainer_lib.launch.failures import signal_name
from trainer_lib.launch.settings.config import LaunchConfig, resolve_config
from trainer_lib.launch.settings.variables import free_port, thread_variables, threads_of

LOOPBACK = "127.0.0.1"
PATIENCE_S = 5.0  # time for the other ranks to notice that one has failed
GRACE_S = 30.0


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 1,
    mixed_precision: str = "no",
    use_cpu: bool = False,
) -> Any:
    """Call ``function(*args)`` on `num_processes` processes that train together.

    Build model, data and Trainer inside the function. With one process, this process calls it. Several processes are
    forked as the ranks of a process group on this machine, and end with this call.

    Args:
        mixed_precision: "no", "bf16" or "fp16"; merged with the arguments as `accelerate launch` does.
        use_cpu: the processes use the CPU although there are devices.

    Returns:
        What rank 0's call returned; with several processes, None if it cannot be written as JSON.

    Raises:
        ConfigError: more processes than devices or cores, a system that cannot fork, or a process that has used a GPU.
        TrainflowError: with several processes, the typed failure of the first rank that failed.
    """
    variables = {"ACCELERATE_MIXED_PRECISION": mixed_precision} | ({"ACCELERATE_USE_CPU": "true"} if use_cpu else {})
    if num_processes == 1:
        with variables_kept(variables):
            return function(*args)
    config = resolve_config(LaunchConfig(kind="torchrun", processes=num_processes), use_cpu=use_cpu)
    _refuse_used_process(num_processes)
    master = (LOOPBACK, free_port())
    variables |= thread_variables(threads_of(config, os.environ))
    variables |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    # fork, not spawn: a function of a notebook cannot be imported by another process.
    context = multiprocessing.get_context("fork")
    children: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        for rank in range(num_processes):
            ours, theirs = context.Pipe(duplex=False)
            ranked = {**variables, **Ranks(rank, num_processes, rank, num_processes, master).variables()}
            child = context.Process(target=_child, args=(theirs, ranked, os.getpid(), function, args))
            child.start()
            theirs.close()  # or the pipe would not end with the child
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
        problem = "This system cannot fork a process."
    elif torch is not None and torch.cuda.is_initialized():
        problem = "This process has used a GPU already, which forked processes cannot share."
    elif torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        problem = "This process is part of a process group already."
    if problem is not None:
        raise ConfigError(
            problem,
            field="num_processes",
            value=processes,
            remedy="Restart the notebook and use devices inside the function only, or start a script with torchrun.",
        )


def _child(
    answer: Connection, variables: Mapping[str, str], parent: int, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    # The parent's end must not leave processes that hold GPUs.
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the notebook ended before the call above, so no signal will come
        os._exit(1)
    os.environ.update(variables)
    torch = sys.modules.get("torch")
    if torch is not None:
        # A fork copies none of the threads in torch's pool, so an operator that waits for them would hang.
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
    os._exit(0)  # skips the handlers that the notebook registered for its own exit


def _json(value: Any) -> bytes:
    # A value that JSON cannot hold stays in the child; the launcher returns None.
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError):
        return json.dumps({"value": None}).encode()


def _collect(children: Mapping[Connection, tuple[int, BaseProcess]]) -> Any:
    """Return rank 0's value once all have one; else raise the first failure, after every rank had time to report."""
    waiting, value, deadline = dict(children), None, None
    failures: list[tuple[bool, float, TrainflowError]] = []
    while waiting:
        ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in [connection for connection in waiting if connection in ready]:
            rank, child = waiting.pop(connection)
            result = _receive(connection)
            if result is not None and "error" not in result:
                value = result["value"] if rank == 0 else value
                continue
            error = _silent(rank, child) if result is None else from_record(result["error"])
            # A rank that lost contact is a consequence; a rank that died without a result is a cause.
            consequence = result is not None and isinstance(error, InfrastructureError)
            failures.append((consequence, time.time() if result is None else result["time"], error))
            deadline = deadline or time.monotonic() + PATIENCE_S
    if failures:
        raise min(failures, key=lambda failure: failure[:2])[2]
    return value


def _receive(connection: Connection) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = parse_json(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return result


def _silent(rank: int, child: BaseProcess) -> InfrastructureError:
    child.join(PATIENCE_S)
    code = child.exitcode or 0
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code} and recorded no reason"
    return InfrastructureError(f"Rank {rank} {how}.", rank=rank, remedy="Look at the last lines that it printed.")


def _end(children: Sequence[BaseProcess]) -> None:
    """End every child that still runs: SIGTERM first, then SIGKILL."""
    for child in children:
        if child.is_alive():
            child.terminate()
    # After Ctrl-C the ranks may be saving, so they get longer.
    deadline = time.monotonic() + (GRACE_S if sys.exc_info()[0] is KeyboardInterrupt else PATIENCE_S)
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
