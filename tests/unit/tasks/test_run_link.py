"""A stage's link to Prefect: a server that never answers costs the stage nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid

import pytest

from tasks.prefect_internals import settings_for_every_thread
from tasks.stage import run_link
from tasks.stage.run_link import RunLink, wait_for_drawings


def test_a_server_that_hangs_holds_nothing_up() -> None:
    from prefect.settings import PREFECT_API_URL

    with socket.create_server(("127.0.0.1", 0)) as hanging:  # accepts, and says nothing
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}/api"
        with settings_for_every_thread({PREFECT_API_URL: url}):
            began = time.monotonic()
            link = RunLink("train", uuid.uuid4(), uuid.uuid4())
            link.draw(50.0, "step 1/2")
            assert not link.is_cancelled()
            asked = time.monotonic() - began
            link.close()
            closed = time.monotonic() - began
            wait_for_drawings()
            took = time.monotonic() - began
            link._thread.join(30)
    assert asked < 0.5
    assert closed < 0.5, "the next stage begins while the last one is drawn"
    assert took < 2.0
    assert not link._thread.is_alive(), "it gives up by itself"


def test_a_stage_that_ends_at_once_asks_nothing_but_shows_what_it_drew() -> None:
    from prefect.settings import PREFECT_API_URL

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/api"
        with settings_for_every_thread({PREFECT_API_URL: url}):
            RunLink("train", uuid.uuid4(), uuid.uuid4()).close()
            with pytest.raises(TimeoutError):
                server.accept()
            server.settimeout(10)
            link = RunLink("train", uuid.uuid4(), uuid.uuid4())
            link.draw(100.0, "step 2/2")
            link.close()
            server.accept()[0].close()
            wait_for_drawings()
    link._thread.join(30)
    assert not link._thread.is_alive()


def test_what_is_drawn_during_the_last_exchange_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing, closed, shown = threading.Event(), threading.Event(), []

    def draw(link: RunLink, client: object, share: float, text: str) -> None:
        shown.append(share)
        drawing.set()
        closed.wait(10)

    monkeypatch.setattr(RunLink, "_draw", draw)
    monkeypatch.setattr(run_link, "FIRST_S", 0.0)
    monkeypatch.setattr(run_link, "quick_client", lambda: contextlib.nullcontext(_NeverCancelled()))
    link = RunLink("predict", uuid.uuid4(), uuid.uuid4())
    link.draw(2.2, "step 1/45")
    assert drawing.wait(10)
    link.draw(100.0, "committed")
    link.close()
    closed.set()
    wait_for_drawings()
    assert shown == [2.2, 100.0]


class _NeverCancelled:
    """Prefect's client, of which only a run without a state is asked for."""

    state = None

    def read_flow_run(self, flow_run_id: object) -> _NeverCancelled:
        return self
