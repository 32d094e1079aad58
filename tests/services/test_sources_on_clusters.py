"""Sources prepared by the workers of a real Dask or Ray cluster, whose machines are processes on this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import police
from tests.support.command import Done, running, trainflow
from tests.support.launched import wait_until
from tests.support.ray_cluster import VARIABLES, RayCluster
from tests.support.repository import ROOT
from tests.support.shared_sources import SOURCES, calls, data_of, project
from trainer_lib.locks.lease import Holder

pytestmark = pytest.mark.timeout(400)
DASK, RAY = (pytest.param(kind, marks=pytest.mark.needs(kind)) for kind in ("dask", "ray"))
ON_DASK = pytest.mark.parametrize("place", [DASK], indirect=True)
#: Kind -> variables of the commands.
ENV = {"dask": {}, "ray": {"PYTHONPATH": str(ROOT), **VARIABLES}}
LOST = {"dask": "was lost, and is started again", "ray": "A worker was lost; the others took over its part."}


_QUIET = {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False"}


class DaskCluster:
    """A scheduler on loopback, and workers of one thread each: processes that a test may kill like a machine."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        # Its workers' own helpers are not what a test left behind.
        kept = {name: value for name, value in os.environ.items() if name != police.TOKEN}
        self._env = {**kept, **_QUIET, "DASK_TEMPORARY_DIRECTORY": str(folder), "PYTHONPATH": str(ROOT)}
        address = folder / "address"
        words = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(address))
        self._scheduler = self._start("dask_scheduler", *words)
        wait_until(address.exists, 60)
        # Without a nanny: a worker that is killed stays away, as a machine does.
        usual = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(folder))
        file = ("--scheduler-file", str(address))
        self.workers = [self._start("dask_worker", *usual, *file) for _ in range(workers)]

    @property
    def address(self) -> str:
        """Return the scheduler's address."""
        return str(json.loads((self._folder / "address").read_text())["address"])

    def _start(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / "cluster.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{program}", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._env,
                start_new_session=True,
            )

    def close(self) -> None:
        """End every process, the workers first."""
        processes = [*self.workers, self._scheduler]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Place:
    """A cluster of two machines with one thread each; without a cluster, what an address leads to."""

    kind: str
    address: str | None
    cluster: Any = None

    def words(self, *more: str) -> tuple[str, ...]:
        where = () if self.address is None else (f"prepare.runner.address={self.address}",)
        runner = (f"prepare.runner.kind={self.kind}", "prepare.runner.workers=2", *where)
        return ("run", "pipeline.yaml", "--only", "prepare-data", *runner, *more)

    def prepare(self, folder: Path, *more: str) -> Done:
        return trainflow(*self.words(*more), cwd=folder, env=ENV[self.kind])

    def lose_a_machine(self, folder: Path) -> None:
        if self.kind == "ray":
            self.cluster.tell("kill", 1)
            return
        lost = self.cluster.workers[0]
        wait_until(lambda: len(holders(folder)) == 2, 60)
        [worker] = [pid for pid in holders(folder) if psutil.Process(lost.pid) in psutil.Process(pid).parents()]
        lost.send_signal(signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(worker), 30)  # nothing of it goes on


@pytest.fixture(scope="module", autouse=True)
def _server(shared_server: None) -> None:
    """One embedded server for all commands."""


@pytest.fixture(params=[DASK, RAY])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    cluster: Any = DaskCluster(tmp_path_factory.mktemp("dask"), 2) if request.param == "dask" else RayCluster(1, 1)
    yield Place(request.param, cluster.address, cluster)
    cluster.close()


def data_of_one_process(folder: Path) -> dict[str, bytes]:
    """What one process makes of the same project, in another storage."""
    storage = folder / "alone"
    trainflow("run", "pipeline.yaml", "--only", "prepare-data", f"storage={storage}", cwd=folder).ok()
    return data_of(storage)


def holders(folder: Path) -> dict[int, Path]:
    """The processes that hold a source, and their claims."""
    found = {}
    for path in (folder / "store").glob("stages/prepare-data/*/claims/*/*/WRITING.json"):
        with contextlib.suppress(FileNotFoundError):
            if (holder := Holder.from_bytes(path.read_bytes())) is not None:
                found[holder.pid] = path
    return found


def test_the_bytes_and_the_key_are_those_of_one_process(tmp_path: Path, place: Place) -> None:
    folder = project(tmp_path / "project", 0.05)
    done = place.prepare(folder)
    assert done.code == 0, done.err + done.out
    assert sorted(calls(tmp_path)) == list(range(SOURCES))
    assert len({line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()}) == 2
    assert data_of(folder / "store") == data_of_one_process(folder)
    assert not list((folder / "store").glob("stages/prepare-data/*/claims"))
    again = trainflow("run", "pipeline.yaml", "--only", "prepare-data", cwd=folder)  # on this machine: the same key
    assert "cached" in again.out


def test_an_error_of_the_recipe_is_that_of_the_command(tmp_path: Path, place: Place) -> None:
    folder = project(tmp_path / "project", 0.05, bad=5)
    done = place.prepare(folder)
    assert done.code == 10, done.err + done.out
    assert "KeyError: 'gone'" in done.err + done.out
    assert "Traceback" not in done.err + done.out
    mended = place.prepare(folder, "prepare.options.bad=-1")
    assert mended.code == 0, mended.err + mended.out


def test_the_sources_of_a_machine_that_is_lost_are_taken_over(tmp_path: Path, place: Place) -> None:
    folder = project(tmp_path / "project", 1.0)  # most sources are left when the task starts again
    with running(*place.words(), cwd=folder, log=tmp_path / "log", env=ENV[place.kind]) as command:
        wait_until(lambda: (tmp_path / "calls").exists() and len(calls(tmp_path)) >= 4, 90)
        place.lose_a_machine(folder)
        assert command.process.wait(250) == 0, command.output
        assert LOST[place.kind] in command.output
    assert len(calls(tmp_path)) <= SOURCES + 1
    assert data_of(folder / "store") == data_of_one_process(folder)


@pytest.mark.parametrize(
    "nowhere",
    [
        pytest.param(Place("dask", "tcp://127.0.0.1:1"), marks=pytest.mark.needs("dask"), id="dask"),
        pytest.param(Place("ray", "127.0.0.1:1"), marks=pytest.mark.needs("ray"), id="ray"),
    ],
)
def test_no_cluster_at_the_address(tmp_path: Path, nowhere: Place) -> None:
    begun = time.monotonic()
    done = nowhere.prepare(project(tmp_path / "project"))
    assert done.code == 2, done.err + done.out
    text = " ".join((done.err + done.out).split())
    assert f"prepare.runner.address = {nowhere.address}" in text
    if nowhere.kind == "ray":
        assert "The Ray cluster cannot be used" in text and "Give the address of a" in text
    assert not (tmp_path / "calls").exists()
    assert time.monotonic() - begun < 200  # Ray itself tries for more than five minutes


@ON_DASK
def test_prefect_has_the_workers_as_tasks_of_the_flow_run(tmp_path: Path, place: Place) -> None:
    from prefect.client.orchestration import get_client

    from trainflow.flows.server.api import prefect_api

    assert place.prepare(project(tmp_path / "project")).code == 0
    with prefect_api(), get_client(sync_client=True) as client:

        def states() -> dict[str, str]:
            run = max(client.read_flow_runs(), key=lambda run: str(run.created))
            tasks = client.read_task_runs(flow_run_filter=None)
            return {task.name: str(task.state_name) for task in tasks if task.flow_run_id == run.id}

        wait_until(lambda: [states().get(f"worker {number}") for number in (0, 1)] == ["Completed"] * 2, 30)


@ON_DASK
def test_a_stopped_command_ends_its_workers_and_the_same_command_continues(tmp_path: Path, place: Place) -> None:
    folder = project(tmp_path / "project", 0.3)
    with running(*place.words(), cwd=folder, log=tmp_path / "log") as command:
        wait_until(lambda: (tmp_path / "calls").exists() and len(calls(tmp_path)) >= 3, 60)
        assert command.stop(signal.SIGINT) == 130, command.output
        assert not [pid for pid in holders(folder) if psutil.pid_exists(pid)]
    done = place.prepare(folder)
    assert done.code == 0, done.err + done.out
    assert len(calls(tmp_path)) <= SOURCES + 2  # what the two were at when they were stopped
    assert data_of(folder / "store") == data_of_one_process(folder)


@pytest.mark.needs("dask")
def test_without_an_address_a_cluster_is_started_and_ended(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", 0.05)
    done = Place("dask", None).prepare(folder)
    assert done.code == 0, done.err + done.out
    assert "warning" not in done.err + done.out
    assert data_of(folder / "store") == data_of_one_process(folder)
