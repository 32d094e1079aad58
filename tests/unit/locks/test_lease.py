"""A folder, a file and each part of a job have one holder; the dead and the stopped are replaced, and cannot commit."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty import Faults
from trainer_lib.errors import LeaseLostError, StorageError
from trainer_lib.guard import start_time
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.file_lock import is_locked, try_lock
from trainer_lib.locks.lease import Holder, acquire_lease
from trainer_lib.locks.shared_parts import BLOCK, SharedParts
from trainer_lib.storage import Store
from trainer_lib.storage.commit import read_commit, write_commit

UNREADABLE = [b"", b"{}", b"[" * 4000, b"\xff", b'{"pid": "x"}', b"null", bytes(9000)]


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
    with pytest.raises(LeaseLostError, match="Another process has taken this folder over"):
        lease.ensure_held()
    lease.release()
    assert "00000001.released" not in store.children("lease")


def test_a_holder_elsewhere_is_given_its_own_time(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    record = json.loads(Holder.this_process(0.5).to_bytes()) | {"machine": "another-host", "pid": 1}
    store.write_bytes("lease/00000007.json", json.dumps(record).encode())
    began = time.monotonic()
    with acquire_lease(store, ttl_s=1000, poll_s=0.02) as lease:  # type: ignore[union-attr]
        assert 0.5 <= time.monotonic() - began < 30
        assert lease.epoch == 8


@pytest.mark.parametrize("record", [*UNREADABLE, {"ttl_s": "9"}, {"id": "../up"}, {"pid": 9**999}, {"ttl_s": 7200}])
@pytest.mark.parametrize("epoch", ["00000001", "99999999", "9" * 200])
def test_an_unreadable_record_is_waited_out(record: bytes | dict[str, object], epoch: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s")
    if isinstance(record, dict):
        record = json.dumps(asdict(Holder.this_process(30)) | {"machine": "another-host"} | record).encode()
    store.write_bytes(f"lease/{epoch}.json", record)
    store.write_bytes(f"lease/{epoch}.beat", bytes(9000))
    with acquire_lease(store, ttl_s=0.1, poll_s=0.02) as lease:  # type: ignore[union-attr]
        assert lease.epoch == int(epoch) + 1


def test_one_who_looked_too_long_ago_takes_no_old_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_lib.locks import lease as module

    store = Store.open(tmp_path / "s")
    with acquire_lease(store), acquire_lease(store.child("other")):  # type: ignore[union-attr]
        store.write_bytes("lease/00000005.json", Holder.this_process(30).to_bytes())
        assert module._take_epoch(store.child("lease"), 4, 30) is None
    assert "00000004.json" not in store.children("lease")


@pytest.mark.parametrize("kind", ["error", "after", "full"])
def test_a_store_that_fails_while_taking_blocks_no_next_try(kind: str, faulty_url: str, faults: Faults) -> None:
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
def test_a_hidden_process_is_alive(monkeypatch: pytest.MonkeyPatch, answer: OSError | None, is_gone: bool) -> None:
    """With hidepid, /proc shows no process of another user; a kill is refused where there is one."""

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (4321, 0)
        if answer is not None:
            raise answer

    holder = replace(Holder.this_process(), pid=4321)
    monkeypatch.setattr("trainer_lib.guard._read_stat", lambda pid: None)
    monkeypatch.setattr("trainer_lib.guard.os.kill", kill)
    assert holder.is_gone() is is_gone and not holder.is_alive()


def test_a_process_that_has_ended_and_was_not_waited_for_is_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        holder = replace(Holder.this_process(), pid=process.pid, started=start_time(process.pid) or "")
        assert not holder.is_gone()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert holder.is_gone()
    for pid in (0, -1, 2**70):  # not the number of a process
        assert replace(Holder.this_process(), pid=pid).is_gone()


def test_drafts_of_killed_processes_go_with_the_next_holder(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.write_bytes("lease/.00000001.json.0123456789abcdef.tmp", b"half")
    with acquire_lease(store) or pytest.fail("it is free"):
        assert not [name for name in store.child("lease").children() if name.endswith(".tmp")]


def test_an_exclusive_lock_excludes_every_other_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert not path.exists(), "to look makes no file"
    with path.open("ab") as first:
        assert not is_locked(path)
        assert try_lock(first.fileno())
        assert is_locked(path)
        with path.open("ab") as second:
            assert not try_lock(second.fileno()) and not try_lock(second.fileno(), shared=True)
            assert try_lock(first.fileno(), shared=True), "its own lock becomes the other kind"
            assert try_lock(second.fileno(), shared=True) and not try_lock(first.fileno())
            assert not is_locked(path), "others may still share it"
    with path.open("ab") as third:
        assert try_lock(third.fileno())


class _Finished:
    """Parts that were finished, with the worker that did each."""

    def __init__(self) -> None:
        self.by: dict[int, list[str]] = {}

    def list_finished(self, block: int) -> set[int]:
        return {part for part in self.by if part // BLOCK == block}

    def is_finished(self, part: int) -> bool:
        return part in self.by


def test_workers_share_the_parts_and_each_is_done_once(tmp_path: Path) -> None:
    finished = _Finished()

    def work(name: str) -> None:
        with SharedParts(Store.open(tmp_path), finished, total=40, poll_s=0.01) as shared:
            for part in shared:
                assert shared.is_ours(part)
                finished.by.setdefault(part, []).append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished.by) == list(range(40)) and all(len(names) == 1 for names in finished.by.values())
    assert len({name for names in finished.by.values() for name in names}) > 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # no claim, no sign of life


def test_the_end_may_be_found_while_others_hold_parts_beyond_it(tmp_path: Path) -> None:
    finished, seen = _Finished(), []
    with SharedParts(Store.open(tmp_path), finished) as shared:
        for part in shared:
            seen.append(part)
            if part == 3:
                shared.end_at(3)
            else:
                finished.by[part] = ["us"]
    assert seen == [0, 1, 2, 3]


def _work_through(folder: Path, finished: _Finished, **how: Any) -> list[int]:
    """The parts that one worker got, in order; each is finished by it."""
    seen = []
    with SharedParts(Store.open(folder), finished, **how) as shared:
        for part in shared:
            seen.append(part)
            finished.by[part] = ["us"]
    return seen


def _claim(folder: Path, part: int, holder: Holder) -> None:
    path = folder / "claims" / f"{part // BLOCK:06d}" / f"{part:08d}" / WRITING
    path.parent.mkdir(parents=True)
    path.write_bytes(holder.to_bytes())


def test_the_part_of_a_process_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    here = Holder.this_process(ttl_s=30.0)
    _claim(tmp_path, 1, replace(here, id="dead", started="1"))  # another process had this pid
    _claim(tmp_path, 2, replace(here, id="../up", started=""))  # no process has such an id
    (tmp_path / "claims" / "000000" / "²").mkdir()  # a digit, and no number
    assert _work_through(tmp_path, _Finished(), total=3) == [0, 1, 2]


def test_the_part_of_a_silent_machine_is_taken_over_once_its_beat_stood_still(tmp_path: Path) -> None:
    _claim(tmp_path, 0, replace(Holder.this_process(ttl_s=0.3), id="away", machine="another/machine/1"))
    (beat := tmp_path / "claims" / "away.beat").write_text("0")
    beats = 0

    def live() -> None:
        nonlocal beats
        while beats < 10:
            time.sleep(0.05)
            beats += 1
            beat.write_text(str(beats) if beats < 10 else "0" * 9000)

    other = threading.Thread(target=live)
    other.start()
    finished, seen = _Finished(), []
    with SharedParts(Store.open(tmp_path), finished, total=2, poll_s=0.02) as shared:
        for part in shared:
            seen.append((part, beats))
            finished.by[part] = ["us"]
    other.join()
    assert [part for part, _ in seen] == [1, 0]
    assert seen[1][1] == 10  # not before its last beat


def test_a_part_that_another_process_took_for_lost_is_not_ours_any_more(tmp_path: Path) -> None:
    finished = _Finished()
    with SharedParts(Store.open(tmp_path), finished, total=1) as slow:
        part = next(iter(slow))
        # As after a long pause: the other one has watched our beat stand still.
        claim = tmp_path / "claims" / "000000" / f"{part:08d}" / WRITING
        ours = Holder.from_bytes(claim.read_bytes())
        assert ours is not None and ours.pid == os.getpid()
        claim.write_bytes(replace(ours, id="other", started="1").to_bytes())
        assert not slow.is_ours(part)
    assert claim.exists()  # it is the other one's


def test_parts_of_several_blocks_are_listed_a_block_at_a_time(tmp_path: Path) -> None:
    finished, looked = _Finished(), []
    finished.by = {part: ["before"] for part in range(2 * BLOCK + 3) if part not in (5, BLOCK, 2 * BLOCK + 2)}
    list_block = finished.list_finished
    finished.list_finished = lambda block: looked.append(block) or list_block(block)  # type: ignore[method-assign, func-returns-value]
    _claim(tmp_path, BLOCK, replace(Holder.this_process(ttl_s=0.1), id="away", machine="another/machine/1"))
    seen = _work_through(tmp_path, finished, total=2 * BLOCK + 3, poll_s=0.02)
    assert seen == [5, 2 * BLOCK + 2, BLOCK]  # another machine's part once its worker is silent
    assert looked[:4] == [0, 1, 1, 2]  # again where a claim was met
    assert set(looked[4:]) == {1}  # and then only where others are at work
