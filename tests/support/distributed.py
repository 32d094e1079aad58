"""Run a function on N processes that form a gloo group on loopback.

The children are forked from a clean single-threaded server that has torch imported already, so a group of two costs
tenths of a second. Nothing outlives the call: every child is joined or killed, and each has a watchdog of its own.
What else takes seconds to import (transformers, Keras) a module's tests import once, with `loaded`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
GRACE_S = 5.0
_context = multiprocessing.get_context("forkserver")
# torch imports its compiler at the first optimizer step: seconds, once here instead of in every child.
_context.set_forkserver_preload(["pytest", "torch._dynamo", "safetensors.torch", "tests.support.training"])


# The connection to a process that has more modules imported than the server.
_loaded: list[Connection] = []


class RemoteFailure(AssertionError):
    """A child died, hung, or failed with an error that cannot be sent to the parent."""


@contextlib.contextmanager
def loaded(*modules: str, **env: str) -> Iterator[None]:
    """In the block, `run_distributed` forks from a process that has imported these modules; they start no threads."""
    _keep_sockets_out_of_tmp()
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_serve, args=(theirs, modules, {**os.environ, **env}), name="loaded")
    process.start()
    theirs.close()
    _loaded.append(ours)
    try:
        yield
    finally:
        _loaded.remove(ours)
        ours.close()
        process.join(GRACE_S)
        process.kill()
        process.join()


def _serve(connection: Connection, modules: tuple[str, ...], env: dict[str, str]) -> None:
    """Start the groups that are asked for, until the connection is closed."""
    multiprocessing.set_start_method("fork", force=True)
    os.environ.clear()
    os.environ.update(env)
    for name in modules:
        importlib.import_module(name)
    with contextlib.suppress(EOFError):
        while True:
            asked = pickle.loads(connection.recv_bytes())
            connection.send(_answer(functools.partial(_start, multiprocessing.get_context("fork"), *asked)))


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Run `fn(*args)` on every rank of a new process group and return the results in rank order.

    `fn` is a module-level function; arguments and results are pickled (they are the test's own). The environment has
    RANK, WORLD_SIZE and so on set as torchrun sets them, but forming the group is left to `fn`
    (`trainer_lib.distributed.communicator.init`); it is ended afterwards. The exception of the rank that failed first
    is raised here, with the remote traceback as a note. A run longer than `timeout_s` fails with every child's stack on
    stderr.
    """
    _keep_sockets_out_of_tmp()
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {
        **os.environ,
        **(env or {}),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store above is the rendezvous: no port is guessed
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    try:
        if not _loaded:
            return _start(_context, world_size, shared, timeout_s, fn, args)
        _loaded[-1].send_bytes(pickle.dumps((world_size, shared, timeout_s, fn, args)))
        failed, payload, text = _loaded[-1].recv()
        if failed:
            raise _rebuilt("the group", payload, text)
        return list(pickle.loads(payload))
    finally:
        del store


def _start(
    context: Any, world_size: int, shared: dict[str, str], timeout_s: float, fn: Callable[..., Any], args: Any
) -> list[Any]:
    children: dict[Connection, tuple[int, BaseProcess]] = {}
    child: BaseProcess
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            ranked = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            child = context.Process(target=_child, args=(theirs, ranked, timeout_s, fn, args), name=f"rank-{rank}")
            child.start()
            theirs.close()
            children[ours] = (rank, child)
        # A child shows its stack at its own limit, before this one.
        return _collect(children, time.monotonic() + timeout_s + GRACE_S)
    finally:
        for connection, (_, child) in children.items():
            connection.close()
            child.join(GRACE_S if sys.exc_info()[0] is None else 0.1)
            if child.is_alive():
                child.kill()
                child.join()


def _keep_sockets_out_of_tmp() -> None:
    # multiprocessing would make a folder in TMPDIR for the server's socket, and remove it only when the process exits.
    config: dict[str, Any] = getattr(multiprocessing.process.current_process(), "_config")  # noqa: B009
    if config.get("tempdir") is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / "multiprocessing"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config["tempdir"] = str(folder)


def _collect(children: Mapping[Connection, tuple[int, BaseProcess]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(children)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(rank for rank, _ in waiting.values())
            raise RemoteFailure(f"ranks {missing} did not finish in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank, child = waiting.pop(connection)
            try:
                failed, payload, text = connection.recv()
            except EOFError:
                child.join(GRACE_S)
                raise RemoteFailure(f"rank {rank} died with exit code {child.exitcode}") from None
            if failed:
                raise _rebuilt(f"rank {rank}", payload, text)
            results[rank] = pickle.loads(payload)
    return [results[rank] for rank in sorted(results)]


def _answer(call: Callable[[], Any]) -> tuple[bool, bytes | None, str]:
    """Whether a call failed; its result or error, pickled (None: it cannot be); the traceback."""
    try:
        return False, pickle.dumps(call()), ""
    except BaseException as error:  # whatever it is, the parent must see it
        text = traceback.format_exc()
        try:
            payload = pickle.dumps(error)
            pickle.loads(payload)
        except Exception:
            return True, None, text
        return True, payload, text


def _rebuilt(where: str, payload: bytes | None, text: str) -> BaseException:
    error = RemoteFailure(f"{where} failed") if payload is None else pickle.loads(payload)
    error.add_note(f"on {where}:\n{text}")
    assert isinstance(error, BaseException)
    return error


def _child(
    connection: Connection, env: dict[str, str], timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()  # what was imported is no garbage: collections look at a rank's objects alone
    # A child of the fork server would start DataLoader workers through a fork server of its own: seconds each.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.clear()
    os.environ.update(env)
    faulthandler.dump_traceback_later(timeout_s, exit=True)

    def call() -> Any:
        import torch

        torch.set_num_threads(1)
        return fn(*args)

    try:
        answer = _answer(call)  # the error and its frames, which may hold tensors of collectives, are gone
        from trainer_lib.distributed import communicator as distributed

        distributed.shutdown()
        connection.send(answer)
        if answer[0]:
            raise SystemExit(1)
    finally:
        faulthandler.cancel_dump_traceback_later()
        connection.close()
