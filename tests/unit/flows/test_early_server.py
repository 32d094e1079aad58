"""A server that starts before it is known whether it is needed: only where it seems to be, and never left behind."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from flows.server import early, embedded
from flows.server.early import EarlyServer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "prefect"
    (home / "trainflow" / "one").mkdir(parents=True)
    monkeypatch.setenv("PREFECT_HOME", str(home))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("PREFECT_PROFILES_PATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return home


def test_none_is_started_where_a_server_is_configured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert early._seems_needed(home)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    assert not early._seems_needed(home)
    assert EarlyServer.start() is None
    monkeypatch.delenv("PREFECT_API_URL")
    (home / "profiles.toml").write_text('active = "work"\n[profiles.work]\nPREFECT_API_URL = "http://10.0.0.1/api"\n')
    assert not early._seems_needed(home)
    (home / "profiles.toml").write_text('active = "ephemeral"\n')
    Path("prefect.toml").write_text('[api]\nurl = "http://10.0.0.1/api"\n')
    assert not early._seems_needed(home)


def test_none_is_started_beside_one_that_lives(home: Path) -> None:
    with (home / "trainflow" / "one" / embedded.SERVER_LOCK).open("w") as lock:
        assert early._seems_needed(home), "its server has ended"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not early._seems_needed(home)


@pytest.mark.parametrize("end", [lambda server: server._process.stdin.close(), EarlyServer.close])
def test_one_that_is_not_wanted_ends_also_with_its_starter(home: Path, end: object) -> None:
    server = EarlyServer.start()
    assert server is not None
    process = server._process
    assert process is not None
    assert callable(end)
    end(server)
    process.wait(20)
    assert not [*home.rglob(embedded.DESCRIPTION), *home.rglob(embedded.SERVER_LOCK)]


def test_one_that_could_not_load_is_no_server(home: Path, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    dead.wait()
    assert EarlyServer(dead).serve(tmp_path, tmp_path / "log", {}) is None
