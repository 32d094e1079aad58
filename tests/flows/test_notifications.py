"""Messages about runs, received by a web server and a mail server of this machine."""

from __future__ import annotations

import contextlib
import json
import re
import socketserver
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock

from tests.support.command import python
from tests.support.machine import serving
from tests.support.prefect_server import Server, wait_for
from tests.support.repository import ROOT
from tests.support.runs import broken, run, succeeded
from trainer_lib.errors import CodeError
from trainflow.tasks.tracking.notifying import Message, NotifySettings


@contextlib.contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A web server that takes JSON: the address for Apprise, and what came."""
    received: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Hook)) as port:
        yield f"json://127.0.0.1:{port}/hook", received


@contextlib.contextmanager
def mailbox() -> Iterator[tuple[str, list[str]]]:
    """A mail server: the address for Apprise, and the mails that came."""
    received: list[str] = []

    class Mail(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            while line := self.rfile.readline():
                word = line.split(None, 1)[0].upper() if line.strip() else b""
                if word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    mail = []
                    while (text := self.rfile.readline()) not in (b".\r\n", b""):
                        mail.append(text.decode())
                    received.append("".join(mail))
                self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
                if word == b"QUIT":
                    return

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mail)) as port:
        yield f"mailto://127.0.0.1:{port}/?mode=insecure&from=runs@example.org&to=team@example.org", received


def test_a_failed_and_a_finished_run_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ("notify.to=[TEAM_HOOK, TEAM_MAIL]", "publish.enabled=false")
    with webhook() as (hook, posts), mailbox() as (mail, mails):
        monkeypatch.setenv("TEAM_HOOK", hook)
        monkeypatch.setenv("TEAM_MAIL", mail)
        run(folder, *told).raise_for_error()
        assert posts == [], "nothing ran"

        broken(folder, 'return {"error"', 'raise ValueError("not today")\n    return {"error"')
        failed = run(folder, *told)
        assert isinstance(failed.error, CodeError)
        [post], [first] = posts, mails
        assert post["title"] == f"{failed.run_name} failed"
        assert "not today" in post["message"]
        assert f"trainflow resume {failed.pipeline_key[:16]}" in post["message"]
        assert "not today" in first
        assert "To: team@example.org" in first.replace("<", "").replace(">", "")

        done = succeeded(folder, *told, "train.args.seed=2", "evaluate.enabled=false")
        assert posts[1]["title"] == f"{done.run_name} finished"
        assert len(mails) == 2


@pytest.mark.usefixtures("prefect_server")
def test_a_block_of_prefect_sends_too() -> None:
    with webhook() as (hook, posts):
        rest: dict[str, Any] = {"method": "POST", "headers": {}, "cookies": {}, "json_data": {"text": "{{subject}}"}}
        block = CustomWebhookNotificationBlock(name="team", url=hook.replace("json://", "http://"), **rest)
        block.save("trainflow-test", overwrite=True, _sync=True)  # type: ignore[call-arg]
        NotifySettings(to=["block:custom-webhook/trainflow-test"]).send(Message("failed", "toy failed", ["train"]))
    assert posts == [{"text": "toy failed"}]


# -- the automation of Prefect that docs/operations.md shows, on a separate server -------------------------------------

# In a separate process: Prefect reads its settings once.
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
def test_the_automation_of_the_page_reports_a_crashed_run(server: Server, tmp_path: Path) -> None:
    def called(*words: str) -> str:
        return python("-c", CRASH, *words, env=server.environ).stdout.strip()

    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    shown: Any = re.search(r"```yaml\n# crashed.yaml\n(.*?)```", page, re.DOTALL)

    def crashed() -> bool:
        called("crash")
        time.sleep(2)  # the server's own loop takes the automation up within seconds
        return bool(posts)

    with webhook() as (hook, posts):
        block = called("block", hook.replace("json://", "http://"))
        (tmp_path / "crashed.yaml").write_text(shown[1].replace("block_document_id: ID", f"block_document_id: {block}"))
        server.prefect("automation", "create", "--from-file", str(tmp_path / "crashed.yaml"))
        wait_for("the message", crashed)
    assert posts[0] == {"text": "wine-7 crashed: It died."}
