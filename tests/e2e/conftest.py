"""Commands share a Prefect server, but for those whose test keeps one of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _server(shared_server: None) -> None:
    """Keep the session's server up."""
