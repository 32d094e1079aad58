"""Dask: workers as tasks of a scheduler, through Prefect's own runner. The only file that imports its packages."""

from __future__ import annotations

import contextlib
import logging
import socket
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import dask
from distributed import Client, LocalCluster
from distributed.versions import VersionMismatchWarning
from prefect.client.schemas.objects import State
from prefect_dask import DaskTaskRunner
from typing_extensions import override

from trainflow.tasks.prefect.prefect_internals import send_queued
from trainflow.tasks.runners import Cluster, no_cluster, require_api
from trainflow.tasks.settings import RunnerSettings

CONNECT_S = 20.0


class Dask(Cluster):
    """A Dask scheduler."""

    @override
    def is_done(self, future: Any) -> bool:
        return bool(future.wrapped_future.done())

    @override
    def state(self, future: Any) -> State[Any]:
        state: State[Any] = future.wrapped_future.result(timeout=CONNECT_S)
        return state

    @override
    def cancel(self, future: Any) -> None:
        future.wrapped_future.cancel()


@contextlib.contextmanager
def connect(settings: RunnerSettings) -> Iterator[Dask]:
    """Connect to the scheduler, or start one with workers on this machine; the block's end ends those."""
    address = settings.address
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", VersionMismatchWarning)  # those that matter, workers refuse
        with no_cluster("Dask", address, (OSError, ValueError)):
            if address is None:
                address = stack.enter_context(_start_here(settings.workers, stack)).scheduler_address
            else:  # Dask itself would try for half a minute where nothing listens
                host, _, port = address.rpartition("://")[2].rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
            runner = DaskTaskRunner(address=address, client_kwargs={"timeout": CONNECT_S})
            stack.enter_context(runner)
            client: Client = runner.client
        hosts = set(client.run(socket.gethostname).values())
        require_api(sorted(hosts - {socket.gethostname()}))
        yield Dask(runner)
        if settings.address is None:  # they end now: what Prefect has to send, it sends before
            client.run(send_queued, CONNECT_S)


def _start_here(workers: int, stack: contextlib.ExitStack) -> LocalCluster:
    """Start a cluster on loopback, with a process for each worker, which works on one task at a time."""
    # Their processes take a while to end, and Dask warns of each that it kills.
    logger = logging.getLogger("distributed")
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.ERROR)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trainflow-dask-"))
    stack.enter_context(dask.config.set({"temporary-directory": folder}))
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.ERROR,
        memory_limit=None,
        env={"PREFECT_LOGGING_LEVEL": "WARNING"},  # they write to the terminal of the command
    )
