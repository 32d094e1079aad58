"""S3 alone: files in parts, several at a time; nothing of an upload that failed stays; reads are whole or an error."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.s3 import PART, S3Server
from trainer_lib.errors import ConfigError, StorageError, StorageFullError
from trainer_lib.storage import Store, remote, s3

PIECE = 16 * 2**10


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that the server takes, so that little data is several parts."""
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(remote, "PIECE", PIECE)


def uploads(store: Store) -> list[str]:
    """Keys of uploads that are not finished."""
    bucket = store.url.split("/")[2]
    return [upload["Key"] for upload in store._backend.fs.list_multipart_uploads(bucket)]  # type: ignore[union-attr]


def unfinished(store: Store, key: str) -> str:
    """What a killed writer leaves."""
    bucket, _, folder = store.url.removeprefix("s3://").partition("/")
    call: Callable[..., Any] = store._backend.fs.call_s3  # type: ignore[union-attr]
    upload = call("create_multipart_upload", Bucket=bucket, Key=f"{folder}/{key}")
    where = {"Bucket": bucket, "Key": f"{folder}/{key}", "UploadId": upload["UploadId"]}
    call("upload_part", **where, PartNumber=1, Body=bytes(PART))
    return str(upload["UploadId"])


def words(requests: list[str]) -> list[str]:
    """Of each the method, the first query word, and whether its bytes were not signed."""
    return [f"{line.split()[0]} {line.partition('?')[2]}".strip() for line in requests]


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 2 * PART, 9 * PART + 7])
def test_a_file_of_any_size_comes_back(size: int, s3_url: str, small_parts: None) -> None:
    store, data = Store.open(s3_url), os.urandom(size)
    with store.open_write("x") as writer:
        for start in range(0, size, 30_011):  # not a divisor of anything
            writer.write(data[start : start + 30_011])
    assert (writer.entry.size, writer.entry.sha256) == (size, hashlib.sha256(data).hexdigest())
    assert store.size("x") == size
    assert store.read_bytes("x") == data
    assert uploads(store) == []


def test_parts_go_out_and_come_in_several_at_a_time(s3_url: str, small_parts: None, s3_faults: S3Server) -> None:
    store, data = Store.open(s3_url), os.urandom(6 * PART)
    store.write_bytes("x", data)
    seen = s3_faults.seen()
    assert words(seen["writes"]) == ["POST uploads", *["PUT uploadId unsigned"] * 6, "POST uploadId"]
    assert seen["most_in_flight"] > 1
    s3_faults.plan()
    assert store.read_bytes("x") == data
    seen = s3_faults.seen()
    assert words(seen["reads"]) == ["HEAD", *["GET"] * 24]
    assert seen["most_in_flight"] > 1


def test_a_small_file_is_a_single_request_and_parts_are_signed_for_who_asks_for_it(
    s3_url: str, s3_faults: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(s3_url)
    store.write_bytes("x", bytes(PART))
    assert words(s3_faults.seen()["writes"]) == ["PUT"]
    s3_faults.plan()
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(store._backend.fs, "config_kwargs", {"s3": {"payload_signing_enabled": True}})  # type: ignore[union-attr]
    store.write_bytes("x", bytes(2 * PART))
    assert words(s3_faults.seen()["writes"]) == ["POST uploads", *["PUT uploadId"] * 2, "POST uploadId"]


def test_at_most_so_many_parts_are_staged(
    s3_url: str, small_parts: None, s3_faults: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "STAGED", 2)
    made: list[int] = []
    anonymous = mmap.mmap

    def counted(number: int, size: int, **how: Any) -> mmap.mmap:
        made.append(size)
        return anonymous(number, size, **how)

    monkeypatch.setattr(mmap, "mmap", counted)
    Store.open(s3_url).write_bytes("x", bytes(8 * PART))
    assert made == [PART] * 2
    assert s3_faults.seen()["most_in_flight"] <= 2


def test_parts_grow_so_that_an_upload_never_has_too_many(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(s3, "_DOUBLE_EVERY", 2)
    store, data = Store.open(s3_url), os.urandom(6 * PART + 1)
    store.write_bytes("x", data)
    tag = store.list()[0].tag
    assert tag is not None
    assert tag.endswith("-5")  # 1 + 1 + 2 + 2 and a byte
    assert store.digest("x") == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("kind", ["refuse", "full", "denied"])
def test_a_request_that_fails_for_good_leaves_nothing(
    kind: str, s3_url: str, small_parts: None, s3_faults: S3Server
) -> None:
    store = Store.open(s3_url)
    for at in range(1, 6):  # begin, three parts, complete
        s3_faults.plan(at, kind)
        with pytest.raises(StorageFullError if kind == "full" else StorageError) as caught:
            store.write_bytes("x", bytes(2 * PART + 1))
        assert caught.value.field == f"{s3_url}/x"
        s3_faults.plan()
        assert not store.exists("x")
        assert uploads(store) == []


@pytest.mark.parametrize("kind", ["lost", "slow"])
def test_a_request_whose_answer_is_lost_or_slow_does_no_harm(
    kind: str, s3_url: str, small_parts: None, s3_faults: S3Server
) -> None:
    store, data = Store.open(s3_url), os.urandom(2 * PART + 1)
    for at in range(1, 6):
        s3_faults.plan(at, kind)
        store.write_bytes(f"x{at}", data)
        s3_faults.plan()
        assert store.digest(f"x{at}") == hashlib.sha256(data).hexdigest()
    store.delete_tree()
    assert uploads(store) == []


def test_an_interrupt_withdraws_what_is_on_its_way(s3_url: str, small_parts: None) -> None:
    store = Store.open(s3_url)
    with pytest.raises(KeyboardInterrupt), store.open_write("x") as writer:
        writer.write(bytes(8 * PART))
        raise KeyboardInterrupt
    assert store.list() == []
    assert uploads(store) == []


def test_what_a_killed_writer_left_is_removed_by_the_next_one_and_with_the_folder(
    s3_url: str, small_parts: None
) -> None:
    store = Store.open(s3_url)
    unfinished(store, "x")
    unfinished(store, "xy")
    unfinished(store, "deep/z")
    store.write_bytes("x", bytes(2 * PART))
    assert sorted(uploads(store)) == ["tests/deep/z", "tests/xy"]
    store.delete_tree("deep")
    assert uploads(store) == ["tests/xy"]
    store.delete_tree()
    assert uploads(store) == []


def test_an_object_that_is_not_what_was_sent_is_not_called_written(
    s3_url: str, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(s3_url)
    send = s3.S3Writer._send
    skipped = threading.Event()

    def losing(writer: s3.S3Writer) -> None:  # a part that the store answers for and forgets
        send(writer)
        if not skipped.is_set():
            skipped.set()
            writer._collect_parts(len(writer._flying))
            writer._tags.pop(1)

    monkeypatch.setattr(s3.S3Writer, "_send", losing)
    monkeypatch.setattr(s3, "STAGED", 1)
    with pytest.raises(StorageError):
        store.write_bytes("x", bytes(2 * PART + 1))
    assert not store.exists("x")


def test_an_answer_that_breaks_off_is_continued(s3_url: str, small_parts: None, s3_faults: S3Server) -> None:
    store, data = Store.open(s3_url), os.urandom(3 * PIECE)
    store.write_bytes("x", data)
    s3_faults.plan(3, "broken")
    assert store.read_bytes("x") == data
    assert len(s3_faults.seen()["reads"]) == 5  # a look, three pieces, one of them again


def test_a_file_replaced_while_it_is_read_is_an_error_and_no_mixture(
    s3_url: str, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WINDOW", 1)
    store = Store.open(s3_url)
    store.write_bytes("x", bytes(4 * PIECE))
    with store.open_read("x") as stream:
        assert stream.read(10) == bytes(10)
        store.write_bytes("x", b"\1" * 4 * PIECE)
        with pytest.raises(StorageError):
            stream.read()


def test_the_stores_own_words_are_shown_without_the_clients(s3_url: str, s3_faults: S3Server) -> None:
    s3_faults.plan(1, "refuse")
    with pytest.raises(StorageError) as caught:
        Store.open(s3_url).write_bytes("a", b"x")
    assert caught.value.message == "Could not write it: the store answers AccessDenied (planned)."
    s3_faults.plan(1, "full")
    with pytest.raises(StorageFullError) as full:
        Store.open(s3_url).write_bytes("a", b"x")
    assert "An error occurred" not in full.value.message
    assert "XMinioStorageFull" in full.value.message


def test_an_absent_bucket_is_named_and_an_emptied_one_stays(s3_bucket: str) -> None:
    store = Store.open(f"s3://{s3_bucket}-absent/x")
    assert store.list() == []
    for write in (store.write_bytes, store.create):
        with pytest.raises(StorageError, match="no such folder or bucket"):
            write("a", b"1")
    with pytest.raises(ConfigError, match="Cannot write there") as caught:
        store.ensure_writable(field="storage")
    assert caught.value.field == "storage"
    bucket = Store.open(f"s3://{s3_bucket}")
    bucket.write_bytes("a/b", b"1")
    bucket.delete_tree()
    bucket.write_bytes("c", b"1")
    assert [info.path for info in bucket.list()] == ["c"]


def test_missing_credentials_are_named_and_another_endpoint_is_taken(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    Store.open(s3_url).write_bytes("x", b"1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(StorageError) as caught:
        Store.open(s3_url).read_bytes("x")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert "AWS_ACCESS_KEY_ID" in str(caught.value.remedy)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert Store.open(s3_url)._backend.fs.endpoint_url == "http://127.0.0.1:9"  # type: ignore[union-attr]
