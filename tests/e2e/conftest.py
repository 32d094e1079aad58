"""Commands share a Prefect server, but for those whose test keeps one of its own."""

from __future__ import annotations

import pytest

from tests.support.command import cli as cli
from tests.support.prefect_home import prefect_server as prefect_server


@pytest.fixture(scope="session", autouse=True)
def _server(shared_server: None) -> None:
    """Keep the session's server up."""
