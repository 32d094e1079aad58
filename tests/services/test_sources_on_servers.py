"""Declared sources on servers count by the tags that the server reports."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from tasks.stage.sources import fingerprints
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store


def digest(source: str) -> str:
    [found] = fingerprints([source])
    return found["digest"]


class _Server(http.server.BaseHTTPRequestHandler):
    tags: ClassVar[dict[str, str | None]] = {}

    def do_HEAD(self) -> None:
        if self.path not in self.tags:
            self.send_error(404)
            return
        self.send_response(200)
        tag = self.tags[self.path]
        if tag is not None:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", "5")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not on the tests' output."""


@pytest.fixture
def server() -> Iterator[str]:
    _Server.tags = {"/a": '"one"', "/none": None}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_a_url_counts_by_its_etag(server: str) -> None:
    before = digest(f"{server}/a")
    _Server.tags["/a"] = 'W/"one"'
    assert digest(f"{server}/a") == before
    _Server.tags["/a"] = '"two"'
    assert digest(f"{server}/a") != before
    with pytest.raises(ConfigError, match="no ETag"):
        digest(f"{server}/none")
    with pytest.raises(ConfigError, match="404"):
        digest(f"{server}/missing")


def test_objects_count_by_the_stores_own_tags(s3_url: str) -> None:
    store, elsewhere = Store.open(s3_url), Store.open(f"{s3_url}-other")
    store.write_bytes("a.csv", b"one")
    store.write_bytes("sub/b.csv", b"two")
    elsewhere.write_bytes("x.csv", b"three")
    folder, file = digest(f"{s3_url}/"), digest(f"{s3_url}/a.csv")
    elsewhere.write_bytes("x.csv", b"changed")
    assert digest(s3_url) == folder
    store.write_bytes("sub/b.csv", b"TWO")
    assert digest(s3_url) != folder
    assert digest(f"{s3_url}/a.csv") == file
    with pytest.raises(ConfigError, match="nothing at this address"):
        digest(f"{s3_url}/nowhere")
