"""The automation of Prefect that docs/operations.md shows, on a server of Prefect: it reports a crashed run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.test_notifications import webhook
from tests.support.repository import ROOT

PREFECT = [sys.executable, "-m", "prefect"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A server as a team runs it; yields the environment of its clients."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    command = [*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not _answers(f"{env['PREFECT_API_URL']}/health"):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        yield env
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


# In a process of its own: Prefect reads its settings once.
CRASH = """
import sys
from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.states import Crashed, Running

@flow
def pipeline(): ...

if sys.argv[1] == "block":
    block = CustomWebhookNotificationBlock(
        name="team", url=sys.argv[2], method="POST", json_data={"text": "{{subject}}: {{body}}"}
    )
    print(block.save("team", _sync=True))
else:
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(pipeline, name="wine-7")
        client.set_flow_run_state(run.id, Running(), force=True)
        client.set_flow_run_state(run.id, Crashed(message="It died."), force=True)
"""


@pytest.mark.timeout(400)
def test_a_crashed_run_is_told(server: dict[str, str], tmp_path: Path) -> None:
    def run(*command: str) -> str:
        done = subprocess.run(command, env={**os.environ, **server}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    shown: Any = re.search(r"```yaml\n# crashed.yaml\n(.*?)```", page, re.DOTALL)
    with webhook() as (hook, posts):
        block = run(sys.executable, "-c", CRASH, "block", hook.replace("json://", "http://")).strip()
        (tmp_path / "crashed.yaml").write_text(shown[1].replace("block_document_id: ID", f"block_document_id: {block}"))
        run(*PREFECT, "automation", "create", "--from-file", str(tmp_path / "crashed.yaml"))
        deadline = time.monotonic() + 120
        while not posts:  # the server's own loop takes the automation up within seconds
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            run(sys.executable, "-c", CRASH, "crash")
            time.sleep(2)
    assert posts[0] == {"text": "wine-7 crashed: It died."}
