"""A folder has one holder at a time; the dead and the stopped are replaced, and cannot commit afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.faulty import Faults
from trainer_lib.commit import read_commit, write_commit
from trainer_lib.errors import StorageError
from trainer_lib.guard import start_time
from trainer_lib.locks.lease import Holder, acquire_lease
from trainer_lib.storage import Store


def lease_files(store: Store) -> list[str]:
    return store.children("lease")


def test_a_waiting_process_does_not_repeat_work_that_got_done(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    first = acquire_lease(store)
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

    assert acquire_lease(store, wait=done, poll_s=0.01) is None
    timer.join()


def test_a_long_beat_keeps_the_lease_alive(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    until = time.monotonic() + 1.5
    with acquire_lease(store, ttl_s=0.4) as lease:  # type: ignore[union-attr]
        assert acquire_lease(store, wait=lambda: time.monotonic() > until, poll_s=0.02) is None
        lease.ensure_held()


def test_a_holder_learns_from_its_beat_that_it_lost(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    lease = acquire_lease(store, ttl_s=0.15)
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
    with acquire_lease(store, ttl_s=1000, poll_s=0.02) as lease:  # type: ignore[union-attr]
        assert 0.5 <= time.monotonic() - began < 30
        assert lease.epoch == 8


@pytest.mark.parametrize("record", [b"", b"{}", b"[" * 4000, b"\xff", b'{"pid": "x"}', b"null", bytes(9000)])
def test_an_unreadable_record_is_waited_out(record: bytes, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    store.write_bytes("lease/00000001.json", record)
    with acquire_lease(store, ttl_s=0.1, poll_s=0.02) as lease:  # type: ignore[union-attr]
        assert lease.epoch == 2


def test_one_who_looked_too_long_ago_does_not_take_an_old_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_lib.locks import lease as module

    store = Store.open(tmp_path / "s")
    with acquire_lease(store), acquire_lease(store.child("other")):  # type: ignore[union-attr]
        store.write_bytes("lease/00000005.json", Holder.this_process(30).to_bytes())
        assert module._take_epoch(store.child("lease"), 4, 30) is None
    assert "00000004.json" not in lease_files(store)


def test_of_threads_that_race_one_holds_at_a_time(memory_url: str) -> None:
    store = Store.open(memory_url)
    inside: list[int] = []

    def work() -> None:
        for _ in range(5):
            with acquire_lease(Store.open(memory_url), poll_s=0.005):  # type: ignore[union-attr]
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
    with acquire_lease(store):  # type: ignore[union-attr]
        taking = faults.count
    store.delete_tree()
    for at in range(1, taking + 1):
        faults.plan(at, kind)  # type: ignore[arg-type]
        try:
            lease = acquire_lease(store, ttl_s=1000, poll_s=1000)
        except StorageError:
            lease = acquire_lease(store, ttl_s=1000, poll_s=1000)
        assert lease is not None
        lease.release()
        faults.plan(None)


def test_when_the_store_cannot_be_asked_nothing_may_be_committed(faulty_url: str, faults: Faults) -> None:
    store = Store.open(faulty_url)
    with acquire_lease(store) as lease:  # type: ignore[union-attr]
        store.write_bytes("x", b"1")
        faults.plan(1)
        with pytest.raises(StorageError):
            write_commit(store, "stage", [], {}, guard=lease.ensure_held)
        faults.plan(None)
        assert read_commit(store) is None


@pytest.mark.parametrize(
    ("answer", "is_gone"), [(PermissionError(), False), (ProcessLookupError(), True), (None, False)]
)
def test_a_process_that_the_system_hides_is_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch, answer: OSError | None, is_gone: bool
) -> None:
    """With hidepid, /proc shows no process of another user; a kill is refused where there is one."""

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (4321, 0)
        if answer is not None:
            raise answer

    holder = replace(Holder.this_process(), pid=4321)
    monkeypatch.setattr("trainer_lib.guard._read_stat", lambda pid: None)
    monkeypatch.setattr("trainer_lib.guard.os.kill", kill)
    assert holder.is_gone() is is_gone
    assert not holder.is_alive()


@pytest.mark.parametrize("pid", [0, -1, 2**70])
def test_what_is_not_the_number_of_a_process_is_gone(pid: int) -> None:
    assert replace(Holder.this_process(), pid=pid).is_gone()


def test_a_process_that_has_ended_and_was_not_waited_for_is_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        holder = replace(Holder.this_process(), pid=process.pid, started=start_time(process.pid) or "")
        assert not holder.is_gone()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert holder.is_gone()


def test_drafts_of_killed_processes_go_with_the_next_holder(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.write_bytes("lease/.00000001.json.0123456789abcdef.tmp", b"half")
    with acquire_lease(store) or pytest.fail("it is free"):
        assert not [name for name in store.child("lease").children() if name.endswith(".tmp")]
