"""A store keeps what it was given, says so truthfully, and names what went wrong."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.faulty import Faults
from trainer_lib.errors import ConfigError, DamagedError, MissingExtraError, StorageError, StorageFullError
from trainer_lib.storage import FileEntry, FileInfo, Store, relative_problem


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
        writer.write(bytes(60 * 2**20))  # more than one part: the multipart upload has begun
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

    with pytest.raises(DamagedError, match="not the one that was committed") as caught:
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


# ------------------------------------------------------------------------------------------------------ paths and URLs


@pytest.mark.parametrize(
    "rel", ["/etc/passwd", "../x", "a/../x", "a//x", "a/", "./x", "a\\x", "a\0", "a\nb", ".", "x/.."]
)
def test_a_path_that_could_lead_outside_is_refused_everywhere(rel: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    assert relative_problem(rel)
    for use in (
        store.read_bytes,
        store.exists,
        store.child,
        store.delete,
        store.open_read,
        store.local_path,
        store.list,
    ):
        with pytest.raises(ConfigError, match="A path inside a store"):
            use(rel)
    for write in (store.write_bytes, store.create):
        with pytest.raises(ConfigError, match="A path inside a store"):
            write(rel, b"")


@settings(max_examples=50)
@given(st.text(max_size=30))
def test_an_accepted_path_stays_inside(rel: str) -> None:
    if relative_problem(rel) is None:
        inside = os.path.normpath(os.path.join("/root/store", rel))  # noqa: PTH118
        assert inside.startswith("/root/store/")
        assert inside == f"/root/store/{rel}"


def test_local_folders_by_any_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (tmp_path / "s", "s", "./s", f"file://{tmp_path}/s", f"local://{tmp_path}/s", f"{tmp_path}/s/"):
        store = Store.open(url)
        assert store.url == str(tmp_path / "s")
        assert store.is_local
        assert store.local_path("a") == tmp_path / "s" / "a"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.open("~/s").url == str(tmp_path / "s")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("a\0b", "empty"),
        ("ss3://bucket/x", "Unknown URL scheme 'ss3'"),
        ("s3://", "no bucket"),
        ("s3://bucket/../x", r"'\.\.'"),
        ("file://relative/x", "absolute path"),
        ("simplecache::s3://bucket/x", "Chained"),
        ("s3://bucket/x::memory://y", "Chained"),
    ],
)
def test_a_wrong_url_is_refused_by_the_field_it_came_from(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Store.open(url, field="publish.target")
    assert caught.value.field == "publish.target"


def test_a_near_miss_is_told_the_right_scheme() -> None:
    with pytest.raises(ConfigError) as caught:
        Store.open("memroy://x")
    assert "Did you mean memory://" in str(caught.value.remedy)


@pytest.mark.parametrize("url", ["s3://key:s3cr3t@bucket/x", "s3://bucket/x?X-Amz-Signature=s3cr3t", "gs://b/x#s3cr3t"])
def test_secrets_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="must not carry credentials") as caught:
        Store.open(url)
    assert "s3cr3t" not in str(caught.value.to_record())


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = sys.modules["fsspec.registry"]._registry  # the package hides the module behind a name
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(registered, "s3", raising=False)
    with pytest.raises(MissingExtraError) as caught:
        Store.open("s3://bucket/x", field="storage")
    assert caught.value.remedy == 'Install it: pip install "trainflow[s3]".'
    assert caught.value.field == "storage"


def test_the_endpoint_of_the_environment_is_taken_anew(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(s3_url).write_bytes("x", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = Store.open(s3_url)
    assert store._backend.fs.endpoint_url == "http://127.0.0.1:9"  # type: ignore[attr-defined]


def test_a_remote_store_has_no_local_path(memory_url: str) -> None:
    store = Store.open(memory_url)
    assert not store.is_local
    assert store.free_bytes() is None
    with pytest.raises(ConfigError, match="A local folder is needed"):
        store.local_path()


# ------------------------------------------------------------------------------------------------------------- failures


def test_an_absent_bucket_is_named(s3_bucket: str) -> None:
    store = Store.open(f"s3://{s3_bucket}-absent/x")
    assert store.list() == []
    for write in (store.write_bytes, store.create):
        with pytest.raises(StorageError, match="no such file, folder or bucket"):
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


# ---------------------------------------------------------------------------------------------------------- local disk


def _create_many(args: tuple[str, int]) -> list[int]:
    folder, number = args
    store = Store.open(folder)
    return [round_number for round_number in range(50) if store.create(f"{round_number}.json", b"%d" % number)]


def test_of_processes_that_create_at_once_exactly_one_wins(tmp_path: Path) -> None:
    with get_context("spawn").Pool(3) as pool:
        won = pool.map(_create_many, [(str(tmp_path / "s"), number) for number in range(3)])
        pool.close()
        pool.join()
    assert sorted(chain.from_iterable(won)) == list(range(50))
    assert len(list((tmp_path / "s").iterdir())) == 50  # no drafts left


def test_what_is_written_is_fsynced_and_its_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    store = Store.open(tmp_path / "new" / "store")
    store.write_bytes("a/x", b"1")
    root = tmp_path / "new" / "store"
    assert str(root / "a" / "x") in synced
    assert {str(tmp_path), str(tmp_path / "new"), str(root)} <= set(synced)  # each new folder, in the one above

    synced.clear()
    store.sync()
    assert set(synced) == {str(root), str(root / "a"), str(root.parent)}

    synced.clear()
    assert store.create("COMMIT.json", b"1")
    assert synced[-1] == str(root)
    assert any("COMMIT.json" in path for path in synced[:-1])


def test_create_without_hard_links_is_still_exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    store = Store.open(tmp_path / "s")
    assert store.create("x", b"1")
    assert not store.create("x", b"2")
    assert store.read_bytes("x") == b"1"
    assert store.children() == ["x"]


def test_links_are_neither_listed_nor_followed_when_deleting(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"1")
    store = Store.open(tmp_path / "store")
    store.write_bytes("real", b"1")
    (tmp_path / "store" / "link").symlink_to(outside / "precious")
    (tmp_path / "store" / "folder").symlink_to(outside)

    assert [info.path for info in store.list()] == ["real"]
    store.delete_tree("folder")
    store.delete_tree()
    assert (outside / "precious").read_bytes() == b"1"
    assert not (tmp_path / "store").exists()


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    free = Store.open(tmp_path / "not" / "there").free_bytes()
    assert free is not None
    assert free > 0


def test_files_get_the_permissions_the_user_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        store = Store.open(tmp_path / "s")
        store.write_bytes("x", b"1")
        store.create("y", b"1")
    finally:
        os.umask(before)
    for name in ("x", "y"):
        assert stat.S_IMODE((tmp_path / "s" / name).stat().st_mode) == 0o640
