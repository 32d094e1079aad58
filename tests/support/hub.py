"""Fixtures for tests that publish to a Hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hub_server import HubServer, ImpatientTime


@pytest.fixture
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server of its own for the test, with the environment pointing at it but without its token."""
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        # huggingface_hub pauses 1, 2, 4, 8, 8 s between its own tries of a request that failed.
        monkeypatch.setattr("huggingface_hub.utils._http.time", ImpatientTime())
        yield server


@pytest.fixture
def hub(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The server, with its token in the environment too."""
    monkeypatch.setenv("HF_TOKEN", hub_server.token)
    return hub_server
