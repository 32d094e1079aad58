"""Sources prepared by mapped tasks on a real Ray cluster, whose machines are raylets on this one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import running, trainflow
from tests.support.launched import wait_until
from tests.support.ray_cluster import VARIABLES, RayCluster
from tests.support.repository import ROOT
from tests.support.shared_sources import SOURCES, calls, data_of, project

pytestmark = [pytest.mark.needs("ray"), pytest.mark.timeout(400)]
ENV = {"PYTHONPATH": str(ROOT), **VARIABLES}


@pytest.fixture(scope="module", autouse=True)
def _server(shared_server: None) -> None:
    """One embedded server for all commands."""


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """Two machines of one CPU each."""
    cluster = RayCluster(1, 1)
    yield cluster
    cluster.close()


def words(cluster: RayCluster) -> tuple[str, ...]:
    runner = ("prepare.runner.kind=ray", "prepare.runner.workers=2", f"prepare.runner.address={cluster.address}")
    return ("run", "pipeline.yaml", "--only", "prepare-data", *runner)


def data_of_one_process(folder: Path) -> dict[str, bytes]:
    storage = folder / "alone"
    done = trainflow("run", "pipeline.yaml", "--only", "prepare-data", f"storage={storage}", cwd=folder)
    assert done.code == 0, done.err + done.out
    return data_of(storage)


def test_the_bytes_and_the_key_are_those_of_one_process_and_an_error_is_that_of_the_recipe(
    tmp_path: Path, cluster: RayCluster
) -> None:
    folder = project(tmp_path / "project", 0.05)
    done = trainflow(*words(cluster), cwd=folder, env=ENV)
    assert done.code == 0, done.err + done.out
    assert sorted(calls(tmp_path)) == list(range(SOURCES))
    assert len({line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()}) == 2
    assert data_of(folder / "store") == data_of_one_process(folder)
    failed = trainflow(*words(cluster), "prepare.options.bad=5", cwd=folder, env=ENV)
    assert failed.code == 10, failed.err + failed.out
    assert "KeyError: 'gone'" in failed.err + failed.out


def test_the_sources_of_a_machine_that_is_killed_are_taken_over(tmp_path: Path, cluster: RayCluster) -> None:
    folder = project(tmp_path / "project", 0.5)
    with running(*words(cluster), cwd=folder, log=tmp_path / "log", env=ENV) as command:
        wait_until(lambda: (tmp_path / "calls").exists() and len(calls(tmp_path)) >= 4, 90)
        cluster.tell("kill", 1)
        assert command.process.wait(250) == 0, command.output
        assert "A worker was lost; the others took over its part." in command.output
    assert len(calls(tmp_path)) <= SOURCES + 1
    assert data_of(folder / "store") == data_of_one_process(folder)


def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    begun = time.monotonic()
    runner = ("prepare.runner.kind=ray", "prepare.runner.workers=2", "prepare.runner.address=127.0.0.1:1")
    done = trainflow("run", "pipeline.yaml", "--only", "prepare-data", *runner, cwd=project(tmp_path / "p"), env=ENV)
    assert done.code == 2, done.err + done.out
    text = " ".join((done.err + done.out).split())
    for words in ("prepare.runner.address = 127.0.0.1:1", "The Ray cluster cannot be used", "Give the address of a"):
        assert words in text
    assert not (tmp_path / "calls").exists()
    assert time.monotonic() - begun < 200  # Ray itself tries for more than five minutes
