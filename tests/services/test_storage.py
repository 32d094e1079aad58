"""A store keeps what it was given, says so truthfully, and names what went wrong."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty import Faults
from trainer_lib.errors import ConfigError, DamagedError, StorageError, StorageFullError
from trainer_lib.storage import FileEntry, FileInfo, Store


def sizes(found: list[FileInfo]) -> list[tuple[str, int]]:
    return [(info.path, info.size) for info in found]


# ---------------------------------------------------------------------------------------------- every kind of store


def test_written_bytes_come_back_with_their_digest(any_store: Store) -> None:
    data = os.urandom(100_003)
    entry = any_store.write_bytes("a/b/c.bin", data)

    assert entry == FileEntry("a/b/c.bin", len(data), hashlib.sha256(data).hexdigest())
    assert any_store.read_bytes("a/b/c.bin") == data
    assert any_store.size("a/b/c.bin") == len(data)
    assert any_store.digest("a/b/c.bin") == entry.sha256


def test_an_empty_file_is_a_file(any_store: Store) -> None:
    entry = any_store.write_bytes("empty", b"")

    assert entry.size == 0
    assert any_store.exists("empty")
    assert any_store.read_bytes("empty") == b""


def test_a_small_file_is_replaced(any_store: Store) -> None:
    for content in (b"first, and longer", b"second"):
        any_store.replace("folder/record", content)
        assert any_store.read_bytes("folder/record") == content
    assert any_store.children("folder") == ["record"]


def test_rewriting_replaces(any_store: Store) -> None:
    any_store.write_bytes("x", b"a long first version")
    any_store.write_bytes("x", b"short")

    assert any_store.read_bytes("x") == b"short"


def test_a_listing_tells_a_change_of_content_where_the_store_knows_it(any_store: Store) -> None:
    any_store.write_bytes("x", b"1")
    before = any_store.list()[0].tag
    any_store.write_bytes("x", b"2")
    after = any_store.list()[0].tag

    assert (before is None) == (after is None)
    assert before is None or before != after
    assert (before is not None) == any_store.url.startswith("s3://")


def test_an_absent_folder_is_empty_and_reading_from_it_names_the_url(any_store: Store) -> None:
    assert any_store.list() == []
    assert any_store.children() == []
    assert not any_store.exists("x")
    assert any_store.read_if_exists("x") is None
    for read in (any_store.read_bytes, any_store.size, any_store.digest):
        with pytest.raises(StorageError, match="There is no such file") as caught:
            read("x")
        assert caught.value.field == f"{any_store.url}/x"


def test_listing_is_recursive_sorted_and_relative(any_store: Store) -> None:
    for name in ("b/2", "a/x/1", "top", "b/10"):
        any_store.write_bytes(name, name.encode())

    assert sizes(any_store.list()) == [("a/x/1", 5), ("b/10", 4), ("b/2", 3), ("top", 3)]
    assert sizes(any_store.list("b")) == [("b/10", 4), ("b/2", 3)]
    assert any_store.children() == ["a", "b", "top"]
    assert any_store.children("a") == ["x"]


def test_a_name_that_only_begins_alike_is_not_listed(any_store: Store) -> None:
    any_store.write_bytes("run/1", b"1")
    any_store.write_bytes("run-old/1", b"1")

    assert sizes(any_store.list("run")) == [("run/1", 1)]
    any_store.delete_tree("run")
    assert any_store.children() == ["run-old"]


def test_another_store_object_sees_new_files_at_once(any_store: Store, any_url: str) -> None:
    other = Store.open(any_url)
    assert other.list() == []
    any_store.write_bytes("x", b"1")
    assert [info.path for info in other.list()] == ["x"]
    any_store.delete("x")
    assert other.list() == []


def test_deleting_what_is_absent_is_fine(any_store: Store) -> None:
    any_store.delete("x")
    any_store.delete_tree()
    any_store.delete_tree("y")


def test_a_tree_is_deleted_whole(any_store: Store) -> None:
    for name in ("keep/1", "drop/1", "drop/deep/2"):
        any_store.write_bytes(name, b"1")

    any_store.delete_tree("drop")

    assert [info.path for info in any_store.list()] == ["keep/1"]
    assert any_store.children() == ["keep"]
    any_store.delete_tree()
    assert any_store.children() == []


def test_a_child_is_the_folder_below(any_store: Store) -> None:
    child = any_store.child("a", "b/c")
    child.write_bytes("x", b"1")

    assert child.url == f"{any_store.url}/a/b/c"
    assert sizes(any_store.list()) == [("a/b/c/x", 1)]
    assert sizes(child.list()) == [("x", 1)]
    assert any_store.child().url == any_store.url


def test_create_has_one_winner_and_keeps_the_first_bytes(any_store: Store) -> None:
    assert any_store.create("lock.json", b"first")
    assert not any_store.create("lock.json", b"second")
    assert any_store.read_bytes("lock.json") == b"first"
    any_store.delete("lock.json")
    assert any_store.create("lock.json", b"third")
    assert any_store.children() == ["lock.json"]


def test_of_threads_that_create_at_once_exactly_one_wins(any_store: Store) -> None:
    if not any_store.exclusive:
        assert any_store.url.startswith("faulty://")
        return
    barrier = threading.Barrier(6)

    def attempt(round_number: int, number: int) -> bool:
        barrier.wait()
        return any_store.create(f"{round_number}.json", str(number).encode())

    with ThreadPoolExecutor(6) as pool:
        for round_number in range(5):
            won = list(pool.map(attempt, [round_number] * 6, range(6)))
            assert sum(won) == 1
            assert any_store.read_bytes(f"{round_number}.json") == str(won.index(True)).encode()


def test_an_exception_in_the_middle_leaves_no_file(any_store: Store) -> None:
    with pytest.raises(ZeroDivisionError), any_store.open_write("torn.bin") as writer:
        writer.write(b"half" * 1000)
        raise ZeroDivisionError
    gc.collect()  # a stream that publishes itself when it is collected would do so now

    assert not any_store.exists("torn.bin")
    with pytest.raises(RuntimeError, match="not finished"):
        _ = writer.entry


def test_an_interrupt_in_the_middle_of_a_large_upload_leaves_no_file(s3_url: str) -> None:
    store = Store.open(s3_url)
    with pytest.raises(KeyboardInterrupt), store.open_write("torn.bin") as writer:
        writer.write(bytes(60 * 2**20))  # more than one part: the multipart upload has started
        raise KeyboardInterrupt
    gc.collect()

    assert store.list() == []


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
    with store.open_read("x") as one, store.open_read("x") as two:
        assert one.read(5) == b"01234"
        assert two.read(5) == b"01234"


def test_files_travel_to_and_from_the_local_disk(any_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(os.urandom(50_000))
    entry = any_store.upload(source, "up/x.bin")

    any_store.download("up/x.bin", tmp_path / "new" / "x.bin", expect=entry)

    assert (tmp_path / "new" / "x.bin").read_bytes() == source.read_bytes()


def test_a_download_that_is_not_the_committed_file_does_not_appear(any_store: Store, tmp_path: Path) -> None:
    entry = any_store.write_bytes("x.bin", b"right")
    any_store.write_bytes("x.bin", b"wrong")

    with pytest.raises(DamagedError, match="not the committed one") as caught:
        any_store.download("x.bin", tmp_path / "to" / "x.bin", expect=entry)

    assert caught.value.field == f"{any_store.url}/x.bin"
    assert list((tmp_path / "to").iterdir()) == []


def test_a_file_larger_than_expected_is_not_read_whole(any_store: Store) -> None:
    any_store.write_bytes("x", bytes(1000))
    assert len(any_store.read_bytes("x", limit=1000)) == 1000
    with pytest.raises(DamagedError, match="more than 999 bytes"):
        any_store.read_bytes("x", limit=999)


def test_ensure_writable_leaves_nothing(any_store: Store) -> None:
    any_store.ensure_writable()
    assert any_store.list() == []


# ------------------------------------------------------------------------------------------------------------- failures


def test_an_absent_bucket_is_named(s3_bucket: str) -> None:
    store = Store.open(f"s3://{s3_bucket}-absent/x")
    assert store.list() == []
    for write in (store.write_bytes, store.create):
        with pytest.raises(StorageError, match="no such folder or bucket"):
            write("a", b"1")
    with pytest.raises(ConfigError, match="Cannot write there") as caught:
        store.ensure_writable(field="storage")
    assert caught.value.field == "storage"


def test_missing_credentials_are_named(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(StorageError) as caught:
        Store.open(s3_url).read_bytes("x")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert "AWS_ACCESS_KEY_ID" in str(caught.value.remedy)


def test_deleting_everything_keeps_the_bucket(s3_bucket: str) -> None:
    bucket = Store.open(f"s3://{s3_bucket}")
    bucket.write_bytes("a/b", b"1")
    bucket.delete_tree()
    bucket.write_bytes("c", b"1")
    assert [info.path for info in bucket.list()] == ["c"]


def test_a_folder_that_cannot_be_made_is_a_bad_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = Store.open(tmp_path / "file" / "below")
    assert store.list() == []
    assert store.children() == []
    with pytest.raises(ConfigError, match="Cannot write there"):
        store.ensure_writable()


def test_a_full_disk_is_said_to_be_full(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    (tmp_path / "full.bin").symlink_to("/dev/full")  # the kernel's own full disk
    with pytest.raises(StorageFullError, match="no space left") as caught:
        store.write_bytes("full.bin", b"x" * 100)
    assert caught.value.field == f"{tmp_path}/full.bin"
    assert not caught.value.retryable
    assert os.listdir(tmp_path) == []  # noqa: PTH208


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


def test_errors_of_the_block_are_not_blamed_on_the_store(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.write_bytes("x", b"1")
    with pytest.raises(OSError, match="mine") as caught, store.open_read("x"):
        raise OSError(errno.EIO, "mine")
    assert not isinstance(caught.value, StorageError)


def test_the_endpoint_of_the_environment_is_taken_anew(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(s3_url).write_bytes("x", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = Store.open(s3_url)
    assert store._backend.fs.endpoint_url == "http://127.0.0.1:9"  # type: ignore[attr-defined]
