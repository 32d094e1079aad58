"""`trainflow ui`: the pages of MLflow and Prefect, on this machine only, for as long as the command runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import IO, Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from trainer_lib import guard
from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError, InfrastructureError, TrainflowError
from trainer_lib.secrets import mask
from trainer_lib.trackers.spool import user_data_dir
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Chosen, Debug, PlaceWords, command
from trainflow.flows.cli.signals import until_stopped
from trainflow.flows.records.past_runs import NEWEST, PastRun, find_run
from trainflow.flows.spec.spec import storage_here
from trainflow.tasks.tracking.mlflow_run import default_tracking_uri

HOST = "127.0.0.1"
# MLflow opens in its view for language-model applications; this asks for the one with curves.
TRAINING_VIEW = "workflowType=machine_learning"
_START_S = 90.0
_GRACE_S = 5.0


@command("""
    trainflow ui pipeline.yaml
    trainflow ui --storage .trainflow --run last --port 5000
""")
def ui(
    words: PlaceWords,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="The run to open; unset: the newest of the spec.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port on 127.0.0.1; unset: a free one.")] = None,
    debug: Debug = False,
) -> None:
    """Browse the runs in the UIs of MLflow and Prefect, on this machine only, until Ctrl-C."""
    out = terminal.console()
    with until_stopped(), contextlib.ExitStack() as stack:
        place = _find_place(words, run)
        with out.status("starting MLflow"):
            address = stack.enter_context(_served(place, port))
        out.print(f"MLflow:  {_page(address, place)}")
        if place.server is not None:
            # Nothing was started here and nothing waits: what runs is named.
            from trainflow.flows.server.membership import find_page

            if link := find_page():
                out.print(f"Prefect: {link}")
            return
        try:
            with out.status("starting Prefect"):
                link = stack.enter_context(_prefect_served(place.run))
            out.print(f"Prefect: {link}")
        except TrainflowError as error:  # MLflow's pages are there all the same
            out.print(f"Prefect: {error}")
        out.print("Ctrl-C ends them. The links are for you alone: they carry passwords.")
        while True:
            time.sleep(3600)


@dataclass(frozen=True)
class TrackingPlace:
    """The tracking address, and the run to open (None: the start page)."""

    uri: str
    run: PastRun | None = None

    @property
    def server(self) -> str | None:
        """The address, without credentials, when it is a server that runs already."""
        return mask(self.uri).rstrip("/") if urlsplit(self.uri).scheme in {"http", "https"} else None

    @property
    def sqlite_file(self) -> Path | None:
        """The database when it is a file."""
        path = self.uri.removeprefix("sqlite:///")
        return Path(path).absolute() if path != self.uri else None


def _find_place(words: PlaceWords, run: str | None) -> TrackingPlace:
    """The tracking store of a spec or a storage; with neither, that of this folder, else MLFLOW_TRACKING_URI."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri and not (words.place or words.storage or storage_here()):
        place = TrackingPlace(uri)
    else:
        chosen = words.choose("ui")
        uri = chosen.tracking.uri or default_tracking_uri(chosen.place)
        place = TrackingPlace(uri, _find_run(chosen, run))
    if place.sqlite_file is not None and not place.sqlite_file.is_file():
        what = "No run has been recorded there yet."
        remedy = "Run a pipeline first (trainflow run SPEC), or name the storage that it used."
        raise ConfigError(what, field="tracking", value=str(place.sqlite_file), remedy=remedy)
    return place


def _find_run(chosen: Chosen, text: str | None) -> PastRun | None:
    """The run that is named, else the newest; None: none is recorded. Raises ConfigError for a name of no run."""
    if text is not None:
        return find_run(chosen.storage, text, field="--run")
    pipeline = None if chosen.spec is None else chosen.spec.name
    with contextlib.suppress(ConfigError):
        return find_run(chosen.storage, NEWEST, field="--run", pipeline=pipeline)
    return None


@contextlib.contextmanager
def _served(place: TrackingPlace, port: int | None) -> Iterator[str]:
    """MLflow's server inside the block; yields its address, with its token. One that runs already is used as it is.

    Everything it starts ends with the block, and also when this process is killed; no file is left then, either.
    """
    if place.server is not None:
        yield place.server
        return
    # Another process may take the port before MLflow does; `_wait` reports that.
    port, token = _checked(port), secrets.token_urlsafe(24)
    address = f"http://{HOST}:{port}/?token={token}"
    with tempfile.TemporaryFile() as log, _guarded(place, port, token, log) as process:
        _wait(process, address, log)
        yield address


@contextlib.contextmanager
def _prefect_served(run: PastRun | None) -> Iterator[str]:
    """A Prefect server inside the block, the embedded one unless another is configured; yields the link to the run."""
    import httpx

    from trainflow.flows.records.prefect_runs import find_flow_run
    from trainflow.flows.server.api import prefect_api
    from trainflow.flows.server.membership import find_page, sign_in_link

    with prefect_api() as url:
        page = "/runs"
        # The list is always there; the page of a run is a convenience.
        with contextlib.suppress(httpx.HTTPError, ValueError):
            if run is not None and run.run_name:
                flow_run_id = find_flow_run(run.run_name, datetime.fromisoformat(run.started))
                page += f"/flow-run/{flow_run_id}" if flow_run_id else ""
        yield sign_in_link(url, page) or find_page(page) or url


@contextlib.contextmanager
def _guarded(place: TrackingPlace, port: int, token: str, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "trainer_lib.trackers.mlflow.mlflow_page", str(port)]
    guarded = [sys.executable, "-I", "-S", str(Path(guard.__file__).resolve())]
    database = place.sqlite_file
    artifacts = (database.parent if database is not None else user_data_dir()) / "mlartifacts"
    environ = {
        **os.environ,
        # Not arguments: they may hold a password.
        "MLFLOW_BACKEND_STORE_URI": place.uri if database is None else f"sqlite:///{database}",
        "TRAINFLOW_UI_TOKEN": token,
        "TRAINFLOW_UI_ARTIFACTS": str(artifacts),
        "PYTHONSAFEPATH": "1",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # spares eight processes of 270 MB
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        [*guarded, "--grace", str(_GRACE_S), "--", *command],
        cwd="/",  # libraries read settings from the working directory: never from a folder that others may write
        env=environ,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the server
    )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()  # the guard ends everything
        process.wait()


def _checked(port: int | None) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A port in TIME_WAIT counts as free: servers bind it with this option, too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
        except OSError as error:
            what = f"The port cannot be used: {error.strerror}."
            remedy = "Name another one, or none: a free one is taken."
            raise ConfigError(what, field="--port", value=port, remedy=remedy) from error
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], address: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, HTTPException):
            _request(address, "/health")
            return
        time.sleep(0.1)
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    what = "MLflow's server did not start." + (f" Its log ends: {lines[-1].strip()}" if lines else "")
    remedy = "Run again with --debug for its whole log."
    raise InfrastructureError(what, field="ui", remedy=remedy, details="\n".join(lines[-60:]))


def _page(address: str, place: TrackingPlace) -> str:
    """The page of the run, else the start."""
    if place.run is None or not place.run.mlflow_run_id:
        return address
    try:
        info = _request(address, f"/api/2.0/mlflow/runs/get?run_id={quote(place.run.mlflow_run_id)}")["run"]["info"]
    # The start page is always there; a deep link is a convenience.
    except (OSError, ValueError, KeyError, HTTPException):
        return address
    address = address if "?" in address else f"{address}/"
    return f"{address}#/experiments/{info['experiment_id']}/runs/{info['run_id']}?{TRAINING_VIEW}"


def _request(address: str, path: str) -> dict[str, Any]:
    """The JSON answer to a GET; ``{}`` where it is not JSON. Raises OSError or HTTPException without an answer."""
    base, _, token = address.partition("?token=")
    request = urllib.request.Request(base.rstrip("/") + path)  # noqa: S310 - ours, or the user's tracking server
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with _OPENER.open(request, timeout=10) as answer:
        data = answer.read()
    # /health answers "OK", which is not JSON.
    return parse_json(data, dict) if data.startswith(b"{") else {}


# Not by a proxy: the server is on this machine, or one that the user named.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
