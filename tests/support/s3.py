"""Fixtures for tests on ``s3://``: one real S3 server per session, a fresh bucket per test.

`s3_url` is what most tests want: it sets the environment as a user would (``AWS_ENDPOINT_URL`` and credentials), so the
test's own subprocesses reach the same bucket.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.repository import ROOT

PART = 64 * 2**10
"""The least bytes of a part that this server takes; S3's own 5 MiB would make every test of uploads a slow one."""
NOWHERE = "http://127.0.0.1:9"
"""An address at which no server listens."""
S3_AWAY = {
    "AWS_ENDPOINT_URL": NOWHERE,
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}
"""The environment of a client whose store does not answer."""


@dataclass(frozen=True)
class S3Server:
    """Where the server listens, and what a client must have in its environment to use it."""

    endpoint: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test-key",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def plan(self, at: int | None = None, kind: str = "refuse", **details: Any) -> None:
        """From now on count requests from one; write number `at` goes wrong (None: none does). See `s3_server.Plan`."""
        body = json.dumps({"at": at, "kind": kind, **details}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/-/plan", data=body)):
            pass

    def seen(self) -> dict[str, Any]:
        """Since the last plan: "writes" and "reads" (method, path and first query word), "most_in_flight"."""
        with urllib.request.urlopen(f"{self.endpoint}/-/seen") as answer:
            return dict(json.load(answer))


def start() -> tuple[subprocess.Popen[str], S3Server]:
    """Start a server; the caller ends it with `stop`."""
    command = [sys.executable, "-m", "tests.support.s3_server"]
    env = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": str(PART)}
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    if not port:
        raise RuntimeError(f"the S3 server did not start (exit code {process.wait()})")
    return process, S3Server(f"http://127.0.0.1:{port}")


def stop(process: subprocess.Popen[str]) -> None:
    """End a server by closing its standard input."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    process, server = start()
    yield server
    stop(process)


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new empty bucket; the environment points at the server for the length of the test."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    import fsspec

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", endpoint_url=s3_server.endpoint, use_listings_cache=False).mkdir(name)
    return name


@pytest.fixture
def s3_faults(s3_server: S3Server) -> Iterator[S3Server]:
    """The server with no plan yet; its `plan` is forgotten afterwards."""
    s3_server.plan()
    yield s3_server
    s3_server.plan()


@pytest.fixture
def s3_url(s3_bucket: str) -> str:
    return f"s3://{s3_bucket}/tests"
