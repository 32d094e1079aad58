"""`trainflow ui`: the pages of MLflow and Prefect, on this machine only, for as long as the command runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from trainer_lib import guard
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import nearest
from trainer_lib.errors import ConfigError, InfrastructureError, TrainflowError
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainer_lib.trackers.spool import user_data_dir
from trainflow.flows.cli.presentation import shown
from trainflow.flows.cli.spec_choice import choose_spec_or_storage
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.tracking.mlflow_run import default_tracking_uri

if TYPE_CHECKING:
    from rich.console import Console

HOST = "127.0.0.1"
# MLflow opens in its view for language-model applications; this asks for the one with curves.
TRAINING_VIEW = "workflowType=machine_learning"
_START_S = 90.0
_GRACE_S = 5.0


@dataclass(frozen=True)
class TrackingPlace:
    """Where runs are recorded, and the experiment asked for (None: any)."""

    uri: str
    experiment: str | None = None

    @property
    def server(self) -> str | None:
        """The address, without credentials, when it is a server that runs already."""
        return mask(self.uri).rstrip("/") if urlsplit(self.uri).scheme in {"http", "https"} else None

    @property
    def sqlite_file(self) -> Path | None:
        """The database when it is a file."""
        path = self.uri.removeprefix("sqlite:///")
        return Path(path).absolute() if path != self.uri else None


def find_place(spec: Path | None, overrides: list[str], storage: str | None) -> TrackingPlace:
    """The tracking store of a spec or a storage, found exactly as a run finds it.

    With neither: the spec in this folder, else ``.trainflow`` here, else MLFLOW_TRACKING_URI.

    Raises:
        ConfigError: the spec is bad, both are given, or nothing is recorded there yet.
    """
    spec, overrides, storage = choose_spec_or_storage(spec, overrides, storage)
    if spec is not None:
        return _recorded(_place_of(load_spec(spec, overrides, needs_sweep=False)))
    if storage is not None:
        return _recorded(TrackingPlace(default_tracking_uri(Store.open(storage, field="--storage"))))
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return _recorded(TrackingPlace(uri))
    raise ConfigError(
        "No runs were named, this folder has neither a single spec nor .trainflow, and MLFLOW_TRACKING_URI is not set.",
        field="ui",
        remedy="Name a spec (trainflow ui SPEC) or a storage (trainflow ui --storage URL).",
    )


def find_storage(
    spec: Path | None, overrides: list[str], storage: str | None, *, command: str
) -> tuple[TrackingConfig, Store]:
    """The tracking settings and the storage root of a spec, or of what is in this folder.

    Args:
        command: what asks, for the message of an error.

    Raises:
        ConfigError: the spec is bad, both are given, this folder has neither, or the storage is not a folder.
    """
    spec, overrides, storage = choose_spec_or_storage(spec, overrides, storage)
    if spec is not None:
        parsed = load_spec(spec, overrides, needs_sweep=False)
        # It need not exist: the first run makes it.
        return parsed.tracking, Store.open(parsed.storage)
    if storage is not None:
        return TrackingConfig(), _existing(storage)
    raise ConfigError(
        "No runs were named, and this folder has neither a single spec nor .trainflow.",
        field=command,
        remedy=f"Name a spec (trainflow {command} SPEC) or a storage (trainflow {command} --storage URL).",
    )


def _existing(storage: str) -> Store:
    """The storage that a user named; whether one on an object store is there cannot be known.

    Raises:
        ConfigError: it is a path where no folder is.
    """
    store = Store.open(storage, field="--storage")
    if not store.is_local or (folder := store.local_path()).is_dir():
        return store
    if folder.exists():
        remedy = "Name the folder that a run used as its storage."
        raise ConfigError("This is a file, not a folder.", field="--storage", value=storage, remedy=remedy)
    beside = [each.name for each in folder.parent.iterdir() if each.is_dir()] if folder.parent.is_dir() else []
    close = nearest(folder.name, beside)
    remedy = (
        f'Did you mean "{shown(str(folder.with_name(close)))}"?' if close else "Name the folder or URL that a run used."
    )
    raise ConfigError("There is no such folder.", field="--storage", value=storage, remedy=remedy)


def _place_of(spec: PipelineSpec) -> TrackingPlace:
    uri = spec.tracking.uri or default_tracking_uri(Store.open(spec.storage))
    return TrackingPlace(uri, spec.tracking.experiment or spec.name)


def _recorded(place: TrackingPlace) -> TrackingPlace:
    if place.sqlite_file is not None and not place.sqlite_file.is_file():
        raise ConfigError(
            "No run has been recorded there yet.",
            field="tracking",
            value=str(place.sqlite_file),
            remedy="Run a pipeline first (trainflow run SPEC), or name the storage that it used.",
        )
    return place


@contextlib.contextmanager
def served(place: TrackingPlace, port: int | None) -> Iterator[str]:
    """MLflow's server inside the block; yields its address, with its token. One that runs already is used as it is.

    Everything it starts ends with the block, and also when this process is killed; no file is left then, either.

    Raises:
        ConfigError: the port is taken.
        InfrastructureError: it did not start; the message ends with the last line of its log.
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
def prefect_served() -> Iterator[str]:
    """A Prefect server inside the block, the embedded one unless another is configured; yields the link to its UI.

    Raises:
        TrainflowError: the configured server does not answer, or the embedded one did not start.
    """
    from trainflow.flows.server.api import prefect_api
    from trainflow.flows.server.membership import find_page, sign_in_link

    with prefect_api() as url:
        yield sign_in_link(url) or find_page() or url


@contextlib.contextmanager
def _guarded(place: TrackingPlace, port: int, token: str, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "trainer_lib.trackers.mlflow_page", str(port)]
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
            raise ConfigError(
                f"The port cannot be used: {error.strerror}.",
                field="--port",
                value=port,
                remedy="Name another one, or none: a free one is taken.",
            ) from error
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], address: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if _request(address, "GET", "/health") is not None:
                return
        time.sleep(0.1)
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    raise InfrastructureError(
        "MLflow's server did not start." + (f" Its log ends: {lines[-1].strip()}" if lines else ""),
        field="ui",
        remedy="Run again with --debug for its whole log.",
        details="\n".join(lines[-60:]),
    )


def show(place: TrackingPlace, port: int | None, out: Console) -> None:
    """Serve MLflow and Prefect and print their links, until a signal ends the process.

    Where MLflow has a server of its own, nothing is started and nothing waits: what runs is named.
    """
    with contextlib.ExitStack() as stack:
        with out.status("starting MLflow"):
            address = stack.enter_context(served(place, port))
        out.print(f"MLflow:  {page(address, place.experiment)}")
        if place.server is not None:
            from trainflow.flows.server.membership import find_page

            if link := find_page():
                out.print(f"Prefect: {link}")
            return
        try:
            with out.status("starting Prefect"):
                link = stack.enter_context(prefect_served())
            out.print(f"Prefect: {link}")
        except TrainflowError as error:  # MLflow's pages are there all the same
            out.print(f"Prefect: {error}")
        out.print("Ctrl-C ends them. The links are for you alone: they carry passwords.")
        while True:
            time.sleep(3600)


def page(address: str, experiment: str | None) -> str:
    """The page to open: the newest run of the experiment (of any, when None), else the experiment, else the start."""
    try:
        found = [experiment_id] if (experiment_id := _experiment_id(address, experiment)) else []
        searched = found or ([] if experiment else _all_experiments(address))
        run = _newest_run(address, searched)
    # The start page is always there; a deep link is a convenience.
    except (OSError, ValueError, KeyError, http.client.HTTPException):
        return address
    address = address if "?" in address else f"{address}/"
    if run is not None:
        return f"{address}#/experiments/{run[0]}/runs/{run[1]}?{TRAINING_VIEW}"
    return f"{address}#/experiments/{found[0]}/runs?{TRAINING_VIEW}" if found else address


def _experiment_id(address: str, name: str | None) -> str | None:
    if name is None:
        return None
    path = f"/api/2.0/mlflow/experiments/get-by-name?experiment_name={quote(name)}"
    answer = _request(address, "GET", path)
    return None if answer is None else str(answer["experiment"]["experiment_id"])


def _all_experiments(address: str) -> list[str]:
    answer = _request(address, "POST", "/api/2.0/mlflow/experiments/search", {"max_results": 1000}) or {}
    return [str(experiment["experiment_id"]) for experiment in answer.get("experiments", [])]


def _newest_run(address: str, experiments: list[str]) -> tuple[str, str] | None:
    if not experiments:
        return None
    body = {"experiment_ids": experiments, "max_results": 1, "order_by": ["attributes.start_time DESC"]}
    runs = (_request(address, "POST", "/api/2.0/mlflow/runs/search", body) or {}).get("runs", [])
    return (str(runs[0]["info"]["experiment_id"]), str(runs[0]["info"]["run_id"])) if runs else None


def _request(address: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The JSON answer ({} where it is not JSON); None when the server refuses."""
    parts = urlsplit(address)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or HOST, parts.port, timeout=10)
    try:
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        if parts.query:
            headers["Authorization"] = f"Bearer {parts.query.removeprefix('token=')}"
        connection.request(method, parts.path.rstrip("/") + path, content, headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != http.HTTPStatus.OK:
            return None
        # /health answers "OK", which is not JSON.
        return parse_json(data, dict) if data.startswith(b"{") else {}
    finally:
        connection.close()
