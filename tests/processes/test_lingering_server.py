"""The embedded Prefect server after its last client: it waits for the next one, and is used only where it fits."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.server import embedded, membership
from flows.server.membership import Membership
from tests.support.prefect_home import make_home
from trainer_lib.errors import ConfigError


# ------------------------------------------------------------------------------------------------ the locks alone
@pytest.fixture
def lock(tmp_path: Path) -> Iterator[int]:
    descriptor = _open_lock(tmp_path)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def linger(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    monkeypatch.setattr(embedded, "_LOOK_S", 0.05)
    monkeypatch.setattr(embedded, "_has_database", lambda: True)
    return lambda seconds: monkeypatch.setenv(embedded.LINGER, str(seconds))


def _open_lock(folder: Path) -> int:
    return os.open(folder / embedded.CLIENTS_LOCK, os.O_RDWR | os.O_CREAT, 0o600)


def _lingers(folder: Path, lock: int) -> bool:
    fcntl.flock(lock, fcntl.LOCK_EX)
    return embedded._lingers(folder, lock, lambda: None)


def _is_locked(folder: Path) -> bool:
    other = _open_lock(folder)
    try:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(other)
    return False


@pytest.mark.parametrize("seconds", [0.2, 0])
def test_a_server_without_a_client_ends_after_its_time_with_the_lock_in_its_hand(
    tmp_path: Path, lock: int, linger: Callable[[float], None], seconds: float
) -> None:
    linger(seconds)
    began = time.monotonic()
    assert not _lingers(tmp_path, lock)
    assert time.monotonic() - began > seconds
    assert _is_locked(tmp_path), "a client that came now would talk to a server that goes away"


@pytest.mark.parametrize("stays", [True, False])
def test_a_client_is_noticed_also_when_it_has_gone_again(
    tmp_path: Path, lock: int, linger: Callable[[float], None], stays: bool
) -> None:
    linger(30)
    client = _open_lock(tmp_path)

    def join() -> None:
        time.sleep(0.1)
        fcntl.flock(client, fcntl.LOCK_SH)
        os.utime(client)
        if not stays:
            fcntl.flock(client, fcntl.LOCK_UN)

    thread = threading.Thread(target=join)
    thread.start()
    assert _lingers(tmp_path, lock)
    thread.join()
    os.close(client)


def test_the_end_of_its_folder_is_its_own(tmp_path: Path, linger: Callable[[float], None]) -> None:
    linger(30)
    folder = tmp_path / "home"
    folder.mkdir()
    lock = _open_lock(folder)
    shutil.rmtree(folder)
    assert not _lingers(folder, lock)
    # A home that was made again is another server's.
    folder.mkdir()
    os.close(_open_lock(folder))
    assert not _lingers(folder, lock)
    os.close(lock)


def test_a_server_that_is_still_at_work_is_not_ended() -> None:
    ends = time.monotonic() + 1.0

    def work() -> None:
        while time.monotonic() < ends:
            sum(range(1000))

    worker = threading.Thread(target=work)
    worker.start()
    embedded._settle()
    settled = time.monotonic()
    worker.join()
    assert settled > ends, "the last states of a run were in its queues"
    began = time.monotonic()
    embedded._settle()
    assert time.monotonic() - began < 4.0, "an idle one ends at once"


# ------------------------------------------------------------------------------------------------ with a server
@pytest.fixture
def home(tmp_path: Path, prefect_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    from prefect import settings

    monkeypatch.setenv(embedded.LINGER, "300")
    home = make_home(tmp_path / "home", prefect_database)
    updates: dict[Any, Any] = {settings.PREFECT_API_URL: None, settings.PREFECT_HOME: home}
    updates[settings.PREFECT_API_DATABASE_CONNECTION_URL] = f"sqlite+aiosqlite:///{home / 'prefect.db'}"
    with settings.temporary_settings(updates):
        yield home
    for server in _servers(home):
        server.kill()
        server.wait(10)


def _servers(home: Path) -> list[psutil.Process]:
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if each.info["cmdline"] and each.info["cmdline"][-1].startswith(str(home))
    ]


def _join() -> tuple[Membership, int]:
    """A client of the server, and the server's process."""
    from prefect.settings import get_current_settings

    client = Membership(get_current_settings())
    client.wait()
    pid = client._server_pid()
    assert pid is not None
    return client, pid


def test_the_next_commands_find_it_until_its_home_is_removed(home: Path) -> None:
    client, server = _join()
    url, auth = client.wait()
    flow = embedded._request(url, auth, "/api/flows/", {"name": "pipeline"})["id"]
    served = {"name": "nightly", "flow_id": flow, "tags": [embedded.SERVED_TAG]}
    deployment = embedded._request(url, auth, "/api/deployments/", served)
    assert not deployment["paused"]
    began = time.monotonic()
    client.leave()
    assert time.monotonic() - began < 1.0, "a command does not wait for a server that stays"

    (first, first_server), (second, second_server) = _join(), _join()
    assert first_server == second_server == server
    named = {"deployments": {"id": {"any_": [deployment["id"]]}}}
    [nightly] = embedded._request(url, auth, "/api/deployments/filter", named)
    assert nightly["paused"], "no process serves it any more, and its runs would pile up"
    first.leave()
    second.leave()
    [process] = _servers(home)
    shutil.rmtree(home)
    process.wait(20)


def test_one_that_hangs_or_is_of_another_installation_is_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, hung = _join()
    client.leave()
    os.kill(hung, signal.SIGSTOP)  # perhaps with the clients' lock in its hand
    monkeypatch.setattr(membership, "_HUNG_S", 1.0)
    client, older = _join()
    assert older != hung
    assert [server.pid for server in _servers(home)] == [older]

    # After an upgrade: while a command of before is at work its server is shared, later it is not.
    monkeypatch.setattr(membership, "_identify", lambda settings: "another version")
    other, shared = _join()
    assert shared == older
    other.leave()
    client.leave()
    client, newer = _join()
    assert newer != older
    assert [server.pid for server in _servers(home)] == [newer]
    client.leave()


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.LINGER, text)
    with pytest.raises(ConfigError) as refused:
        membership._read_linger_s()
    assert refused.value.field == embedded.LINGER
