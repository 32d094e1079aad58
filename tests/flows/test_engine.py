"""The embedded Prefect server: shared, silent, and gone with its last client; what of Prefect is undocumented."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import re
import sqlite3
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext, serialize_context
from prefect.events import emit_event
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker, emit_events_to_cloud
from prefect.logging import configuration
from prefect.logging.handlers import APILogHandler, APILogWorker
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_DATABASE_PASSWORD,
    temporary_settings,
)

from tests.support import repository
from tests.support.command import answer, start_script
from tests.support.prefect_home import embedded_servers, make_home
from tests.support.prefect_server import wait_for
from tests.support.repository import relative, sources
from trainer_lib.errors import ConfigError, InfrastructureError, StorageError
from trainflow.flows.server.api import prefect_api, quiet_environment
from trainflow.tasks.prefect.prefect_internals import (
    patient_events,
    send_little,
    send_queued,
    settings_for_every_thread,
)

# A command with a flow inside prefect_api: each line of standard input is a further task.
COMMAND = """
import sys
from trainflow.flows.server.api import prefect_api, quiet_environment
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
        one(sys.argv[1] == "outlives")
        print(url, flush=True)
        for line in sys.stdin:
            one(False)
    probe()
print("left", flush=True)
"""


class Command:
    """A process inside `prefect_api`; `url` once it is there."""

    def __init__(self, name: str) -> None:
        quiet = {"PREFECT_LOGGING_LEVEL": "WARNING"}
        self.process = start_script(COMMAND, name, env=quiet, stderr=subprocess.PIPE)

    def url(self) -> str:
        url = answer(self.process)
        assert url.startswith("http://127.0.0.1:"), self.process.communicate()
        return url

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def finish(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return out, err

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Path:
    """A Prefect home of these tests' own: the other tests of this session keep a server in theirs."""
    return make_home(tmp_path_factory.mktemp("prefect-home"), prefect_database)


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
    return embedded_servers(Path(os.environ["PREFECT_HOME"]))


def wait_for_no_server() -> None:
    psutil.wait_procs(servers(), timeout=60)
    assert servers() == []


def task_states(flow: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(Path(os.environ["PREFECT_HOME"]) / "prefect.db")) as database:
        rows = database.execute(
            "select task_run.state_type from task_run join flow_run on flow_run.id = task_run.flow_run_id"
            " join flow on flow.id = flow_run.flow_id where flow.name = ?",
            [flow],
        )
        return [state for (state,) in rows]


def test_commands_share_a_private_server_that_outlives_its_starter_but_no_client_and_leaves_no_noise(
    start: Callable[..., Command],
) -> None:
    commands = {name: start(name) for name in ("first", "second")}
    url = commands["first"].url()
    assert commands["second"].url() == url
    [server] = servers()
    request = urllib.request.Request(f"{url}/flows/filter", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 401, "another user of the machine could run code by it"
    refused.value.close()
    [description] = Path(os.environ["PREFECT_HOME"]).glob("trainflow/*/server.json")
    assert description.stat().st_mode & 0o077 == 0
    assert json.loads(description.read_bytes())["auth"] not in " ".join(server.cmdline())

    starter, other = sorted(commands, key=lambda name: commands[name].process.pid != server.ppid())
    commands[starter].kill()
    time.sleep(0.5)  # by now it would be ending
    assert server.is_running()
    commands[other].say("a second task")
    assert commands[other].finish() == ("left\n", "")
    assert servers() == []
    assert task_states(f"probe-{other}") == ["COMPLETED"] * 2, "states travel as events: the last must not be lost"


def test_a_killed_server_is_started_again_where_it_was_and_learns_all_that_happened(
    start: Callable[..., Command],
) -> None:
    command = start("outlives")
    url = command.url()
    [server] = servers()
    wait_for("the task's begin", lambda: task_states("probe-outlives") == ["RUNNING"])
    server.suspend()
    command.say("the task ends")
    command.url()
    time.sleep(0.5)  # by now the kernel has the event, which the server will never read
    server.kill()
    server.wait()
    command.say("while no server is there")
    wait_for("a server at its old address, which the flow's client knows", lambda: _answers(url), 60)
    assert command.finish()[0] == "left\n"
    assert task_states("probe-outlives") == ["COMPLETED"] * 2
    wait_for_no_server()


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def test_the_server_ends_when_its_client_is_killed_while_it_starts(start: Callable[..., Command]) -> None:
    command = start("killed-early")
    wait_for("the server to start", servers)
    command.kill()
    wait_for_no_server()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:9/api", "No Prefect server answers there: Connection refused."),
        ("nonsense", "This is not the address of a server."),
    ],
)
def test_a_configured_server_that_does_not_answer_is_bad_input(url: str, why: str) -> None:
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(ConfigError) as refused, prefect_api():
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


# -- undocumented names -----------------------------------------------------------------------------------------------

# Private names and modules of Prefect, wherever a line has them.
UNDOCUMENTED = re.compile(
    r"\bprefect\.([\w.]+\.)?_|\bprefect\.(events\.(clients|worker)|logging\.(configuration|handlers))\b"
    r"|from prefect[\w.]* import ([\w, ]+, )?_|from prefect\.(events|logging) import .*\b(clients|worker|config|handl)"
)


def test_undocumented_names_of_prefect_stand_in_one_file() -> None:
    found = {relative(path) for path in sources() if UNDOCUMENTED.search(path.read_text(encoding="utf-8"))}
    assert found == {"tasks/prefect/prefect_internals.py"}


def test_events_for_a_server_that_stays_away_do_not_hold_a_process_at_its_end() -> None:
    with settings_for_every_thread({PREFECT_API_URL: "http://127.0.0.1:9/api"}), patient_events(600):
        emit_event("a.test", {"prefect.resource.id": "a.test"})
        services: Any = EventsWorker
        worker: Any = next(each for each in services._instances.values() if isinstance(each, EventsWorker))
        send_queued(0.2)
        wait_for("the end of the queue", worker._done_event.is_set)


def test_the_installed_prefect_is_of_a_version_that_was_tried() -> None:
    declared = [Requirement(text) for text in repository.pyproject()["project"]["dependencies"]]
    [prefect] = [requirement for requirement in declared if requirement.name == "prefect"]
    assert prefect.specifier.contains(metadata.version("prefect"))


def test_the_undocumented_names_have_the_shape_that_is_used() -> None:
    import prefect.context

    replaced = inspect.signature(prefect.context._temporary_global_settings_context)
    assert list(replaced.parameters) == ["settings_context"]
    for worker in (EventsWorker, APILogWorker):
        assert "timeout" in inspect.signature(worker.drain_all).parameters
    assert list(inspect.signature(EventsWorker.set_client_override).parameters) == ["client_type", "client_kwargs"]
    assert {"reconnection_attempts", "checkpoint_every"} <= set(inspect.signature(PrefectEventsClient).parameters)
    assert isinstance(inspect.getattr_static(EventsWorker, "_instances"), dict)
    assert emit_events_to_cloud() is False
    assert issubclass(APILogHandler, logging.Handler)
    assert isinstance(configuration.PROCESS_LOGGING_CONFIG, dict)
    assert not inspect.signature(configuration.setup_logging).parameters.keys() - {"incremental"}


def test_tasks_on_other_machines_get_the_flow_runs_id_and_the_api_and_nothing_else(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @task(cache_policy=NO_CACHE)
    def stage(lock: Any) -> Any:
        running = FlowRunContext.get()
        assert running is not None
        assert running.flow_run is not None
        return send_little(serialize_context), str(running.flow_run.id)

    @flow
    def whole(note: str) -> Any:
        return stage(threading.Lock())  # which cannot be pickled

    pickle = importlib.import_module("cloudpickle").dumps
    with temporary_settings({PREFECT_SERVER_DATABASE_PASSWORD: "of-the-database"}):
        answer: Any = whole
        sent, run_id = answer("from-the-spec")
    data = pickle(sent)
    assert str(sent["flow_run_context"]["flow_run"]["id"]) == run_id
    assert sent["task_run_context"] == {}
    assert list(sent["settings_context"]["settings"]) == ["api"]
    assert sent["settings_context"]["settings"]["api"]["url"] == prefect_server
    assert b"from-the-spec" not in data
    assert b"of-the-database" not in data
