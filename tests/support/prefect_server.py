"""A Prefect server of a test's own, as an operator runs one, with workers and what its API says."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.command import python
from tests.support.machine import free_port


def wait_for(what: str, condition: Callable[[], Any], timeout: float = 120) -> Any:
    """Wait until the condition holds, and return its value."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.3)  # a question to the server takes it a hundredth
    raise AssertionError(f"{what}: not within {timeout:g} s")


class Server:
    """A Prefect server with a home of its own, and the processes that belong to it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "server.log"
        self.port = free_port()
        self.environ = {
            "PREFECT_HOME": str(folder),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_PREFETCH_SECONDS": "1",  # a schedule that is paused starts no further run
            "PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS": "3",  # of a short interval it plans a hundred
            "PREFECT_API_DATABASE_TIMEOUT": "60",
            "TMPDIR": str(folder),
        }
        self._client = httpx.Client(base_url=self.environ["PREFECT_API_URL"], timeout=60)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a module of Python that uses the server; its output goes to the log."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**os.environ, **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def serve(self) -> None:
        factory = ("--factory", "prefect.server.api.server:create_app")
        process = self.start("uvicorn", *factory, "--port", str(self.port), "--log-level", "error")
        wait_for("the server", lambda: self.answers() or process.poll() is not None, 150)
        assert process.poll() is None, self.log.read_text()

    def stop(self) -> None:
        self._client.close()
        for process in reversed(self._processes):
            process.terminate()
            process.wait(40)

    def answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.api("GET", "health") is True
        return False

    def api(self, method: str, path: str, body: Any = None) -> Any:
        for _ in range(60):  # its database may be busy; Prefect's own clients ask again, too
            answer = self._client.request(method, path, json=body)
            if answer.status_code != 503:
                break
            time.sleep(1)
        assert answer.is_success, f"{answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def deployment(self, name: str) -> dict[str, Any]:
        [found] = self.api("POST", "deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        return dict(found)

    def run(self, deployment: str) -> str:
        return str(self.api("POST", f"deployments/{self.deployment(deployment)['id']}/create_flow_run", {})["id"])

    def runs(self, deployment: str, *states: str) -> list[dict[str, Any]]:
        """Return the runs of a deployment that are in one of these states."""
        wanted = {
            "deployments": {"name": {"any_": [deployment]}},
            "flow_runs": {"state": {"type": {"any_": list(states)}}},
        }
        return list(self.api("POST", "flow_runs/filter", wanted))

    def prefect(self, *arguments: str) -> str:
        return python("-m", "prefect", "--no-prompt", *arguments, env=self.environ).stdout
