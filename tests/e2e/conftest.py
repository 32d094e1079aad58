"""One Prefect server for the commands of a test process, which start in half the time; some tests keep their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import engine
from tests.support.prefect_home import make_home


@pytest.fixture(scope="session", autouse=True)
def shared_server(prefect_database: Path, _private_tmp: None) -> Iterator[None]:
    """Keep the server of the session's PREFECT_HOME up."""
    with engine(make_home(Path(os.environ["PREFECT_HOME"]), prefect_database)):
        yield
