"""A server that does not answer is recognized through every client, and never shown in the client's own words."""

from __future__ import annotations

import errno
import socket
import urllib.request
from collections.abc import Callable

import pytest

from trainer_lib.errors import ConfigError, StorageError, StorageFullError, StoreUnreachableError
from trainer_lib.storage import Store
from trainer_lib.storage.outages import describe_outage
from trainer_lib.storage.translation import typed_error


def free_port() -> int:
    """A port where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by_urllib(url: str) -> None:
    urllib.request.urlopen(url)


def by_httpx(url: str) -> None:
    import httpx

    httpx.get(url, trust_env=False)


def by_requests(url: str) -> None:
    import requests

    requests.get(url, timeout=5)


CLIENTS: list[Callable[[str], None]] = [by_urllib, by_httpx, by_requests]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_refused_connection_is_named_whatever_the_client(client: Callable[[str], None]) -> None:
    with pytest.raises(Exception) as caught:  # each client has its own class
        client(f"http://127.0.0.1:{free_port()}/")
    assert describe_outage(caught.value) == "the connection is refused"


@pytest.mark.parametrize("client", CLIENTS)
def test_an_unknown_host_is_named_whatever_the_client(
    client: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*args: object, **more: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

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


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTUNREACH, errno.ECONNRESET])
def test_a_network_folder_whose_server_is_gone_is_out_of_reach(number: int) -> None:
    assert type(typed_error(OSError(number, "?"), "read", "/mnt/x")) is StoreUnreachableError


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOENT, errno.EISDIR])
def test_an_answer_is_not_an_outage(number: int) -> None:
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
