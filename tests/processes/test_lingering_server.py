"""The embedded Prefect server after its last client: it waits for the next one, and is used only where it fits."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect_home import embedded_servers, make_home
from trainer_lib.errors import ConfigError
from trainer_lib.locks.file_lock import is_locked
from trainflow.flows.server import embedded, membership
from trainflow.flows.server.membership import Membership


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[int]:
    descriptor = _open_lock(tmp_path)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_LOOK_S", 0.02)


def _open_lock(folder: Path) -> int:
    return os.open(folder / embedded.CLIENTS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)


@pytest.mark.parametrize("seconds", [0.2, 0])
def test_a_server_without_a_client_ends_after_its_time_with_the_lock_in_its_hand(
    tmp_path: Path, lock: int, seconds: float
) -> None:
    began = time.monotonic()
    embedded.wait_for_end(tmp_path, lock, seconds)
    assert time.monotonic() - began > seconds
    assert is_locked(tmp_path / embedded.CLIENTS_LOCK), "a client that came now would talk to a server that goes away"


def test_a_client_that_has_gone_again_starts_the_time_again(tmp_path: Path, lock: int) -> None:
    client = _open_lock(tmp_path)
    began = time.monotonic()

    def join() -> None:
        time.sleep(0.3)
        fcntl.flock(client, fcntl.LOCK_SH)
        time.sleep(0.1)
        os.close(client)

    thread = threading.Thread(target=join)
    thread.start()
    embedded.wait_for_end(tmp_path, lock, 0.5)
    thread.join()
    assert time.monotonic() - began > 0.85


def test_the_end_of_its_folder_is_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    lock = _open_lock(folder)
    shutil.rmtree(folder)
    embedded.wait_for_end(folder, lock, 30)
    # A home that was made again is another server's.
    folder.mkdir()
    os.close(_open_lock(folder))
    embedded.wait_for_end(folder, lock, 30)
    os.close(lock)


def test_a_server_that_is_still_at_work_is_not_ended() -> None:
    ends = time.monotonic() + 1.0

    def work() -> None:
        while time.monotonic() < ends:
            sum(range(1000))

    worker = threading.Thread(target=work)
    worker.start()
    embedded.settle()
    settled = time.monotonic()
    worker.join()
    assert settled > ends, "the last states of a run were in its queues"
    began = time.monotonic()
    embedded.settle()
    assert time.monotonic() - began < 4.0, "an idle one ends at once"


@pytest.fixture
def home(tmp_path: Path, prefect_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    from prefect import settings

    monkeypatch.setenv(embedded.LINGER, "300")
    home = make_home(tmp_path / "home", prefect_database)
    updates: dict[Any, Any] = {settings.PREFECT_API_URL: None, settings.PREFECT_HOME: home}
    updates[settings.PREFECT_API_DATABASE_CONNECTION_URL] = f"sqlite+aiosqlite:///{home / 'prefect.db'}"
    with settings.temporary_settings(updates):
        yield home
    for server in embedded_servers(home):
        server.kill()
        server.wait(10)


def _join() -> tuple[Membership, int]:
    """A client of the server, and the server's process."""
    from prefect.settings import get_current_settings

    client = Membership(get_current_settings())
    client.wait()
    pid = client.server_pid()
    assert pid is not None
    return client, pid


def test_the_next_commands_find_it_until_its_home_is_removed(home: Path) -> None:
    client, server = _join()
    began = time.monotonic()
    client.leave()
    assert time.monotonic() - began < 1.0, "a command does not wait for a server that stays"
    time.sleep(1.0)  # it looks for clients ten times a second

    (first, first_server), (second, second_server) = _join(), _join()
    assert first_server == second_server == server
    first.leave()
    second.leave()
    [process] = embedded_servers(home)
    shutil.rmtree(home)
    process.wait(20)


def test_one_that_hangs_is_of_another_installation_or_lost_its_database_is_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, hung = _join()
    client.leave()
    os.kill(hung, signal.SIGSTOP)
    client, older = _join()
    assert older != hung
    assert [server.pid for server in embedded_servers(home)] == [older]

    # After an upgrade: while a command of before is at work its server is shared, later it is not.
    monkeypatch.setattr(membership, "_identify", lambda settings: "another version")
    other, shared = _join()
    assert shared == older
    other.leave()
    client.leave()
    client, newer = _join()
    assert newer != older
    assert [server.pid for server in embedded_servers(home)] == [newer]
    client.leave()

    (home / "prefect.db").unlink()
    client, last = _join()
    assert last != newer
    assert (home / "prefect.db").exists()
    client.leave()


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.LINGER, text)
    with pytest.raises(ConfigError) as refused:
        membership._read_linger_s()
    assert refused.value.field == embedded.LINGER
