"""Where notice of preemption is looked for, against a server on loopback and real programs."""

from __future__ import annotations

import http.server
import logging
import os
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pydantic
import pytest

from tests.support.launched import wait_until
from tests.support.machine import serving
from trainer_lib.protocol.requests import Preemption
from trainer_lib.worker.train import NoticeWatch, find_notice
from trainflow.tasks.configs import PreemptionSettings


class _Metadata(http.server.BaseHTTPRequestHandler):
    """Answers as clouds do: 404 until the notice, TRUE or FALSE, a redirect, or nothing until `released`."""

    released = threading.Event()
    log_message = staticmethod(lambda *_: None)  # type: ignore[assignment]

    def do_GET(self) -> None:
        if self.path == "/slow":
            self.released.wait(10)
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "/there")
            self.end_headers()
            return
        there = self.path in ("/there", "/slow") or (self.path == "/flavor" and self.headers["Metadata-Flavor"] == "G")
        self.send_response(200 if there else 404)
        self.end_headers()
        self.wfile.write(b"TRUE" if there else b"")


class _Odd(socketserver.StreamRequestHandler):
    """Answers the first request with what is not HTTP, and gives notice in the second."""

    asked = 0

    def handle(self) -> None:
        self.rfile.readline()
        type(self).asked += 1
        if self.asked == 1:
            self.wfile.write(b"what?\r\n\r\n")
        else:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)) as port:
        yield f"http://127.0.0.1:{port}"


def watched(asked: Preemption) -> NoticeWatch:
    """Watch until there is notice, which is taken."""
    watch = NoticeWatch(asked, lambda: True)
    watch.start()
    watch.join(20)
    assert not watch.is_alive()
    watch.close()
    return watch


def test_a_url(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(path: str, **more: Any) -> str | None:
        return find_notice(Preemption(url=f"{server}{path}", **more))

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a metadata server is not behind a proxy
    assert ask("/there") == f"{server}/there answered"
    assert ask("/there", contains="TRUE") and not ask("/there", contains="FALSE")
    assert not ask("/missing") and not ask("/elsewhere")
    assert ask("/flavor", headers={"Metadata-Flavor": "G"}) and not ask("/flavor")
    assert find_notice(Preemption(url="http://127.0.0.1:9/")) is None
    assert ask("/slow", timeout_s=0.2) is None, "it would be there, had anybody waited"
    _Metadata.released.set()


def test_an_odd_answer_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Odd)) as port, caplog.at_level(logging.WARNING):
        url = f"http://127.0.0.1:{port}/"
        watch = watched(Preemption(url=url, every_s=0.01, timeout_s=2.0))
    assert watch.notice == f"{url} answered"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["train.preemption"]
    assert f"{url} failed, and is repeated: BadStatusLine" in caplog.text


def test_a_file_that_cannot_be_looked_at_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notice = tmp_path / "notice"
    notice.touch()
    real, failures = os.stat, [116, 13, 5]  # ESTALE, EACCES, EIO

    def stat(path: Any, **given: Any) -> os.stat_result:
        if os.fspath(path) == str(notice) and failures:
            raise OSError(failures[0], os.strerror(failures.pop(0)), path)
        return real(path, **given)

    monkeypatch.setattr(os, "stat", stat)
    assert watched(Preemption(file=str(notice), every_s=0.01)).notice == f"the file {notice} is there"
    assert failures == []
    assert caplog.text.count("failed, and is repeated") == 1


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
    answers, asked = [False, False, True], Preemption(file=str(tmp_path / "notice"), every_s=0.05)
    assert find_notice(asked) is None
    watch = NoticeWatch(asked, lambda: answers.pop(0))
    watch.start()
    time.sleep(0.2)
    assert (watch.notice, len(answers)) == (None, 3)
    (tmp_path / "notice").touch()
    watch.join(10)
    assert (watch.is_alive(), watch.notice, answers) == (False, f"the file {tmp_path / 'notice'} is there", [])


def test_the_settings_name_one_place() -> None:
    for places in ({}, {"file": "notice", "url": "http://host/x"}):
        with pytest.raises(pydantic.ValidationError, match="Give file, command or url"):
            PreemptionSettings.model_validate(places)
    with pytest.raises(pydantic.ValidationError):
        PreemptionSettings(url="ftp://host/x")
    settings = PreemptionSettings.model_validate({"command": "check --now 'a b'"})
    assert settings.to_request() == Preemption(command=("check", "--now", "a b"))
