"""A folder has one holder at a time; the dead and the stopped are replaced, and cannot commit afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faulty import Faults
from tests.support.repository import ROOT
from trainer_lib.commit import read_commit, write_commit
from trainer_lib.errors import LeaseLostError, StorageError
from trainer_lib.locks.lease import Holder, acquire
from trainer_lib.storage import Store

HOLD = """
import sys
from trainer_lib.errors import TrainflowError
from trainer_lib.locks.lease import acquire
from trainer_lib.commit import write_commit
from trainer_lib.storage import Store

store = Store.open(sys.argv[1])
with acquire(store, ttl_s=float(sys.argv[2]), poll_s=0.02) as lease:
    print(lease.epoch, flush=True)
    for line in sys.stdin:
        try:
            write_commit(store, "stage", [], {"by": lease.epoch}, guard=lease.check)
            print("committed", flush=True)
        except TrainflowError as error:
            print(type(error).__name__, flush=True)
"""

COUNT = """
import sys
from trainer_lib.locks.lease import acquire
from trainer_lib.storage import Store

store = Store.open(sys.argv[1])
for _ in range(int(sys.argv[2])):
    with acquire(store, poll_s=0.01) as lease:
        count = int(store.read_bytes("count"))
        store.write_bytes("count", str(count + 1).encode())
        lease.check()
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
        with acquire(any_store) as lease:  # type: ignore[union-attr]
            assert lease.epoch == epoch
            lease.check()
            assert not lease.lost
        with pytest.raises(LeaseLostError):
            lease.check()
        assert lease_files(any_store) == [f"0000000{epoch}.{kind}" for kind in ("beat", "json", "released")]


def test_release_ends_the_thread(any_store: Store) -> None:
    lease = acquire(any_store)
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

    with acquire(any_store, ttl_s=30) as lease:  # type: ignore[union-attr]
        assert acquire(any_store, wait=done, on_wait=told.append, poll_s=0.01) is None
        lease.check()
    assert len(looks) == 4
    assert len(told) == 1
    assert told[0] is not None
    assert told[0].pid == os.getpid()
    assert f"process {os.getpid()} on " in str(told[0])


def test_a_waiting_process_does_not_repeat_work_that_got_done(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    first = acquire(store)
    assert first is not None
    waiting = threading.Event()

    def finish() -> None:
        waiting.wait()
        store.write_bytes("result", b"1")
        first.release()

    timer = threading.Thread(target=finish)
    timer.start()

    def done() -> bool:
        waiting.set()
        return lease_files(store)[0].startswith("00000002") and store.exists("result")

    assert acquire(store, wait=done, poll_s=0.01) is None
    timer.join()


def test_a_long_beat_keeps_the_lease_alive(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    until = time.monotonic() + 1.5
    with acquire(store, ttl_s=0.4) as lease:  # type: ignore[union-attr]
        assert acquire(store, wait=lambda: time.monotonic() > until, poll_s=0.02) is None
        lease.check()


def test_a_killed_holder_on_this_machine_is_replaced_at_once(holder: Process, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    holder.popen.kill()  # not waited for: a zombie is as dead as one that was collected
    while Path(f"/proc/{holder.popen.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    began = time.monotonic()
    with acquire(store, ttl_s=1000, poll_s=1000) as lease:  # type: ignore[union-attr]
        assert time.monotonic() - began < 5
        assert lease.epoch == 2
        assert lease_files(store) == ["00000002.beat", "00000002.json"]


def test_a_stopped_holder_is_replaced_and_cannot_commit_when_it_wakes(holder: Process, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    holder.popen.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with acquire(store, poll_s=0.02) as lease:  # type: ignore[union-attr]
        assert time.monotonic() - began >= 0.9
        assert lease.epoch == 2
        holder.popen.send_signal(signal.SIGCONT)
        assert holder.ask("commit") == "LeaseLostError"
        assert read_commit(store) is None
        write_commit(store, "stage", [], {"by": 2}, guard=lease.check)
    commit = read_commit(store)
    assert commit is not None
    assert commit.meta == {"by": 2}


def test_a_holder_learns_from_its_beat_that_it_lost(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    lease = acquire(store, ttl_s=0.15)
    assert lease is not None
    store.create("lease/00000002.json", Holder.this_process(30).to_bytes())
    lease._thread.join(timeout=10)
    assert lease.lost
    lease.release()
    assert "00000001.released" not in lease_files(store)


def test_a_holder_elsewhere_is_given_its_own_time(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    record = json.loads(Holder.this_process(0.5).to_bytes()) | {"machine": "another-host", "pid": 1}
    store.write_bytes("lease/00000007.json", json.dumps(record).encode())
    began = time.monotonic()
    with acquire(store, ttl_s=1000, poll_s=0.02) as lease:  # type: ignore[union-attr]
        assert 0.5 <= time.monotonic() - began < 30
        assert lease.epoch == 8


@pytest.mark.parametrize("record", [b"", b"{}", b"[" * 4000, b"\xff", b'{"pid": "x"}', b"null", bytes(9000)])
def test_an_unreadable_record_is_waited_out(record: bytes, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    store.write_bytes("lease/00000001.json", record)
    with acquire(store, ttl_s=0.1, poll_s=0.02) as lease:  # type: ignore[union-attr]
        assert lease.epoch == 2


def test_one_who_looked_too_long_ago_does_not_take_an_old_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_lib.locks import lease as module

    store = Store.open(tmp_path / "s")
    with acquire(store), acquire(store.child("other")):  # type: ignore[union-attr]
        store.write_bytes("lease/00000005.json", Holder.this_process(30).to_bytes())
        assert module._take(store.child("lease"), 4, 30) is None
    assert "00000004.json" not in lease_files(store)


@pytest.mark.parametrize("where", ["file", "s3"])
def test_of_processes_that_race_one_holds_at_a_time(where: str, tmp_path: Path, s3_url: str) -> None:
    url = str(tmp_path / "s") if where == "file" else s3_url
    store = Store.open(url)
    store.write_bytes("count", b"0")
    rounds = 2
    processes = [Process(COUNT, url, str(rounds)) for _ in range(3)]
    assert [process.end() for process in processes] == [0, 0, 0]
    assert store.read_bytes("count") == str(3 * rounds).encode()


def test_of_threads_that_race_one_holds_at_a_time(memory_url: str) -> None:
    store = Store.open(memory_url)
    inside: list[int] = []

    def work() -> None:
        for _ in range(5):
            with acquire(Store.open(memory_url), poll_s=0.005):  # type: ignore[union-attr]
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lease_files(store) == ["00000020.beat", "00000020.json", "00000020.released"]


@pytest.mark.parametrize("kind", ["error", "after", "full"])
def test_a_store_that_fails_while_taking_does_not_block_the_next_try(
    kind: str, faulty_url: str, faults: Faults
) -> None:
    store = Store.open(faulty_url)
    faults.plan(None)
    with acquire(store):  # type: ignore[union-attr]
        taking = faults.count
    store.delete_tree()
    for at in range(1, taking + 1):
        faults.plan(at, kind)  # type: ignore[arg-type]
        try:
            lease = acquire(store, ttl_s=1000, poll_s=1000)
        except StorageError:
            lease = acquire(store, ttl_s=1000, poll_s=1000)
        assert lease is not None
        lease.release()
        faults.plan(None)


def test_when_the_store_cannot_be_asked_nothing_may_be_committed(faulty_url: str, faults: Faults) -> None:
    store = Store.open(faulty_url)
    with acquire(store) as lease:  # type: ignore[union-attr]
        store.write_bytes("x", b"1")
        faults.plan(1)
        with pytest.raises(StorageError):
            write_commit(store, "stage", [], {}, guard=lease.check)
        faults.plan(None)
        assert read_commit(store) is None
