"""Homes of Prefect whose database exists: making one takes its server seconds, and all tests need the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import police
from tests.support.command import cli as cli
from tests.support.command import command_words, engine, python
from tests.support.once import once_per_run


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of Prefect as its server makes it; copy it into a new home."""
    return once_per_run(tmp_path_factory, "prefect-home", _make_database) / "prefect.db"


@pytest.fixture(scope="session")
def shared_server(prefect_database: Path, _private_tmp: None) -> Iterator[None]:
    """One server for the commands of a test process, which start in half the time; some tests keep their own."""
    home = make_home(Path(os.environ["PREFECT_HOME"]), prefect_database)
    with police.server_kept(home), engine(home):
        yield


@pytest.fixture(scope="session")
def prefect_server(shared_server: None) -> Iterator[str]:
    """The URL of Prefect's API, in place for the rest of the session."""
    from trainflow.flows.server.api import prefect_api, quiet_environment

    quiet_environment()
    with prefect_api() as url:
        from prefect import flow, task

        @task
        def first() -> int:
            return 1

        @flow(name="warm-up")
        def warm_up() -> int:
            return first()

        warm_up()  # Prefect's background threads start here, not in the first test that would be blamed for them
        yield url


def _make_database(folder: Path) -> None:
    program = (
        "import asyncio\n"
        "from prefect.server.database.dependencies import provide_database_interface\n"
        "asyncio.run(provide_database_interface().create_db())\n"
    )
    python("-c", program, env={"PREFECT_HOME": str(folder)})


def embedded_servers(home: Path) -> list[psutil.Process]:
    """The embedded servers of one home: the session keeps one in its own."""
    found = ((process, command_words(process)) for process in psutil.process_iter())
    return [
        each for each, words in found if "server/embedded.py" in " ".join(words) and words[-1].startswith(str(home))
    ]


def make_home(folder: Path, database: Path) -> Path:
    """Make a home of Prefect with a copy of the database, unless it has one."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "prefect.db").exists():
        shutil.copyfile(database, folder / "prefect.db")
    return folder
