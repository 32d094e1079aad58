"""What every kind of store promises: files, listings, parts of files, exclusive creation, commits, claims, leases."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import answer, start_script
from tests.support.commits import committed, write_files
from tests.support.faulty import Faults
from tests.support.tensor_zoo import NAME, assert_same, save, zoo
from trainer_lib.checkpoint.tensors import read_safetensors
from trainer_lib.errors import ConfigError, DamagedError, LeaseLostError, StorageError, StorageFullError
from trainer_lib.locks import claim
from trainer_lib.locks.lease import Holder, acquire_lease
from trainer_lib.storage import FileEntry, Store, remote
from trainer_lib.storage.commit import COMMIT, read_commit, verify_files, withdraw_folder, write_commit


def sizes(store: Store, folder: str = "") -> list[tuple[str, int]]:
    return [(info.path, info.size) for info in (store.list(folder) if folder else store.list())]


def at_once(attempt: Callable[[int], bool], count: int = 4) -> list[bool]:
    """What each of several threads returns that start together."""
    barrier = threading.Barrier(count)

    def run(number: int) -> bool:
        barrier.wait()
        return attempt(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


# ------------------------------------------------------------------------------------------------------------- files
def test_written_bytes_come_back_with_their_digest_and_are_replaced(any_store: Store) -> None:
    data = os.urandom(100_003)
    for content in (data, b"short", b"", data):
        entry = any_store.write_bytes("a/b/c.bin", content)
        assert entry == FileEntry("a/b/c.bin", len(content), hashlib.sha256(content).hexdigest())
        assert any_store.exists("a/b/c.bin")
        assert any_store.read_bytes("a/b/c.bin") == content
        assert any_store.size("a/b/c.bin") == len(content)
        assert any_store.digest("a/b/c.bin") == entry.sha256
    assert len(any_store.read_bytes("a/b/c.bin", limit=len(data))) == len(data)
    with pytest.raises(DamagedError, match=f"more than {len(data) - 1:,} bytes"):
        any_store.read_bytes("a/b/c.bin", limit=len(data) - 1)
    for content in (b"first, and longer", b"second"):
        any_store.replace("folder/record", content)
        assert any_store.read_bytes("folder/record") == content
    assert any_store.children("folder") == ["record"]


def test_a_listing_tells_a_change_of_content_where_the_store_knows_it(any_store: Store) -> None:
    any_store.write_bytes("x", b"1")
    before = any_store.list()[0].tag
    any_store.write_bytes("x", b"2")
    after = any_store.list()[0].tag
    assert (before is None) == (after is None)
    assert before is None or before != after
    assert (before is not None) == any_store.url.startswith("s3://")


def test_an_absent_folder_is_empty_and_reading_from_it_names_the_url(any_store: Store) -> None:
    any_store.delete("x")
    any_store.delete_tree()
    any_store.delete_tree("y")
    any_store.ensure_writable()
    assert (any_store.list(), any_store.children()) == ([], [])
    assert not any_store.exists("x")
    assert any_store.read_if_exists("x") is None
    for read in (any_store.read_bytes, any_store.size, any_store.digest):
        with pytest.raises(StorageError, match="There is no such file") as caught:
            read("x")
        assert caught.value.field == f"{any_store.url}/x"


def test_listing_is_recursive_sorted_relative_and_fresh(any_store: Store, any_url: str) -> None:
    other = Store.open(any_url)
    assert other.list() == []
    for name in ("b/2", "a/x/1", "top", "b/10", "b-old/1"):
        any_store.write_bytes(name, name.encode())
    whole = [("a/x/1", 5), ("b-old/1", 7), ("b/10", 4), ("b/2", 3), ("top", 3)]
    assert sizes(any_store) == sizes(other) == whole
    assert sizes(any_store, "b") == [("b/10", 4), ("b/2", 3)], "b-old only begins alike"
    assert any_store.children() == ["a", "b", "b-old", "top"]
    assert any_store.children("a") == ["x"]
    any_store.delete("top")
    any_store.delete_tree("b")
    assert sizes(other) == whole[:2]
    assert any_store.children() == ["a", "b-old"]
    any_store.delete_tree()
    assert other.children() == []


def test_a_child_is_the_folder_below(any_store: Store) -> None:
    child = any_store.child("a", "b/c")
    child.write_bytes("x", b"1")
    assert child.url == f"{any_store.url}/a/b/c"
    assert sizes(any_store) == [("a/b/c/x", 1)]
    assert sizes(child) == [("x", 1)]
    assert any_store.child().url == any_store.url


def test_create_has_one_winner_and_keeps_the_first_bytes(any_store: Store) -> None:
    assert any_store.create("lock.json", b"first")
    assert not any_store.create("lock.json", b"second")
    assert any_store.read_bytes("lock.json") == b"first"
    any_store.delete("lock.json")
    assert any_store.create("lock.json", b"third")
    assert any_store.children() == ["lock.json"]
    assert any_store.exclusive or any_store.url.startswith("faulty://")
    for number in range(5 if any_store.exclusive else 0):
        won = at_once(lambda writer, name=f"{number}.json": any_store.create(name, str(writer).encode()), 6)  # type: ignore[misc]
        assert sum(won) == 1
        assert any_store.read_bytes(f"{number}.json") == str(won.index(True)).encode()


def test_an_exception_in_the_middle_leaves_no_file(any_store: Store) -> None:
    with pytest.raises(ZeroDivisionError), any_store.open_write("torn.bin") as writer:
        writer.write(b"half" * 1000)
        raise ZeroDivisionError
    gc.collect()  # a stream that publishes itself when it is collected would do so now
    assert not any_store.exists("torn.bin")
    with pytest.raises(RuntimeError, match="not finished"):
        _ = writer.entry


def test_streams_seek_and_read_in_pieces(any_store: Store) -> None:
    data = bytes(range(256)) * 40
    any_store.write_bytes("x", data)
    with any_store.open_read("x") as stream:
        assert stream.read(3) == data[:3]
        assert stream.seek(1000) == 1000
        buffer = bytearray(10)
        assert stream.readinto(buffer) == 10  # type: ignore[attr-defined]
        assert bytes(buffer) == data[1000:1010]
        assert stream.tell() == 1010
        assert stream.read() == data[1010:]
        assert stream.read(1) == b""


def test_two_readers_of_one_file_do_not_disturb_each_other(memory_url: str) -> None:
    store = Store.open(memory_url)
    store.write_bytes("x", b"0123456789")
    with store.open_read("x") as first, store.open_read("x") as second:
        assert first.read(5) == second.read(5) == b"01234"


def test_files_travel_to_and_from_the_local_disk_unless_they_are_not_the_committed_ones(
    any_store: Store, tmp_path: Path
) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(os.urandom(50_000))
    entry = any_store.upload(source, "up/x.bin")
    any_store.download("up/x.bin", tmp_path / "new" / "x.bin", expect=entry)
    assert (tmp_path / "new" / "x.bin").read_bytes() == source.read_bytes()
    any_store.write_bytes("up/x.bin", b"wrong")
    with pytest.raises(DamagedError, match="not the committed one") as caught:
        any_store.download("up/x.bin", tmp_path / "to" / "x.bin", expect=entry)
    assert caught.value.field == f"{any_store.url}/up/x.bin"
    assert list((tmp_path / "to").iterdir()) == []


def test_every_dtype_and_layout_of_tensors_comes_back_bit_for_bit(any_store: Store) -> None:
    tensors = zoo()
    entry = save(any_store, tensors)
    assert_same(read_safetensors(any_store, NAME, expect=entry), tensors)
    assert_same(read_safetensors(any_store, NAME), tensors)
    assert any_store.digest(NAME) == entry.sha256


@pytest.mark.parametrize("kind", ["error", "full", "short", "after"])
def test_each_failing_write_is_reported(kind: Any, faulty_url: str, faults: Faults) -> None:
    store = Store.open(faulty_url)
    store.write_bytes("probe", b"12345678")
    steps = [line.split()[0] for line in faults.log]
    assert steps == ["open", "write", "close"]
    for at, step in enumerate(steps, start=1):
        if kind == "short" and step != "write":
            continue
        faults.plan(at, kind)
        with pytest.raises(StorageFullError if kind == "full" else StorageError):
            store.write_bytes(f"x{at}", b"12345678")
        faults.plan(None)
        assert step == "open" or not store.exists(f"x{at}")


# ---------------------------------------------------------------------------------------------------- parts of files
@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PIECE", 1000)
    monkeypatch.setattr(remote, "GAP", 50)


@pytest.mark.usefixtures("small_pieces")
def test_parts_are_read_from_anywhere_in_any_order_and_none_beyond_the_end(any_store: Store) -> None:
    data, dice = os.urandom(20_000), random.Random(1)
    any_store.write_bytes("x", data)
    spans = [(0, 8), (0, 20_000), (999, 1001), (19_999, 20_000), (7, 7), (1500, 4500)]
    spans += [(start, dice.randrange(start, 20_001)) for start in (dice.randrange(20_000) for _ in range(40))]
    spans += [(100, 110), (100, 110), (0, 0), (20_000, 20_000)]
    buffers = [bytearray(end - start) for start, end in spans]
    any_store.read_into("x", [(start, memoryview(buffer)) for (start, _), buffer in zip(spans, buffers, strict=True)])
    assert buffers == [data[start:end] for start, end in spans]
    for start, end in ((19_990, 20_001), (20_000, 20_001), (20_500, 20_600)):
        with pytest.raises(StorageError) as caught:
            any_store.read_into("x", [(start, memoryview(bytearray(end - start)))])
        assert caught.value.field == f"{any_store.url}/x"
    with pytest.raises(StorageError):
        any_store.read_into("absent", [(0, memoryview(bytearray(1)))])
    with pytest.raises(ConfigError):
        any_store.read_into("../x", [(0, memoryview(bytearray(1)))])


@pytest.mark.usefixtures("small_pieces")
def test_neighbours_are_read_together_and_large_ranges_in_pieces() -> None:
    asked: list[tuple[int, int]] = []

    def read(ranges: Any) -> Iterator[bytes]:
        for start, end in ranges:
            asked.append((start, end))
            yield bytes(end - start)

    wanted = [(0, 10), (40, 10), (5000, 2500), (4960, 10), (9000, 1)]
    remote.scatter(read, [(start, memoryview(bytearray(size))) for start, size in wanted])
    assert asked == [(0, 50), (4960, 5960), (5960, 6960), (6960, 7500), (9000, 9001)]


# ----------------------------------------------------------------------------------------------------------- commits
def test_a_commit_is_read_as_it_was_written_and_withdrawn_whole(any_store: Store) -> None:
    assert read_commit(any_store) is None
    files = write_files(any_store)
    assert read_commit(any_store) is None
    commit = write_commit(any_store, "stage", files, {"step": 3, "nested": {"list": [1, 2.5, None]}})
    assert read_commit(any_store, kind="stage") == commit
    assert [entry.path for entry in commit.files] == ["a/x.bin", "b.bin", "z"]
    assert commit.entry("b.bin") == files[0]
    assert commit.entry("c") is None
    any_store.write_bytes("lease/1.json", b"not of the commit")
    assert verify_files(any_store, commit) == []
    with pytest.raises(DamagedError, match="of a stage, not of a checkpoint"):
        read_commit(any_store, kind="checkpoint")
    withdraw_folder(any_store)
    withdraw_folder(any_store)
    assert any_store.list() == []
    assert read_commit(any_store) is None


def test_the_second_commit_is_refused_and_of_several_at_once_one_wins(any_store: Store) -> None:
    first = committed(any_store)
    with pytest.raises(LeaseLostError, match="Another process has committed"):
        write_commit(any_store, "stage", [], {})
    assert read_commit(any_store) == first
    withdraw_folder(any_store)

    def attempt(number: int) -> bool:
        try:
            write_commit(any_store, "stage", [], {"number": number})
        except LeaseLostError:
            return False
        return True

    won = at_once(attempt)
    commit = read_commit(any_store)
    assert commit is not None
    assert won[commit.meta["number"]]
    assert sum(won) == 1 or not any_store.exclusive


def test_a_missing_or_short_file_or_the_guard_prevents_the_commit(any_store: Store) -> None:
    def lost() -> None:
        raise LeaseLostError("taken over")

    files = write_files(any_store)
    absent = FileEntry("never/written", 3, "0" * 64)
    with pytest.raises(StorageError, match="never/written: missing"):
        write_commit(any_store, "stage", [*files, absent], {})
    with pytest.raises(LeaseLostError):
        write_commit(any_store, "stage", files, {}, guard=lost)
    any_store.write_bytes("b.bin", b"bb")
    with pytest.raises(StorageError, match=r"b\.bin: 2 bytes, committed 4"):
        write_commit(any_store, "stage", files, {})
    assert not any_store.exists(COMMIT)


def test_damage_is_named_file_by_file(any_store: Store) -> None:
    commit = committed(any_store)
    any_store.write_bytes("b.bin", b"bbbB")
    any_store.write_bytes("z", b"1")
    any_store.delete("a/x.bin")
    missing, digest, size = verify_files(any_store, commit)
    assert missing == "a/x.bin: missing"
    assert digest.startswith("b.bin: digest ")
    assert size == "z: 1 bytes, committed 0"
    assert verify_files(any_store, commit, digests=False) == [missing, size]


# ------------------------------------------------------------------------------------------------ claims of a folder
def dead() -> Holder:
    return replace(Holder.this_process(), started="long ago")


def test_a_folder_has_one_claim_which_is_given_back(any_store: Store) -> None:
    mine, theirs = Holder.this_process(), Holder.this_process()
    assert claim.read_claim(any_store) is None
    for _ in range(2):  # a client may ask twice
        assert claim.claim_folder(any_store, mine, Holder.is_alive) is None
        assert claim.holds_claim(any_store, mine)
    assert claim.claim_folder(any_store, theirs, Holder.is_alive) == mine
    assert not claim.holds_claim(any_store, theirs)
    claim.release_claim(any_store)
    assert any_store.list() == []
    assert claim.claim_folder(any_store, theirs, Holder.is_alive) is None


def test_the_dead_are_succeeded_by_one_and_their_claims_go_with_its(any_store: Store) -> None:
    for content in (b"torn", b"x" * 10_000, dead().to_bytes()):
        any_store.write_bytes(claim.WRITING, content)
        second = dead()
        assert claim.claim_folder(any_store, second, Holder.is_alive) is None
        [name] = {info.path for info in any_store.list()} - {claim.WRITING}
        any_store.write_bytes(name, content)  # claims with equal bytes still follow one another
        mine, theirs = Holder.this_process(), Holder.this_process()
        assert claim.claim_folder(any_store, mine, Holder.is_alive) is None
        assert claim.claim_folder(any_store, theirs, Holder.is_alive) == mine
        assert claim.read_claim(any_store) == mine
        assert not claim.holds_claim(any_store, second)
        any_store.write_bytes("WRITING.00000000000000000000000000000000.json", b"a stray")
        assert len(any_store.list()) == 4
        assert all(claim.is_claim(info.path) for info in any_store.list())
        claim.release_claim(any_store)
        assert any_store.list() == []
    for name in ("WRITING", "WRITING.1.json", "x/WRITING.json", "WRITING.json.tmp", "model.safetensors"):
        assert not claim.is_claim(name)


# ------------------------------------------------------------------------------------------------------------ leases
HOLD = """
import sys
from trainer_lib.errors import TrainflowError
from trainer_lib.locks.lease import acquire_lease
from trainer_lib.storage.commit import write_commit
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


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder for as long as it lives, with a time-to-live of one second."""
    process = start_script(HOLD, str(tmp_path / "s"), "1.0")
    assert answer(process) == "1"
    yield process
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=30)


def test_a_free_folder_is_had_at_once_and_epochs_count_on(any_store: Store) -> None:
    for epoch in (1, 2, 3):
        with acquire_lease(any_store) as lease:  # type: ignore[union-attr]
            assert lease.epoch == epoch
            lease.ensure_held()
            assert not lease.lost
            assert f"trainflow-lease-{epoch}" in [thread.name for thread in threading.enumerate()]
        lease.release()
        assert f"trainflow-lease-{epoch}" not in [thread.name for thread in threading.enumerate()]
        with pytest.raises(LeaseLostError):
            lease.ensure_held()
        assert any_store.children("lease") == [f"0000000{epoch}.{kind}" for kind in ("beat", "json", "released")]


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
    [other] = told
    assert other is not None
    assert other.pid == os.getpid()
    assert f"process {os.getpid()} on " in str(other)


def test_a_killed_holder_on_this_machine_is_replaced_at_once(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()  # not waited for: a zombie is as dead as one that was collected
    while Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    store, began = Store.open(tmp_path / "s"), time.monotonic()
    with acquire_lease(store, ttl_s=1000, poll_s=1000) as lease:  # type: ignore[union-attr]
        assert time.monotonic() - began < 5
        assert lease.epoch == 2
        assert store.children("lease") == ["00000002.beat", "00000002.json"]


def test_a_stopped_holder_is_replaced_and_cannot_commit_when_it_wakes(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "s")
    holder.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with acquire_lease(store, poll_s=0.02) as lease:  # type: ignore[union-attr]
        assert time.monotonic() - began >= 0.9
        assert lease.epoch == 2
        holder.send_signal(signal.SIGCONT)
        assert answer(holder, "commit\n") == "LeaseLostError"
        assert read_commit(store) is None
        write_commit(store, "stage", [], {"by": 2}, guard=lease.ensure_held)
    commit = read_commit(store)
    assert commit is not None
    assert commit.meta == {"by": 2}


@pytest.mark.parametrize("any_url", ["file", "s3"], indirect=True)
def test_of_processes_that_race_one_holds_at_a_time(any_store: Store) -> None:
    any_store.write_bytes("count", b"0")
    processes = [start_script(COUNT, any_store.url, "2") for _ in range(3)]
    for process in processes:
        process.communicate(timeout=30)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert any_store.read_bytes("count") == b"6"
