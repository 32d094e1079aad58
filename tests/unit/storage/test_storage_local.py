"""The local disk: durable, exclusive between processes, and links lead nowhere."""

from __future__ import annotations

import errno
import http.server
import os
import pkgutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import free_port, serving
from tests.support.stores import record_fsync
from trainer_lib.base.paths import absolute_path
from trainer_lib.errors import (
    ConfigError,
    StorageError,
    StorageFullError,
    StorageGoneError,
    StoreUnreachableError,
    TrainflowError,
)
from trainer_lib.hub.huggingface import download_snapshot
from trainer_lib.locks.lease import acquire_lease
from trainer_lib.storage import Store, relative_problem
from trainer_lib.storage.local import make_folders
from trainer_lib.storage.outages import describe_outage, typed_error
from trainer_lib.trackers.jsonl import LineFile
from trainer_lib.trackers.mlflow import mlflow_client
from trainer_lib.trackers.spool import Session


def test_what_is_written_is_fsynced_and_its_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = record_fsync(monkeypatch)
    store = Store.open(tmp_path / "new" / "store")
    store.write_bytes("a/x", b"1")
    root = tmp_path / "new" / "store"
    assert str(root / "a" / "x") in synced
    assert {str(tmp_path), str(tmp_path / "new"), str(root)} <= set(synced)  # each new folder, in the one above

    synced.clear()
    store.sync()
    assert set(synced) == {str(root), str(root / "a"), str(root.parent)}

    synced.clear()
    store.sync_file("a/x")
    assert synced == [str(root / "a" / "x")]

    synced.clear()
    assert store.create("COMMIT.json", b"1")
    assert synced[-1] == str(root) and any("COMMIT.json" in path for path in synced[:-1])


def test_a_reader_of_a_replaced_file_meets_a_whole_one(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.replace("folder/record", b"a" * 50_000)
    done, seen = threading.Event(), list[bytes]()

    def replace() -> None:
        while not done.is_set():
            for letter in (b"b", b"a"):
                store.replace("folder/record", letter * 50_000)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        while len(seen) < 40 or len(set(seen)) < 2:
            content = store.read_bytes("folder/record")
            assert len(content) == 50_000 and len(set(content)) == 1
            seen.append(content[:1])
    finally:
        done.set()
        writer.join()
    assert store.children("folder") == ["record"], "no draft stays"


def test_a_file_that_cannot_be_replaced_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, synced = Store.open(tmp_path), record_fsync(monkeypatch)
    store.replace("record", b"old")
    assert str(tmp_path) in synced

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError):
        store.replace("record", b"new and longer")
    assert store.read_bytes("record") == b"old"
    assert store.children() == ["record"], "no draft stays"


def test_a_full_disk_and_a_folder_that_cannot_be_made_are_named_and_not_errors_of_the_block(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    (tmp_path / "full.bin").symlink_to("/dev/full")  # the kernel's own full disk
    with pytest.raises(StorageFullError, match="no space left") as full:
        store.write_bytes("full.bin", b"x" * 100)
    assert full.value.field == f"{tmp_path}/full.bin" and not full.value.retryable
    assert list(tmp_path.iterdir()) == []
    store.write_bytes("file", b"1")
    below = Store.open(tmp_path / "file" / "below")
    assert (below.list(), below.children()) == ([], [])
    with pytest.raises(ConfigError, match="Cannot write there"):
        below.ensure_writable()
    with pytest.raises(OSError, match="mine") as caught, store.open_read("file"):
        raise OSError(errno.EIO, "mine")
    assert not isinstance(caught.value, StorageError)


def test_create_without_hard_links_is_still_exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    store = Store.open(tmp_path / "s")
    assert store.create("x", b"1") and not store.create("x", b"2")
    assert store.read_bytes("x") == b"1" and store.children() == ["x"]


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.write_bytes("link/precious", b"2"),
        lambda store: store.create("link/deep/new", b"2"),
        lambda store: store.replace("link/precious", b"2"),
        lambda store: store.delete("link/precious"),
        lambda store: store.delete_tree("link/folder"),
        lambda store: store.child("link").delete_tree("folder"),
        lambda store: store.child("link", "folder").delete_tree(),
        lambda store: store.write_bytes("file", b"2"),
        lambda store: store.write_bytes("nothing", b"2"),
    ],
)
def test_nothing_is_written_or_removed_behind_a_link_below_the_storage(tmp_path: Path, act: Any) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "precious").write_bytes(b"1")
    (outside / "folder" / "deep").write_bytes(b"1")
    (tmp_path / "disk").mkdir()
    (tmp_path / "storage").symlink_to("disk")  # the user's own: it is the storage
    for name, target in (("link", "../outside"), ("file", "../outside/precious"), ("nothing", "../outside/absent")):
        (tmp_path / "disk" / name).symlink_to(target)
    store = Store.open(tmp_path / "storage")
    with pytest.raises(StorageError, match="symbolic link") as caught:
        act(store)
    assert str(caught.value.field).startswith(str(tmp_path / "storage"))
    assert sorted(path.name for path in outside.rglob("*")) == ["deep", "folder", "precious"]
    assert {path.read_bytes() for path in outside.rglob("*") if path.is_file()} == {b"1"}


def test_what_is_behind_a_link_below_the_storage_is_not_listed_or_deleted_and_the_link_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "outside" / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "precious").write_bytes(b"1")
    store = Store.open(tmp_path / "store")
    store.write_bytes("x", b"1")
    (tmp_path / "store" / "link").symlink_to("../outside")
    (tmp_path / "store" / "file").symlink_to("../outside/precious")
    (tmp_path / "store" / "itself").symlink_to("itself")
    assert store.children() == ["file", "x"], "links to folders are left out; a file can be read"
    assert store.links() == ["file", "itself", "link"]
    assert [store.list("link"), store.child("link").children(), store.child("link", "folder").links()] == [[], [], []]
    assert {record.args for record in caplog.records} == {(str(tmp_path / "store" / "link"),)}
    assert [info.path for info in store.list()] == ["x"]
    store.delete_tree("link")
    store.delete_tree()
    assert (tmp_path / "outside" / "precious").read_bytes() == b"1" and not (tmp_path / "store").exists()


def test_a_folder_that_becomes_a_link_when_removed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside" / "inner").mkdir(parents=True)
    (tmp_path / "outside" / "inner" / "precious").write_bytes(b"1")
    store = Store.open(tmp_path / "store")
    store.write_bytes("stage/inner/x", b"1")
    lstat = os.lstat

    def swap(name: Any, **how: Any) -> os.stat_result:
        found = lstat(name, **how)
        if name == "inner" and not (tmp_path / "store" / "aside").exists():
            (tmp_path / "store" / "stage").rename(tmp_path / "store" / "aside")
            (tmp_path / "store" / "stage").symlink_to(tmp_path / "outside")
        return found

    monkeypatch.setattr(os, "lstat", swap)
    store.delete_tree("stage/inner")
    assert (tmp_path / "outside" / "inner" / "precious").exists()
    assert list((tmp_path / "store" / "aside").iterdir()) == []


def test_files_get_the_permissions_the_user_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        store = Store.open(tmp_path / "s")
        assert (store.free_bytes() or 0) > 0, "of a folder that is not there yet"
        store.write_bytes("x", b"1")
        store.create("y", b"1")
    finally:
        os.umask(before)
    for name in ("x", "y"):
        assert stat.S_IMODE((tmp_path / "s" / name).stat().st_mode) == 0o640


def _removed(root: Path) -> None:
    root.rename(root.with_name("renamed"))


def _exchanged(root: Path) -> None:
    _removed(root)
    root.mkdir()


def _write_from_another_process(store: Store) -> None:
    code = "import sys; from trainer_lib.storage import Store; Store.open(sys.argv[1]).write_bytes('a/b', b'x')"
    done = subprocess.run([sys.executable, "-c", code, store.url], capture_output=True, text=True, check=False)
    assert "StorageGoneError" in done.stderr, done
    raise StorageGoneError("as the other process says")


WRITERS: dict[str, Callable[[Store], object]] = {
    "write": lambda store: store.write_bytes("runs/1/run.json", b"x"),
    "replace": lambda store: store.replace("runs/1/beat", b"x"),
    "create": lambda store: store.create("runs/1/COMMIT.json", b"x"),
    "lease": lambda store: acquire_lease(store.child("stage")),
    "lines": lambda store: LineFile(store.child("train"), "log.jsonl").replace([]),
    "spool": lambda store: Session.create(store.local_path(".spool"), {}),
    "mlflow": lambda store: mlflow_client.connect(f"sqlite:///{store.local_path('deep/mlflow.db')}"),
    "another process": _write_from_another_process,
}


@pytest.mark.parametrize("change", [_removed, _exchanged])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_storage_that_is_gone_while_a_run_works_is_not_made_again(
    tmp_path: Path, write: Callable[[Store], object], change: Callable[[Path], None]
) -> None:
    store = Store.open(tmp_path / "storage")
    with store.pinned():
        store.write_bytes("there", b"x")
        change(tmp_path / "storage")
        with pytest.raises((StorageGoneError, OSError)) as failure:
            write(store)
        assert isinstance(failure.value, StorageGoneError) or getattr(failure.value, "errno", None) == errno.ESTALE
        assert not [*tmp_path.glob("storage/*")]
    store.write_bytes("runs/1/run.json", b"x")  # the next command makes its own


def test_a_lease_says_that_its_folder_is_gone_and_not_that_another_process_has_it(tmp_path: Path) -> None:
    lease = acquire_lease(Store.open(tmp_path / "storage").child("stage"), ttl_s=0.3)
    assert lease is not None
    _removed(tmp_path / "storage")
    with pytest.raises(StorageGoneError, match="renamed or removed"):
        lease.ensure_held()
    lease.release()
    assert not (tmp_path / "storage").exists()


def test_pins_of_threads_end_in_any_order(tmp_path: Path) -> None:
    first, second = Store.open(tmp_path / "a").pinned(), Store.open(tmp_path / "b").pinned()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    (tmp_path / "b").rmdir()
    with pytest.raises(OSError, match="Stale"):
        make_folders(tmp_path / "b" / "c")
    second.__exit__(None, None, None)
    make_folders(tmp_path / "b" / "c")


@pytest.mark.parametrize(
    "rel", ["/etc/passwd", "../x", "a/../x", "a//x", "a/", "./x", "a\\x", "a\0", "a\nb", ".", "x/.."]
)
def test_a_path_that_could_lead_outside_is_refused_everywhere(rel: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    assert relative_problem(rel)
    reading = (store.read_bytes, store.exists, store.child, store.open_read, store.local_path, store.list)
    for use in (*reading, store.delete):
        with pytest.raises(ConfigError, match="A path inside a store"):
            use(rel)
    for write in (store.write_bytes, store.create):
        with pytest.raises(ConfigError, match="A path inside a store"):
            write(rel, b"")


def test_local_folders_by_any_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (tmp_path / "s", "s", "./s", f"file://{tmp_path}/s", f"local://{tmp_path}/s", f"{tmp_path}/s/"):
        store = Store.open(url)
        assert store.url == str(tmp_path / "s") and store.is_local
        assert store.local_path("a") == tmp_path / "s" / "a"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.open("~/s").url == str(tmp_path / "s")
    assert Store.open("~no-such-user/s").url == str(Path.cwd() / "~no-such-user" / "s")
    assert absolute_path("~no-such-user/s", "/folder") == "/folder/~no-such-user/s"


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


@pytest.mark.parametrize("url", ["s3://key:s3cr3t@bucket/x", "s3://bucket/x?X-Amz-Signature=s3cr3t", "gs://b/x#s3cr3t"])
def test_secrets_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="must not carry credentials") as caught:
        Store.open(url)
    assert "s3cr3t" not in str(caught.value.to_record())


def test_a_remote_store_has_no_local_path(memory_url: str) -> None:
    store = Store.open(memory_url)
    assert not store.is_local and store.free_bytes() is None
    with pytest.raises(ConfigError, match="must be a local folder"):
        store.local_path()


@pytest.mark.parametrize("client", ["urllib.request.urlopen", "httpx.get", "requests.get"])
def test_a_refused_connection_and_an_unknown_host_are_named_by_every_client(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*args: object, **more: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(Exception) as caught:  # each client has its own class
        pkgutil.resolve_name(client)(f"http://127.0.0.1:{free_port()}/")
    assert describe_outage(caught.value) == "Connection refused"
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Exception) as caught:
        pkgutil.resolve_name(client)("http://nowhere.invalid/")
    assert describe_outage(caught.value) == "Name or service not known"


def test_s3_without_a_server_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**settings, "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnreachableError) as caught:
        Store.open("s3://bucket/x").ensure_writable()
    error = caught.value
    assert (error.field, error.value, error.exit_code, error.retryable) == ("storage", "s3://bucket/x", 14, True)
    assert error.message == "Could not write it: the store does not answer (Connection refused)."
    assert endpoint in str(error.remedy)


@pytest.mark.parametrize("answer", [b"<html>Sign in</html>", b"null", b"{}"])
def test_what_answers_in_place_of_a_store_is_no_empty_folder(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        log_message = staticmethod(lambda *_: None)  # type: ignore[assignment]

        def do_GET(self) -> None:
            self.send_response(403 if "closed" in self.path else 200)
            self.end_headers()
            self.wfile.write(answer if self.command == "GET" and (answer[:1] == b"<" or "api" in self.path) else b"")

        do_HEAD = do_GET

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)) as port:
        endpoint = f"http://127.0.0.1:{port}"
        settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        for name, value in {**settings, "AWS_DEFAULT_REGION": "us-east-1", "HF_ENDPOINT": endpoint}.items():
            monkeypatch.setenv(name, value)
        store = Store.open("s3://bucket/x")
        for look in (store.list, store.children, lambda: store.exists("a"), lambda: download_snapshot("a/b")):
            with pytest.raises(StoreUnreachableError, match="something else answers in its place") as caught:
                look()
            assert endpoint in str(caught.value.remedy)
        for refused in (Store.open("s3://closed/x").list, lambda: download_snapshot("a/closed")):
            with pytest.raises(TrainflowError, match=r"\b403\b.*(Check the permissions|Set HF_TOKEN)|something else"):
                refused()


def test_an_answer_and_a_refusal_are_no_outages_and_a_busy_store_is_one() -> None:
    for number in (errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTUNREACH, errno.ECONNRESET):
        assert type(typed_error(OSError(number, "?"), "read", "/mnt/x")) is StoreUnreachableError
    for number in (errno.EIO, errno.EACCES, errno.ENOENT, errno.EISDIR):
        assert describe_outage(OSError(number, "?")) is None
        assert type(typed_error(OSError(number, "?"), "read", "/mnt/x")) is StorageError
    refused = PermissionError(errno.EACCES, "denied")
    refused.__context__ = ConnectionResetError(errno.ECONNRESET, "reset")
    refused.__suppress_context__ = True
    assert "permissions" in str(typed_error(refused, "write", "s3://bucket/x")), "after an outage"
    busy = Exception()
    busy.response = {"Error": {"Code": "SlowDown"}}  # type: ignore[attr-defined]
    assert describe_outage(busy) == "it is overloaded or out of order (SlowDown)"


@pytest.mark.parametrize("name", ["closed", ".Trash-0", "lost+found"])
def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "a.csv").write_text("x")
    listed = os.scandir

    def deny(path: Any) -> Any:
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(StorageError, match="/closed: Permission denied") if name == "closed" else nullcontext():
        assert [info.path for info in Store.open(tmp_path).list()] == ["a.csv"]


def test_a_full_disk_states_what_is_free(tmp_path: object) -> None:
    error = typed_error(OSError(errno.ENOSPC, "No space left on device"), "write", f"{tmp_path}/below/file")
    assert type(error) is StorageFullError
    assert "bytes are free" in error.message


@pytest.mark.parametrize("endpoint", ["nonsense", "host:9000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError) as caught:
        Store.open("s3://bucket/x")
    assert (caught.value.field, caught.value.value) == ("AWS_ENDPOINT_URL", endpoint)
