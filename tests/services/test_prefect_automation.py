"""The automation of Prefect that docs/operations.md shows, on a server of Prefect: it reports a crashed run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.test_notifications import webhook
from tests.support.prefect_server import Server
from tests.support.repository import ROOT

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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        server.serve()
        yield server
    finally:
        server.stop()


@pytest.mark.timeout(400)
def test_a_crashed_run_is_reported(server: Server, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        command, env = [sys.executable, "-c", CRASH, *words], {**os.environ, **server.environ}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    shown: Any = re.search(r"```yaml\n# crashed.yaml\n(.*?)```", page, re.DOTALL)
    with webhook() as (hook, posts):
        block = run("block", hook.replace("json://", "http://"))
        (tmp_path / "crashed.yaml").write_text(shown[1].replace("block_document_id: ID", f"block_document_id: {block}"))
        server.prefect("automation", "create", "--from-file", str(tmp_path / "crashed.yaml"))
        deadline = time.monotonic() + 120
        while not posts:  # the server's own loop takes the automation up within seconds
            assert time.monotonic() < deadline, server.log.read_text()
            run("crash")
            time.sleep(2)
    assert posts[0] == {"text": "wine-7 crashed: It died."}
