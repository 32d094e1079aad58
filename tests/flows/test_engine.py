"""The embedded Prefect server: shared by concurrent commands, silent, and gone with its last client however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_API_URL,
    PREFECT_HOME,
    temporary_settings,
)

from flows.server.api import prefect_api, quiet_environment
from tests.support.prefect_server import wait_for
from trainer_lib.errors import ConfigError, InfrastructureError, StorageError

# A command with a flow inside prefect_api: each line of standard input is a further task.
COMMAND = """
import sys
from flows.server.api import prefect_api, quiet_environment
quiet_environment()
with prefect_api() as url:
    from prefect import flow, task
    @task
    def one(waits):
        if waits:
            print(url, flush=True)
            sys.stdin.readline()
    @flow(name="probe-" + sys.argv[1])
    def probe():
        one(sys.argv[1] == "stopped")
        print(url, flush=True)
        for line in sys.stdin:
            one(False)
    probe()
print("left", flush=True)
"""


class Command:
    """A process inside `prefect_api`; `url` once it is there."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, name],
            env={**os.environ, "PREFECT_LOGGING_LEVEL": "WARNING"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith("http://127.0.0.1:"), self.process.communicate()
        return line

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def finish(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return out, err

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Prefect home of these tests' own: the other tests of this session keep a server in theirs."""
    return tmp_path_factory.mktemp("prefect-home")


@pytest.fixture
def start(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Command]]:
    monkeypatch.setenv("PREFECT_HOME", str(home))
    commands: list[Command] = []

    def start(name: str) -> Command:
        commands.append(Command(name))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            command.kill()
    wait_for_no_server()


def servers() -> list[psutil.Process]:
    """Embedded servers of this test session's Prefect home."""
    home = os.environ["PREFECT_HOME"]
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("server/embedded.py" in part for part in process.info["cmdline"] or [])
        and any(home in part for part in process.info["cmdline"])
    ]


def wait_for_no_server() -> None:
    psutil.wait_procs(servers(), timeout=20)
    assert servers() == []


def task_states(flow: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(Path(os.environ["PREFECT_HOME"]) / "prefect.db")) as database:
        rows = database.execute(
            "select task_run.state_type from task_run join flow_run on flow_run.id = task_run.flow_run_id"
            " join flow on flow.id = flow_run.flow_id where flow.name = ?",
            [flow],
        )
        return [state for (state,) in rows]


def test_a_command_gets_a_private_server_and_leaves_no_noise_and_no_process(start: Callable[..., Command]) -> None:
    command = start("quiet")
    url = command.url()
    [server] = servers()
    request = urllib.request.Request(f"{url}/flows/filter", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 401, "another user of the machine could run code by it"
    refused.value.close()
    [description] = Path(os.environ["PREFECT_HOME"]).glob("trainflow/*/server.json")
    assert description.stat().st_mode & 0o077 == 0
    assert json.loads(description.read_bytes())["auth"] not in " ".join(server.cmdline())

    command.say("a second task")
    out, err = command.finish()
    assert (out, err) == ("left\n", "")
    assert not server.is_running()
    assert task_states("probe-quiet") == ["COMPLETED"] * 2, "task states travel as events: the last must not be lost"


def test_concurrent_commands_share_a_server_that_outlives_its_starter_but_no_client(
    start: Callable[..., Command],
) -> None:
    first, second = start("first"), start("second")
    assert first.url() == second.url()
    [server] = servers()
    starter, other = (first, second) if server.ppid() == first.process.pid else (second, first)
    starter.kill()
    time.sleep(0.5)  # by now it would be ending
    assert server.is_running()
    other.kill()
    wait_for_no_server()


def test_a_killed_server_is_started_again_where_it_was_and_learns_all_that_happened(
    start: Callable[..., Command],
) -> None:
    command = start("outlives")
    url = command.url()
    [server] = servers()
    server.kill()
    server.wait()
    command.say("while no server is there")
    wait_for("a server at its old address, which the flow's client knows", lambda: _answers(url), 60)
    assert command.finish()[0] == "left\n"
    assert task_states("probe-outlives") == ["COMPLETED"] * 2
    wait_for_no_server()


def test_the_end_of_a_task_that_a_stopped_server_never_read_is_sent_to_its_successor(
    start: Callable[..., Command],
) -> None:
    command = start("stopped")
    command.url()
    [server] = servers()
    wait_for("the task's begin", lambda: task_states("probe-stopped") == ["RUNNING"])
    server.suspend()
    command.say("the task ends")
    command.url()
    time.sleep(0.5)  # by now the kernel has the event
    server.kill()
    server.wait()
    assert command.finish()[0] == "left\n"
    assert task_states("probe-stopped") == ["COMPLETED"]
    wait_for_no_server()


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def test_the_server_ends_when_its_client_is_killed_while_it_starts(start: Callable[..., Command]) -> None:
    command = start("killed-early")
    wait_for("the server to start", servers, 30)
    command.kill()
    wait_for_no_server()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:9/api", "No Prefect server answers there: the connection is refused."),
        ("nonsense", "This is not the address of a server."),
    ],
)
def test_a_configured_server_that_does_not_answer_is_bad_input(url: str, why: str) -> None:
    with (
        temporary_settings({PREFECT_API_URL: url}),
        pytest.raises(ConfigError) as refused,
        prefect_api(),
    ):
        pytest.fail("entered")
    assert (refused.value.field, refused.value.value, refused.value.message) == ("PREFECT_API_URL", url, why)
    assert "unset" in str(refused.value.remedy)


def test_a_server_that_cannot_start_is_named_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "prefect.db").write_bytes(b"not a database" * 1000)
    url = f"sqlite+aiosqlite:///{tmp_path / 'prefect.db'}"
    with (
        temporary_settings({PREFECT_API_URL: None, PREFECT_HOME: tmp_path, PREFECT_API_DATABASE_CONNECTION_URL: url}),
        pytest.raises(InfrastructureError) as failed,
        prefect_api(),
    ):
        pytest.fail("entered")
    assert failed.value.message == "The database of the embedded Prefect server is damaged."
    assert failed.value.value is not None
    assert "not a database" in Path(failed.value.value).read_text()


def test_an_unusable_home_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        temporary_settings({PREFECT_API_URL: None, PREFECT_HOME: tmp_path / "file"}),
        pytest.raises(StorageError) as failed,
        prefect_api(),
    ):
        pytest.fail("entered")
    assert failed.value.field == "PREFECT_HOME"


def test_quiet_environment_keeps_what_the_user_set_and_tells_a_proxy_to_spare_the_loopback() -> None:
    environ = {"PREFECT_SERVER_ANALYTICS_ENABLED": "true"}
    quiet_environment(environ)
    assert environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"
    assert environ["DO_NOT_TRACK"] == environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert "NO_PROXY" not in environ
    environ = {"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "example.org"}
    quiet_environment(environ)
    assert environ["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert environ["no_proxy"] == "127.0.0.1,localhost"
