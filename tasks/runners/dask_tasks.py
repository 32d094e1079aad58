"""Dask: workers as tasks of a scheduler, through Prefect's own runner. The only file that imports its packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
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

from trainer_lib.errors import ConfigError
from trainer_lib.launch.settings.refusal import unshared
from trainer_lib.storage import Store
from trainflow.tasks.prefect.prefect_internals import send_queued
from trainflow.tasks.runners.clusters import Cluster, no_cluster, require_api
from trainflow.tasks.settings.runner_settings import RunnerSettings

CONNECT_S = 20.0
PACKAGE = "trainflow"


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
def connect(settings: RunnerSettings, store: Store, *, section: str) -> Iterator[Dask]:
    """Connect to the scheduler, or start one with workers on this machine; the block's end ends those."""
    field = f"{section}.runner.address"
    address = settings.address
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", VersionMismatchWarning)  # those that matter are refused below
        with no_cluster("Dask", address, section, (OSError, ValueError)):
            if address is None:
                address = stack.enter_context(_start_here(settings.workers, stack)).scheduler_address
            else:
                _knock(address)
            runner = DaskTaskRunner(address=address, client_kwargs={"timeout": CONNECT_S})
            stack.enter_context(runner)
            client: Client = runner.client
        if settings.address is not None:
            _check_machines(client, store, field, settings.address)
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


def _knock(address: str) -> None:
    """Raises OSError where nothing listens: Dask itself would try for half a minute."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def _check_machines(client: Client, store: Store, field: str, address: str) -> None:
    """Check the workers that are there, by functions of Python's own; those that come later fail by themselves."""
    ours = platform.python_version_tuple()[:2]
    versions = client.get_versions()["workers"]
    for worker, found in versions.items():
        theirs = tuple(str(found["host"]["python"]).split(".")[:2])
        if theirs != ours:
            raise ConfigError(
                f"The worker {worker} of the cluster has Python {'.'.join(theirs)}, and this is {'.'.join(ours)}.",
                field=field,
                value=address,
                remedy="Use the same version of Python on all machines: what Dask sends can be read by no other.",
            )
    version = importlib.metadata.version(PACKAGE)
    for worker, theirs in client.run(importlib.metadata.version, PACKAGE, on_error="return").items():
        if theirs != version:
            what = "no trainflow" if isinstance(theirs, Exception) else f"trainflow {theirs}"
            raise ConfigError(
                f"The worker {worker} of the cluster has {what}, and this is {version}.",
                field=field,
                value=address,
                remedy="Use the same Python environment on all machines.",
            )
    hosts = client.run(socket.gethostname)
    if store.is_local:
        for worker, sees in client.run(os.path.exists, str(store.local_path())).items():
            if not sees:
                raise unshared(hosts[worker], store.url)
    require_api(sorted({host for host in hosts.values() if host != socket.gethostname()}))
