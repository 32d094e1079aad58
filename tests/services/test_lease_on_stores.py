"""The lease on every kind of store and among several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from trainer_lib.commit import read_commit, write_commit
from trainer_lib.errors import LeaseLostError
from trainer_lib.locks.lease import Holder, acquire_lease
from trainer_lib.storage import Store

HOLD = """
import sys
from trainer_lib.errors import TrainflowError
from trainer_lib.locks.lease import acquire_lease
from trainer_lib.commit import write_commit
from trainer_lib.storage import Store

store = Store.open(sys.argv[1])
with acquire_lease(store, ttl_s=float(sys.argv[2]), poll_s=0.02) as lease:
    print(lease.epoch, flush=True)
    for line in sys.stdin:
        try:
            write_commit(store, "stage", [], {"by": lease.epoch}, guard=lease.ensure_held)
            print("committed", flush=True)
        except TrainflowError as error:
            print(type(error).__name__, flush=True)
"""


COUNT = """
import sys
from trainer_lib.locks.lease import acquire_lease
from trainer_lib.storage import Store

store = Store.open(sys.argv[1])
for _ in range(int(sys.argv[2])):
    with acquire_lease(store, poll_s=0.01) as lease:
        count = int(store.read_bytes("count"))
        store.write_bytes("count", str(count + 1).encode())
        lease.ensure_held()
"""


class Process:
    """A script in a process of its own."""

    def __init__(self, code: str, *args: str) -> None:
        command = [sys.executable, "-c", code, *args]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.popen = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, line: str | None = None) -> str:
        """Send a line, if any, and read one."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        if line is not None:
            self.popen.stdin.write(line + "\n")
        return self.popen.stdout.readline().strip()

    def end(self) -> int:
        """Close its input and wait."""
        self.popen.send_signal(signal.SIGCONT)
        self.popen.communicate(timeout=30)
        return self.popen.returncode


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Process]:
    """Another process that holds the folder for as long as it lives, with a time-to-live of one second."""
    process = Process(HOLD, str(tmp_path / "s"), "1.0")
    assert process.ask() == "1"
    yield process
    process.end()


def lease_files(store: Store) -> list[str]:
    return store.children("lease")


def test_a_free_folder_is_had_at_once_and_epochs_count_on(any_store: Store) -> None:
    for epoch in (1, 2, 3):
        with acquire_lease(any_store) as lease:  # type: ignore[union-attr]
            assert lease.epoch == epoch
            lease.ensure_held()
            assert not lease.lost
        with pytest.raises(LeaseLostError):
            lease.ensure_held()
        assert lease_files(any_store) == [f"0000000{epoch}.{kind}" for kind in ("beat", "json", "released")]


def test_release_ends_the_thread(any_store: Store) -> None:
    lease = acquire_lease(any_store)
    assert lease is not None
    name = "trainflow-lease-1"
    assert name in [thread.name for thread in threading.enumerate()]
    lease.release()
    lease.release()
    assert name not in [thread.name for thread in threading.enumerate()]


def test_a_living_holder_keeps_others_out_until_the_work_is_done(any_store: Store) -> None:
    looks: list[int] = []
    told: list[Holder | None] = []

    def done() -> bool:
        looks.append(1)
        return len(looks) == 4

    with acquire_lease(any_store, ttl_s=30) as lease:  # type: ignore[union-attr]
        assert acquire_lease(any_store, wait=done, on_wait=told.append, poll_s=0.01) is None
        lease.ensure_held()
    assert len(looks) == 4
    assert len(told) == 1
    assert told[0] is not None
    assert told[0].pid == os.getpid()
    assert f"process {os.getpid()} on " in str(told[0])


def test_a_killed_holder_on_this_machine_is_replaced_at_once(holder: Process, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    holder.popen.kill()  # not waited for: a zombie is as dead as one that was collected
    while Path(f"/proc/{holder.popen.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    began = time.monotonic()
    with acquire_lease(store, ttl_s=1000, poll_s=1000) as lease:  # type: ignore[union-attr]
        assert time.monotonic() - began < 5
        assert lease.epoch == 2
        assert lease_files(store) == ["00000002.beat", "00000002.json"]


def test_a_stopped_holder_is_replaced_and_cannot_commit_when_it_wakes(holder: Process, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    holder.popen.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with acquire_lease(store, poll_s=0.02) as lease:  # type: ignore[union-attr]
        assert time.monotonic() - began >= 0.9
        assert lease.epoch == 2
        holder.popen.send_signal(signal.SIGCONT)
        assert holder.ask("commit") == "LeaseLostError"
        assert read_commit(store) is None
        write_commit(store, "stage", [], {"by": 2}, guard=lease.ensure_held)
    commit = read_commit(store)
    assert commit is not None
    assert commit.meta == {"by": 2}


@pytest.mark.parametrize("where", ["file", "s3"])
def test_of_processes_that_race_one_holds_at_a_time(where: str, tmp_path: Path, s3_url: str) -> None:
    url = str(tmp_path / "s") if where == "file" else s3_url
    store = Store.open(url)
    store.write_bytes("count", b"0")
    rounds = 2
    processes = [Process(COUNT, url, str(rounds)) for _ in range(3)]
    assert [process.end() for process in processes] == [0, 0, 0]
    assert store.read_bytes("count") == str(3 * rounds).encode()
