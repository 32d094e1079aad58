"""Prefect's server beside a command: answers, start and end, schedules, what starts runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import Flow

from tests.support.repository import ROOT
from trainer_lib.base.restore_process import objects_set_aside
from trainer_lib.errors import ConfigError, InfrastructureError
from trainflow.flows.pipeline import pipeline
from trainflow.flows.server import embedded, membership
from trainflow.flows.server.api import reachable, require_answer
from trainflow.flows.server.membership import Membership
from trainflow.flows.server.schedule import Schedule, read_interval, show_firings
from trainflow.flows.server.serving import read_variables
from trainflow.flows.spec.spec import load_spec


@pytest.fixture
def api() -> Iterator[str]:
    """As Prefect's server with PREFECT_SERVER_API_AUTH_STRING: only its health needs no login."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        log_message = staticmethod(lambda *_: None)  # type: ignore[assignment]

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 401)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/api"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_wrong_login_is_refused_before_anything_starts(api: str) -> None:
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    with (
        temporary_settings({PREFECT_API_URL: api, PREFECT_API_AUTH_STRING: "me:wrong-word"}),
        pytest.raises(ConfigError, match="refuses the login: the answer is 401") as refused,
    ):
        require_answer(api)
    assert refused.value.field == "PREFECT_API_AUTH_STRING"
    assert "PREFECT_SERVER_API_AUTH_STRING" in str(refused.value.remedy)
    assert "wrong-word" not in f"{refused.value} {refused.value.details}"


def test_a_request_that_the_server_refuses_later_names_the_server(api: str) -> None:
    with pytest.raises(InfrastructureError, match="refused a request: the answer is 401") as refused, reachable(api):
        httpx.get(f"{api}/flows").raise_for_status()
    assert refused.value.value == api
    other = api.replace("/api", "/elsewhere")
    with pytest.raises(httpx.HTTPStatusError), reachable(api):
        httpx.get(other).raise_for_status()


@pytest.mark.parametrize(
    ("answers", "killed"),
    [
        ("+-----+-----+", False),  # a machine that slept misses some looks; they are counted since the last answer
        ("+------", True),
        ("------------", False),  # it has never answered: it is starting
    ],
)
def test_only_a_server_that_stopped_answering_is_killed(
    monkeypatch: pytest.MonkeyPatch, answers: str, killed: bool
) -> None:
    member = Membership.__new__(Membership)
    looks = iter(answers)
    kills: list[None] = []
    described = {"url": "http://127.0.0.1:1"}
    for name, value in [("start_if_absent", False), ("description", described), ("server_pid", 1), ("_kill", None)]:
        monkeypatch.setattr(member, name, lambda value=value: value)
    monkeypatch.setattr(member, "_kill", lambda: kills.append(None))
    left = SimpleNamespace(wait=lambda _: (look := next(looks, None)) is None or now.update(look=look), is_set=bool)
    now: dict[str, str] = {}
    monkeypatch.setattr(member, "_left", left, raising=False)
    monkeypatch.setattr(membership, "is_healthy", lambda _: now["look"] == "+")
    member._keep()
    assert bool(kills) is killed


@pytest.mark.parametrize("words", ["file is not a database", "database disk image is malformed"])
def test_a_damaged_database_of_prefect_is_named(tmp_path: Path, words: str) -> None:
    member = Membership.__new__(Membership)
    member.log, member._database = tmp_path / "server.log", tmp_path / "prefect.db"
    member.log.write_text(f"sqlalchemy.exc.DatabaseError: (sqlite3.DatabaseError) {words}\nApplication startup failed.")
    failure = member._failure("It ended with exit code 3.")
    assert failure.value == str(tmp_path / "prefect.db")
    assert "damaged" in failure.message
    assert "Move it away" in str(failure.remedy)


def test_answers_do_not_wait_for_the_acknowledgement_of_their_first_packet() -> None:
    """asyncio turns Nagle's algorithm off only for sockets that name their protocol: 40 ms for each request."""
    options: list[int] = []

    def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        options.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.write(b"x")
        writer.close()

    async def exchange() -> None:
        listener = embedded.listen_on(0)
        async with await asyncio.start_server(note, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b"x"
            writer.close()

    asyncio.run(exchange())
    assert len(options) == 1 and options[0] != 0


@pytest.fixture
def looked_at() -> Iterator[None]:
    """Leaves nothing set aside behind, whatever a test of this process did before."""
    before = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if before:
        gc.freeze()


def test_imports_are_not_looked_at_inside_a_command_and_are_afterwards(looked_at: None) -> None:
    with objects_set_aside():
        assert gc.get_freeze_count() > 1000
        with objects_set_aside():
            pass
        assert gc.get_freeze_count() > 1000  # the outer block's
    assert gc.get_freeze_count() == 0
    gc.freeze()  # what a process has set aside itself stays so
    with contextlib.suppress(ValueError), objects_set_aside():
        raise ValueError
    assert gc.get_freeze_count() > 1000


DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits" / "pipeline.yaml"


def test_the_server_gets_the_parameters_that_prefect_would_send(tmp_path: Path) -> None:
    spec = load_spec(DIGITS, [f"storage={tmp_path}", "prepare.options.seed=1"])
    parameters: dict[str, Any] = {"spec": spec, "only": None, "force": ["train"], "debug": False}
    assert pipeline.serialize_parameters(parameters) == Flow.serialize_parameters(pipeline, parameters)
    strange = {**parameters, "start": object()}
    assert pipeline.serialize_parameters(strange) == Flow.serialize_parameters(pipeline, strange)


NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


# ----------------------------------------------------------------------------------------------------------- schedules
@pytest.mark.parametrize(
    ("given", "dates"),
    [
        (
            {"cron": "0 3 * * *", "timezone": "Europe/Berlin"},
            "Mon 2026-11-23 03:00:00 CET, Tue 2026-11-24 03:00:00 CET",
        ),
        ({"interval_s": 3600, "anchor": NOON}, "Sun 2026-11-22 12:00:00 UTC, Sun 2026-11-22 13:00:00 UTC"),
    ],
)
def test_the_next_firings_are_known_before_the_server_is(given: dict[str, Any], dates: str) -> None:
    schedule = Schedule(**given)
    assert show_firings(schedule.next_firings(2, after=NOON)) == f"Next: {dates}."
    assert schedule.prefect() is not None
    assert (Schedule().prefect(), Schedule().next_firings(3)) == (None, [])


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"cron": "0 3 * * *", "interval_s": 5.0}, "--interval", "one of --cron and --interval"),
        ({"cron": "3 o'clock"}, "--cron", "cron's notation"),
        ({"cron": "0 0 31 2 *"}, "--cron", "No run would ever start"),
        ({"cron": "0 3 * * *", "timezone": "Europe/Berln"}, "--timezone", "time zone does not exist"),
        ({"timezone": "../etc/passwd"}, "--timezone", "time zone does not exist"),
    ],
)
def test_schedules_that_cannot_work_are_refused(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Schedule(**given).prefect()
    assert refused.value.field == field
    assert words in refused.value.message
    assert refused.value.remedy
    if given.get("timezone") == "Europe/Berln":
        assert "Europe/Berlin" in refused.value.remedy


def test_intervals_that_are_not_durations_are_refused() -> None:
    for text in ("often", "-5", "0", "0.5", "nan", ""):
        with pytest.raises(ConfigError) as refused:
            read_interval(text)
        assert refused.value.field == "--interval"
    assert [read_interval(text) for text in ("12h", "3600", None)] == [43_200, 3600, None]


# --------------------------------------------------------------------------------------------------------------- pools
TEMPLATE = json.loads((ROOT / "deployments" / "kubernetes-pool.json").read_text())


def test_job_variables_are_those_of_the_pool() -> None:
    found = read_variables(["gpus=4", "env={A: b}"], "image:1", "kubernetes", TEMPLATE)
    assert found == {"gpus": 4, "image": "image:1", "env": {"A": "b", "PYTHONSAFEPATH": "1"}}


@pytest.mark.parametrize(
    ("given", "image", "kind", "words"),
    [
        (["gpu=4"], "i", "kubernetes", "gpus"),
        (["gpus"], "i", "kubernetes", "NAME=VALUE"),
        ([], None, "docker", "Dockerfile"),
        ([], "i", "process", "--image"),
        (["env=[1"], "i", "kubernetes", "Quote"),
    ],
)
def test_job_variables_that_cannot_work_are_refused(given: list[str], image: str | None, kind: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_variables(given, image, kind, TEMPLATE)
    assert words in f"{refused.value.message} {refused.value.remedy}"
