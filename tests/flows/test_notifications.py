"""Messages about runs, received by a web server and a mail server of this machine."""

from __future__ import annotations

import contextlib
import json
import socketserver
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock

from tests.support.machine import serving
from tests.support.runs import broken, run
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

        done = run(folder, *told, "train.args.seed=2", "evaluate.enabled=false")
        done.raise_for_error()
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
