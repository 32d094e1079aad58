"""One Prefect API for all flow tests: the embedded server that trainflow's own commands use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.once import once_per_run
from tests.support.runs import ALL, IN_PROCESS, ran
from tests.support.toy import project
from trainer_lib.model_folder.locate import trust_storage
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks.stage import manifest


@pytest.fixture(scope="session", autouse=True)
def _server(shared_server: None) -> None:
    """Keep the session's server up: commands, and flows inside of the test process, share it."""


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A project that has run once; tests work on copies of it."""
    from trainflow.flows.pipeline import run_pipeline

    def run(folder: Path) -> None:
        result = run_pipeline(load_spec(project(folder / "project"), (*IN_PROCESS, "tracking.enabled=true")))
        result.raise_for_error()
        assert ran(result) == ALL

    return once_per_run(tmp_path_factory, "finished", run) / "project"


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    manifest._verified.clear()


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "project")
    trust_storage(str(tmp_path / "project" / "store"))  # as if this user had run there
    return tmp_path / "project"
