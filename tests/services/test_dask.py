"""Sources prepared by the workers of a real Dask cluster, whose machines are processes on this one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support.command import Done, running, trainflow
from tests.support.dask_cluster import DaskCluster
from tests.support.launched import wait_until
from tests.support.shared_sources import SOURCES, calls, data_of, project
from trainer_lib.errors import ConfigError
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store

pytestmark = [pytest.mark.needs("dask"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def _server(shared_server: None) -> None:
    """One embedded server for all commands."""


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    """Two machines of one thread each."""
    cluster = DaskCluster(tmp_path_factory.mktemp("dask"), 2)
    yield cluster
    cluster.close()


def words(address: str | None, *more: str, workers: int = 2) -> tuple[str, ...]:
    where = () if address is None else (f"prepare.runner.address={address}",)
    return ("--only", "prepare-data", "prepare.runner.kind=dask", f"prepare.runner.workers={workers}", *where, *more)


def prepare(folder: Path, *more: str) -> Done:
    return trainflow("run", "pipeline.yaml", *more, cwd=folder)


def data_of_one_process(folder: Path) -> dict[str, bytes]:
    """What one process makes of the same project, in another storage."""
    storage = folder / "alone"
    done = prepare(folder, "--only", "prepare-data", f"storage={storage}")
    assert done.code == 0, done.err + done.out
    return data_of(storage)


def holders(folder: Path) -> dict[int, Path]:
    """The processes that hold a source, and their claims."""
    found = {}
    for path in (folder / "store").glob("stages/prepare-data/*/claims/*/*/WRITING.json"):
        with contextlib.suppress(FileNotFoundError):
            if (holder := Holder.from_bytes(path.read_bytes())) is not None:
                found[holder.pid] = path
    return found


def test_the_bytes_and_the_key_are_those_of_one_process(tmp_path: Path, cluster: DaskCluster) -> None:
    folder = project(tmp_path / "project", 0.05)
    done = prepare(folder, *words(cluster.address))
    assert done.code == 0, done.err + done.out
    assert sorted(calls(tmp_path)) == list(range(SOURCES))
    pids = {line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()}
    assert len(pids) == 2
    assert data_of(folder / "store") == data_of_one_process(folder)
    assert not list((folder / "store").glob("stages/prepare-data/*/claims"))
    again = prepare(folder, "--only", "prepare-data")  # on this machine: the same key
    assert "cached" in again.out


def test_prefect_has_the_workers_as_tasks_of_the_flow_run_and_nothing_else_was_sent(
    tmp_path: Path, cluster: DaskCluster
) -> None:
    from prefect.client.orchestration import get_client

    from flows.server.api import prefect_api

    folder = project(tmp_path / "project")
    assert prepare(folder, *words(cluster.address)).code == 0
    with prefect_api(), get_client(sync_client=True) as client:

        def states() -> dict[str, str]:
            run = max(client.read_flow_runs(), key=lambda run: str(run.created))
            found = client.read_task_runs(flow_run_filter=None)
            return {each.name: str(each.state_name) for each in found if each.flow_run_id == run.id}

        wait_until(lambda: [states().get(f"worker {number}") for number in (0, 1)] == ["Completed"] * 2, 30)


def test_the_sources_of_a_machine_that_is_lost_are_taken_over(tmp_path: Path, cluster: DaskCluster) -> None:
    folder = project(tmp_path / "project", 1.0)  # most sources are left when the task starts again
    with running("run", "pipeline.yaml", *words(cluster.address), cwd=folder, log=tmp_path / "log") as command:
        lost = cluster.workers[0]
        wait_until(lambda: len(holders(folder)) == 2, 60)
        [worker] = [pid for pid in holders(folder) if psutil.Process(lost.pid) in psutil.Process(pid).parents()]
        lost.send_signal(signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(worker), 30)  # nothing of it goes on
        assert command.process.wait(200) == 0, command.output
        assert "was lost, and is started again" in command.output
    assert len(calls(tmp_path)) <= SOURCES + 1
    assert data_of(folder / "store") == data_of_one_process(folder)


def test_an_error_of_the_recipe_is_that_of_the_command(tmp_path: Path, cluster: DaskCluster) -> None:
    folder = project(tmp_path / "project", 0.05, bad=5)
    done = prepare(folder, *words(cluster.address))
    assert done.code == 10, done.err + done.out
    assert "KeyError: 'gone'" in done.err + done.out
    assert "Traceback" not in done.err + done.out
    mended = prepare(folder, *words(cluster.address, "prepare.options.bad=-1"))
    assert mended.code == 0, mended.err + mended.out


def test_a_stopped_command_ends_its_workers_and_the_same_command_continues(
    tmp_path: Path, cluster: DaskCluster
) -> None:
    folder = project(tmp_path / "project", 0.3)
    with running("run", "pipeline.yaml", *words(cluster.address), cwd=folder, log=tmp_path / "log") as command:
        wait_until(lambda: (tmp_path / "calls").exists() and len(calls(tmp_path)) >= 3, 60)
        assert command.stop(signal.SIGINT) == 130, command.output
        assert not [pid for pid in holders(folder) if psutil.pid_exists(pid)]
    done = prepare(folder, *words(cluster.address))
    assert done.code == 0, done.err + done.out
    assert len(calls(tmp_path)) <= SOURCES + 2  # what the two were at when they were stopped
    assert data_of(folder / "store") == data_of_one_process(folder)


def test_without_an_address_a_cluster_is_started_and_ended(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", 0.05)
    done = prepare(folder, *words(None))
    assert done.code == 0, done.err + done.out
    assert "warning" not in done.err + done.out
    assert data_of(folder / "store") == data_of_one_process(folder)


def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    done = prepare(project(tmp_path / "project"), *words("tcp://127.0.0.1:1"))
    assert done.code == 2, done.err + done.out
    assert "prepare.runner.address" in done.err + done.out
    assert not (tmp_path / "calls").exists()


class _Machines:
    """The answers of a cluster with one worker."""

    def __init__(self, **answers: Any) -> None:
        self._answers = {"python": "3.11.4.final.0", "version": None, "gethostname": "here", "exists": True, **answers}

    def get_versions(self) -> dict[str, Any]:
        return {"workers": {"tcp://a:1": {"host": {"python": self._answers["python"]}}}}

    def run(self, function: Any, *_: Any, **__: Any) -> dict[str, Any]:
        from importlib import metadata

        found = self._answers[function.__name__]
        return {"tcp://a:1": metadata.version("trainflow") if found is None else found}


@pytest.mark.parametrize(
    ("answers", "field", "message"),
    [
        ({"python": "3.9.1.final.0"}, "prepare.runner.address", "has Python 3.9"),
        ({"version": "0.0.1"}, "prepare.runner.address", "has trainflow 0.0.1"),
        ({"version": ModuleNotFoundError("x")}, "prepare.runner.address", "has no trainflow"),
        ({"exists": False}, "storage", "does not see this folder"),
        ({"gethostname": "node7"}, "PREFECT_API_URL", "cannot be reached from node7"),
    ],
)
def test_machines_that_cannot_do_the_work_are_refused_before_anything_is_placed(
    tmp_path: Path, answers: dict[str, Any], field: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import platform

    from tasks.runners import clusters, dask_tasks

    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "11", "9"))
    monkeypatch.setattr(clusters, "PREFECT_API_URL", SimpleNamespace(value=lambda: "http://127.0.0.1:4200/api"))
    machines: Any = _Machines(**answers)
    with pytest.raises(ConfigError) as caught:
        dask_tasks._check_machines(machines, Store.open(tmp_path), "prepare.runner.address", "tcp://a:8786")
    assert caught.value.field == field
    assert message in caught.value.message
    assert os.environ.get("PREFECT_API_URL") is None
