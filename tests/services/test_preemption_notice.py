"""Where notice of preemption is looked for, against a server on loopback and real programs."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pydantic
import pytest

from tasks.configs import PreemptionSettings
from tests.support.launched import wait_until
from trainer_lib.preemption import NoticeWatch, Preemption, find_notice


class _Metadata(http.server.BaseHTTPRequestHandler):
    """Answers as clouds do: 404 until the notice, TRUE or FALSE, a redirect, or nothing for a while."""

    def do_GET(self) -> None:
        if self.path == "/slow":
            time.sleep(2.0)
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "/there")
            self.end_headers()
            return
        there = self.path in ("/there", "/slow") or (self.path == "/flavor" and self.headers["Metadata-Flavor"] == "G")
        self.send_response(200 if there else 404)
        self.end_headers()
        self.wfile.write(b"TRUE" if there else b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join()


def test_a_file(tmp_path: Path) -> None:
    asked = Preemption(file=str(tmp_path / "notice"))
    assert find_notice(asked) is None
    (tmp_path / "notice").touch()
    assert find_notice(asked) == f"the file {tmp_path / 'notice'} is there"


def test_a_url(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a metadata server is not behind a proxy
    assert find_notice(Preemption(url=f"{server}/there")) == f"{server}/there answered"
    assert find_notice(Preemption(url=f"{server}/there", contains="TRUE")) is not None
    assert find_notice(Preemption(url=f"{server}/there", contains="FALSE")) is None
    assert find_notice(Preemption(url=f"{server}/missing")) is None
    assert find_notice(Preemption(url=f"{server}/elsewhere")) is None
    assert find_notice(Preemption(url=f"{server}/flavor")) is None
    assert find_notice(Preemption(url=f"{server}/flavor", headers={"Metadata-Flavor": "G"})) is not None
    assert find_notice(Preemption(url="http://127.0.0.1:9/")) is None


def test_a_url_has_a_time_limit(server: str) -> None:
    begun = time.monotonic()
    assert find_notice(Preemption(url=f"{server}/slow", timeout_s=0.2)) is None
    assert time.monotonic() - begun < 1.5


def test_a_command() -> None:
    for code, notice in ((0, f"{sys.executable} exited with 0"), (1, None)):
        asked = Preemption(command=(sys.executable, "-c", f"raise SystemExit({code})"), timeout_s=60)
        assert find_notice(asked) == notice
    assert find_notice(Preemption(command=("/no/such/program",))) is None


def test_a_command_has_a_time_limit_and_leaves_nothing(tmp_path: Path) -> None:
    note = tmp_path / "child"
    asked = Preemption(command=("/bin/sh", "-c", f"sleep 300 & echo $! > {note}; wait"), timeout_s=1.0)
    assert find_notice(asked) is None
    child = int(note.read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 10)


def test_a_notice_is_delivered_once_it_is_taken(tmp_path: Path) -> None:
    answers = [False, False, True]
    watch = NoticeWatch(Preemption(file=str(tmp_path / "notice"), every_s=0.05), lambda: answers.pop(0))
    watch.start()
    time.sleep(0.2)
    assert (watch.notice, len(answers)) == (None, 3)
    (tmp_path / "notice").touch()
    watch.join(10)
    assert not watch.is_alive()
    assert (watch.notice is not None, answers) == (True, [])


def test_the_settings_name_a_place() -> None:
    with pytest.raises(pydantic.ValidationError, match="Give file, command or url"):
        PreemptionSettings(every_s=3)
    with pytest.raises(pydantic.ValidationError):
        PreemptionSettings(url="ftp://host/x")
    settings = PreemptionSettings.model_validate({"command": "check --now 'a b'"})
    assert settings.to_request() == Preemption(command=("check", "--now", "a b"))
