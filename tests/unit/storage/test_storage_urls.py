"""Which addresses and paths are accepted; a server that does not answer is recognized through every client."""

from __future__ import annotations

import errno
import os
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chaos_services import free_port
from trainer_lib.errors import ConfigError, MissingExtraError, StorageError, StorageFullError, StoreUnreachableError
from trainer_lib.storage import Store, relative_problem
from trainer_lib.storage.outages import describe_outage
from trainer_lib.storage.translation import typed_error


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


def test_a_remote_store_has_no_local_path(memory_url: str) -> None:
    store = Store.open(memory_url)
    assert not store.is_local
    assert store.free_bytes() is None
    with pytest.raises(ConfigError, match="must be a local folder"):
        store.local_path()


def by_urllib(url: str) -> None:
    urllib.request.urlopen(url)


def by_httpx(url: str) -> None:
    import httpx

    httpx.get(url, trust_env=False)


def by_requests(url: str) -> None:
    import requests

    requests.get(url, timeout=5)


@pytest.mark.parametrize("client", [by_urllib, by_httpx, by_requests])
def test_a_refused_connection_and_an_unknown_host_are_named_whatever_the_client(
    client: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*args: object, **more: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(Exception) as caught:  # each client has its own class
        client(f"http://127.0.0.1:{free_port()}/")
    assert describe_outage(caught.value) == "the connection is refused"
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Exception) as caught:
        client("http://nowhere.invalid/")
    assert describe_outage(caught.value) == "the name of its host is not known"


def test_s3_without_a_server_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**settings, "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnreachableError) as caught:
        Store.open("s3://bucket/x").ensure_writable()
    error = caught.value
    assert (error.field, error.value, error.exit_code, error.retryable) == ("storage", "s3://bucket/x", 14, True)
    assert error.message == "Could not write it: the store does not answer (the connection is refused)."
    assert endpoint in str(error.remedy)


def test_an_answer_is_not_an_outage() -> None:
    for number in (errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTUNREACH, errno.ECONNRESET):
        assert type(typed_error(OSError(number, "?"), "read", "/mnt/x")) is StoreUnreachableError
    for number in (errno.EIO, errno.EACCES, errno.ENOENT, errno.EISDIR):
        assert describe_outage(OSError(number, "?")) is None
        assert type(typed_error(OSError(number, "?"), "read", "/mnt/x")) is StorageError


def test_a_refusal_after_an_outage_is_a_refusal() -> None:
    try:
        try:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        except ConnectionResetError:
            raise PermissionError(errno.EACCES, "denied") from None
    except PermissionError as error:
        assert "permissions" in str(typed_error(error, "write", "s3://bucket/x"))


def test_a_busy_store_is_out_of_reach() -> None:
    class ClientError(Exception):
        response = {"Error": {"Code": "SlowDown"}}  # noqa: RUF012

    assert describe_outage(ClientError()) == "it is overloaded or out of order (SlowDown)"


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
