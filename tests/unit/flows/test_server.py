"""Prefect's server beside a command: answers, start and end, schedules, what starts runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.server
import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import Flow

from tests.support.machine import serving
from tests.support.repository import ROOT
from trainer_lib.base.restore_process import objects_set_aside
from trainer_lib.errors import ConfigError, InfrastructureError, StorageError
from trainer_lib.storage import Store
from trainflow.flows.pipeline import pipeline
from trainflow.flows.server import api as server_api
from trainflow.flows.server import embedded, membership
from trainflow.flows.server.api import reachable, require_answer
from trainflow.flows.server.membership import Membership
from trainflow.flows.server.schedule import Schedule, Watch, read_interval, show_firings
from trainflow.flows.server.serving import CRASHES, read_variables, require_another_try
from trainflow.flows.spec.spec import PipelineSpec, load_spec

TEMPLATE = json.loads((ROOT / "deployments" / "kubernetes-pool.json").read_text())


@pytest.fixture
def api() -> Iterator[str]:
    """As Prefect's server with PREFECT_SERVER_API_AUTH_STRING: only its health needs no login."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        log_message = staticmethod(lambda *_: None)  # type: ignore[assignment]

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" or "page" in self.path else 401)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"<html>" if "html" in self.path else b"  {}  ")

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)) as port:
        yield f"http://127.0.0.1:{port}/api"


@pytest.mark.parametrize(
    ("page", "problem", "remedy"),
    [
        ("api", "refuses the login: the answer is 401", "PREFECT_SERVER_API_AUTH_STRING"),
        ("html-page", "No Prefect server answers there: something else answers in its place", "PREFECT_API_URL"),
        ("json-page", "No Prefect server answers there: something else answers in its place", "PREFECT_API_URL"),
    ],
)
def test_a_wrong_login_or_server_is_refused_before_anything_starts(
    page: str, problem: str, remedy: str, api: str
) -> None:
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    with (
        temporary_settings({PREFECT_API_URL: api.replace("api", page), PREFECT_API_AUTH_STRING: "me:wrong-word"}),
        pytest.raises(ConfigError, match=problem) as refused,
    ):
        require_answer(api)
    assert remedy in str(refused.value.remedy)
    assert "wrong-word" not in f"{refused.value} {refused.value.details}"


def test_a_server_that_never_answers_is_not_waited_for_prefects_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    monkeypatch.setattr(server_api, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        once = temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0})
        with once, pytest.raises(ConfigError, match="No Prefect server answers there: timed out"):
            require_answer(url)


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
    for name, value in [("start_if_absent", False), ("description", described), ("server_pid", 1)]:
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


def enter_run(monkeypatch: pytest.MonkeyPatch, *, run_count: int, crashes: int) -> None:
    once = ("Running", "Crashed", "CrashedAtWork", "AwaitingRetry")
    states = [SimpleNamespace(name=name) for name in (*once * crashes, "Running")]
    client = SimpleNamespace(read_flow_run_states=lambda _: states)
    context = SimpleNamespace(flow_run=SimpleNamespace(id="1", run_count=run_count))
    monkeypatch.setattr("prefect.context.FlowRunContext.get", lambda: context)
    monkeypatch.setattr("prefect.client.orchestration.get_client", lambda **_: contextlib.nullcontext(client))


@pytest.mark.parametrize(("run_count", "crashes"), [(1, 0), (3, 2), (9, 1)])
def test_a_run_is_tried_as_often_as_it_may_crash(monkeypatch: pytest.MonkeyPatch, run_count: int, crashes: int) -> None:
    enter_run(monkeypatch, run_count=run_count, crashes=crashes)
    require_another_try({CRASHES: "2"})
    require_another_try({})


def test_the_crash_after_the_last_try_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_run(monkeypatch, run_count=4, crashes=3)
    with pytest.raises(InfrastructureError, match="crashed 3 times"):
        require_another_try({CRASHES: "2"})
    # Without a limit nothing is counted: such a run was retried by hand.
    require_another_try({})


DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits" / "pipeline.yaml"


def test_the_server_gets_the_parameters_that_prefect_would_send(tmp_path: Path) -> None:
    spec = load_spec(DIGITS, [f"storage={tmp_path}", "prepare.options.seed=1"])
    parameters: dict[str, Any] = {"spec": spec, "only": None, "force": ["train"], "debug": False}
    assert pipeline.serialize_parameters(parameters) == Flow.serialize_parameters(pipeline, parameters)
    strange = {**parameters, "start": object()}
    assert pipeline.serialize_parameters(strange) == Flow.serialize_parameters(pipeline, strange)


NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


# ----------------------------------------------------------------------------------------------------------- schedules
DAILY, WEEKLY = "0 3 * * *", "FREQ=WEEKLY;BYDAY=MO,TH;BYHOUR=3;BYMINUTE=0;BYSECOND=0"


@pytest.mark.parametrize(
    ("given", "dates"),
    [
        ({"cron": DAILY, "timezone": "Europe/Berlin"}, "Mon 2026-11-23 03:00:00 CET, Tue 2026-11-24 03:00:00 CET"),
        ({"rrule": WEEKLY}, "Mon 2026-11-23 03:00:00 UTC, Thu 2026-11-26 03:00:00 UTC"),
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
        ({"cron": DAILY, "interval_s": 5.0}, "--interval", "one of --cron and --interval"),
        ({"cron": DAILY, "rrule": "FREQ=DAILY"}, "--rrule", "one of --cron and --rrule"),
        ({"cron": "3 o'clock"}, "--cron", "cron's notation"),
        ({"cron": "0 0 31 2 *"}, "--cron", "No run would ever start"),
        ({"rrule": "FREQ=SOMETIMES"}, "--rrule", "not a recurrence rule"),
        ({"rrule": "daily"}, "--rrule", "not a recurrence rule"),
        ({"rrule": "DTSTART:20200101T000000\nRRULE:FREQ=DAILY;COUNT=2"}, "--rrule", "No run would ever start"),
        ({"cron": DAILY, "timezone": "Europe/Berln"}, "--timezone", "time zone does not exist"),
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


def test_job_variables_are_those_of_the_pool() -> None:
    found = read_variables(["gpus=4", "env={A: b}"], "image:1", "kubernetes", TEMPLATE, {"PYTHONSAFEPATH": "1"})
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
        read_variables(given, image, kind, TEMPLATE, {})
    assert words in f"{refused.value.message} {refused.value.remedy}"


# --------------------------------------------------------------------------------------------------------------- watch
class Runs:
    """What Prefect was asked to start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[str] = []
        self.away = False

        def start(watch: Watch, once: str) -> str:
            if self.away:
                raise ConnectionError("away")
            if once not in self.keys:  # as Prefect does with an idempotency key
                self.keys.append(once)
            return "run"

        monkeypatch.setattr(Watch, "_start", start)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def watch(tmp_path: Path, said: list[str] | None = None) -> Watch:
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    spec = PipelineSpec(name="toy", recipe="recipe.py", storage=str(tmp_path / "store"))
    return Watch(str(data), "pipeline/toy", spec, (said if said is not None else []).append)


def test_new_data_starts_one_run_once_it_has_settled_also_over_restarts(tmp_path: Path, runs: Runs) -> None:
    looking = watch(tmp_path)
    assert [looking.look(), looking.look()] == [False, False], "what is there at first starts nothing"
    (tmp_path / "data" / "a").write_text("1")
    assert looking.look() is False, "it may still be growing"
    (tmp_path / "data" / "a").write_text("12")
    assert looking.look() is False
    assert looking.look() is True
    assert looking.look() is False
    (tmp_path / "data" / "b").write_text("1")
    again = watch(tmp_path)
    assert [again.look(), again.look(), again.look()] == [False, True, False]
    assert len(runs.keys) == 2
    # Back to what was there before: that is a change as well, and another run.
    (tmp_path / "data" / "b").unlink()
    assert [again.look(), again.look()] == [False, True]
    assert len(set(runs.keys)) == 3
    [name] = Store.open(str(tmp_path / "store")).child("watch").children()
    note = json.loads((tmp_path / "store" / "watch" / name).read_text())
    assert (note["deployment"], note["url"], note["started"]) == ("pipeline/toy", str(tmp_path / "data"), 3)


def test_a_run_that_was_created_before_the_note_was_written_is_not_created_twice(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = watch(tmp_path)
    looking.look()
    (tmp_path / "data" / "a").write_text("1")
    looking.look()
    with monkeypatch.context() as broken:
        broken.setattr(Watch, "_write_note", lambda *_: (_ for _ in ()).throw(StorageError("full", field="x")))
        with pytest.raises(StorageError):
            looking.look()
    again = watch(tmp_path)
    assert [again.look(), again.look()] == [False, True]
    assert len(runs.keys) == 1


def test_what_is_away_is_waited_for_and_said_once(tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    looking = watch(tmp_path, said)
    looking.look()
    (tmp_path / "data" / "a").write_text("1")

    class Turns:
        """An event that is set after a number of waits, and changes the world in between."""

        left = 8

        def is_set(self) -> bool:
            return self.left == 0

        def wait(self, _: float) -> None:
            self.left -= 1
            runs.away = self.left > 3

    runs.away = True
    looking.run(Turns())  # type: ignore[arg-type]
    assert len(runs.keys) == 1
    assert [line.partition(": ")[0] for line in said] == [
        f"{tmp_path / 'data'} cannot be watched just now, and is tried again",
        f"New data under {tmp_path / 'data'}",
        f"{tmp_path / 'data'} is watched again.",
    ]


def test_a_url_that_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    looking = watch(tmp_path)
    for url in (str(tmp_path / "nowhere"), "nosuchscheme://x", "s3:/x"):
        looking.url = url
        with pytest.raises(ConfigError) as refused:
            looking.require_listable()
        assert refused.value.field == "--watch"
        assert refused.value.remedy
