"""One MLflow run per pipeline run: opened once, re-attached by every retry and stage, ended with its status.

Nothing here waits for a server or fails a stage. What the flow logs is appended to a session of the spool next to the
storage (`trainer_lib.trackers.spool`), and so is what its workers log; a thread of the flow's process delivers it. What
could not be delivered when the run ends waits there, artifacts and the run's end included, for the next command.

The default tracking store is sqlite, `mlflow.db` next to a local storage root with artifacts in `mlartifacts/`. Remote
storage has it in a folder of this user's own, one per storage; set `MLFLOW_TRACKING_URI` where machines share a run.
The processes of the stages get a run as plain text, a `RunHandle`.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer_lib.errors import ConfigError
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow.delivery import Delivery, Shipper
from trainer_lib.trackers.mlflow.mlflow_client import HTTP_TIMEOUT_S, KEY_TAG, artifact_location
from trainer_lib.trackers.names import clean_key, flatten_params
from trainer_lib.trackers.spool import (
    SPOOL_DIR,
    TRACKED_RUN,
    Session,
    Waiting,
    count_waiting,
    known_run,
    now_ms,
    own_spool,
    user_data_dir,
)
from trainflow.tasks.configs import TrackingConfig


def source_tags(name: str, project: Path | None) -> dict[str, str]:
    """The tags of a run of the pipeline `name`; `project` is the folder whose git commit is noted."""
    tags = {"mlflow.source.name": f"trainflow run {name}", "mlflow.source.type": "PROJECT", "trainflow.pipeline": name}
    with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    git = shutil.which("git")
    if git is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [git, "-C", str(project or Path.cwd()), "rev-parse", "HEAD"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            tags["mlflow.source.git.commit"] = done.stdout.strip()
    return tags


DIGEST_CHARS = 36  # MLflow's limit for a dataset's digest; the whole sha256 goes into a tag
COMPLETE_S = 30.0  # how long a command that runs no stage delivers what earlier ones left
ANSWER_S = 3.0  # how long it waits for one answer
_LOOK_S = 0.05
LOCAL_CLOSE_S = 30.0  # a database on this machine answers as fast as the machine is

_log = logging.getLogger(__name__)


class TrackedRun:
    """The MLflow run of a flow, as the flow's process writes it. No method waits for the server."""

    def __init__(self, handle: RunHandle, session: Session, background: Background) -> None:
        self.handle = handle
        self._session: Session | None = session
        self._background = background
        self._is_ended = False

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log nested settings: flattened, shortened and masked. Those that the run has with another value are listed in
        the artifact `params/<when>.json`."""
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._write(lambda _: {"params": flatten_params(params), "when": when})

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, *, time_ms: int | None = None, once: bool = True
    ) -> None:
        """Log values at an optimizer step, measured now unless `time_ms` (since 1970) says when.

        `once`: values that the run already has at that step are not written twice, for a request to the server.
        """
        if metrics:
            values = {clean_key(key): float(value) for key, value in metrics.items()}
            marks = {"once": True} if once else {}
            self._write(lambda _: {"t": time_ms or now_ms(), "s": step, "m": values, **marks})

    def log_file(self, content: bytes | str | Path, artifact_path: str) -> None:
        """Log a file, or text, under the whole path `artifact_path` (`report/index.html`) in the run's artifacts."""
        data = content.encode() if isinstance(content, str) else content
        self._write(lambda session: {"file": session.keep_file(data), "path": artifact_path})

    def log_model(self, record: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Log a model by reference, with the small files that describe it, or what was measured with a model."""
        self._write(
            lambda session: {**record, "files": {path: session.keep_file(data) for path, data in files.items()}}
        )

    def log_dataset(self, split: str, url: str, digest: str, columns: Mapping[str, str], rows: int) -> None:
        """Log a split as an input: its name, its URL, its SHA-256 (complete in the tag `data.<split>`)."""
        dataset = {
            "name": split,
            "digest": digest[:DIGEST_CHARS],
            "source_type": "trainflow",
            "source": json.dumps({"uri": mask(url)}),
            "schema": json.dumps({"columns": dict(columns)}) if columns else None,
            "profile": json.dumps({"rows": rows}),
        }
        self._write(lambda _: {"dataset": dataset, "context": split})
        self.set_tags({f"data.{split}": digest})

    def set_tags(self, tags: Mapping[str, str | None]) -> None:
        """Set tags of the run (stage keys, content digests, where the model was published); None takes one away."""
        if tags:
            self._write(lambda _: {"tags": _clean_tags(tags)})

    def wait_for(self, has_arrived: Callable[[], bool]) -> bool:
        """Wait for what comes of something that was logged, while the server takes it; return whether it has come."""
        return self._background.wait_for(has_arrived)

    def end(self, status: str) -> None:
        """Note that the run has ended as "FINISHED", "FAILED", "KILLED" or "DISCARDED"; nothing is logged after it."""
        if self._session is not None and not self._is_ended:
            self._is_ended = True
            ended_ms = max(now_ms(), int(self._session.head.get("start_ms") or 0))
            self._write(lambda _: {"end": status, "t": ended_ms}, is_last=True)

    def finish(self, status: str, *, stages: int = 1) -> None:
        """End the run, and wait a second per stage for the server. Safe to repeat.

        A database on this machine is waited for until it has everything, at most half a minute.
        """
        self.end(status)
        if self._session is not None:
            self._session.close()
            self._session = None
        self._background.close(stages=stages)

    def _write(self, make: Callable[[Session], Mapping[str, Any]], *, is_last: bool = False) -> None:
        """Append the record that `make` returns. A disk that refuses it fails nothing."""
        if self._session is None:
            return
        try:
            (self._session.write_last if is_last else self._session.write)(make(self._session))
        except OSError as error:
            _log.warning("MLflow misses a part of this run; the spool cannot be written: %s", error)


class Background:
    """The thread that delivers a spool while the flow's process works; it starts when it is made.

    `leaves_local`: a database on this machine is left to another process, which delivers this spool, too.
    """

    def __init__(self, root: Path, tracking_uri: str, *, leaves_local: bool = False) -> None:
        self._is_local = tracking_uri.startswith("sqlite")  # a database file on this machine
        self._shipper = Shipper(Delivery(root, tracking_uri))
        if not (leaves_local and self._is_local):
            self._shipper.start()

    def close(self, *, stages: int) -> bool:
        """Wait a second per stage for the rest; return whether everything has arrived. Safe to repeat."""
        if self._is_local and stages:
            return self._shipper.close(LOCAL_CLOSE_S, LOCAL_CLOSE_S)
        return self._shipper.close(float(stages), stages / 2)

    def wait_for(self, has_arrived: Callable[[], bool]) -> bool:
        """Wait until `has_arrived`, at most some seconds, and not for a server that cannot be reached."""
        deadline = time.monotonic() + (COMPLETE_S if self._is_local else ANSWER_S)
        self._shipper.wake()
        while not has_arrived():
            if self._shipper.failure is not None or not self._shipper.is_alive() or time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def complete(self) -> bool:
        """Wait while the server answers, at most half a minute: for a command that has nothing else to do."""
        answer_s = LOCAL_CLOSE_S if self._is_local else ANSWER_S
        words = "MLflow gets what earlier runs left: this takes at most %.0f s."
        say = partial(_log.warning, words, COMPLETE_S)
        return self._shipper.close(COMPLETE_S, answer_s, say)


def default_tracking_uri(storage: Store) -> str:
    """`MLFLOW_TRACKING_URI`, else `mlflow.db` next to a local storage root, or in this user's folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{_tracking_dir(storage) / 'mlflow.db'}"


def tracking_uri(config: TrackingConfig, storage: Store) -> str:
    """The server of a spec: `tracking.uri`, else `default_tracking_uri`. Raises ConfigError for a password in it."""
    if config.uri and mask(config.uri) != config.uri:
        what = "A spec holds no credentials: it is stored with every run."
        remedy = "Set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        raise ConfigError(what, field="tracking.uri", value=mask(config.uri), remedy=remedy)
    return config.uri or default_tracking_uri(storage)


def spool_dir(storage: Store) -> Path:
    """The folder where what this user logged about runs of this storage waits for its server."""
    return own_spool(_tracking_dir(storage) / "spool")


def spool_dirs(storage: Store) -> list[Path]:
    """The spool of a storage root, and that of a Trainer whose `output_dir` it is."""
    return [spool_dir(storage), *([own_spool(storage.local_path() / ".spool")] if storage.is_local else [])]


def find_run_id(storage: Store, token: str | None) -> str | None:
    """The id of a run on its server, by its token; None before the server was reached."""
    return known_run(spool_dir(storage), token).get("run_id") if token else None


def is_known(storage: Store, token: str | None) -> bool:
    """Whether a run has arrived at its server, or waits here for it."""
    return token is not None and (find_run_id(storage, token) is not None or find_waiting(storage) is not None)


def find_waiting(storage: Store) -> Waiting | None:
    """Undelivered records; None: there are none. Asks no server."""
    return count_waiting(spool_dir(storage))


def deliver_waiting(config: TrackingConfig, storage: Store) -> Background | None:
    """Begin to deliver what earlier commands left for their server; None when nothing waits."""
    if not config.enabled or find_waiting(storage) is None:
        return None
    return Background(spool_dir(storage), tracking_uri(config, storage))


def open_run(
    config: TrackingConfig,
    storage: Store,  # the pipeline's storage root
    *,
    name: str,  # the pipeline's
    pipeline_key: str,  # by which `resume` finds the run
    # Nested settings; flattened, shortened and masked here. On a re-attached run only new ones are logged; changed ones
    # become the artifact `params/<when>.json`.
    params: Mapping[str, Any],
    resume: bool,
    token: str | None = None,  # of the run to continue; None: it is found by `resume`
    after: str | None = None,  # when its last command ended, as ISO time
    tags: Mapping[str, str] | None = None,
    project: Path | None = None,  # the folder whose git commit is noted; None: the working directory
    run_name: str | None = None,  # the run's, unless `config` has one
    experiment_note: str | None = None,  # description of an experiment that is made for it
    leaves_local: bool = False,  # as in `Background`
) -> TrackedRun | None:
    """Open the run of one pipeline run, and begin to deliver what waits. The server is not waited for.

    None when tracking is off, or when the spool cannot be written (logged). Raises ConfigError if `tracking.uri` holds
    a password.
    """
    if not config.enabled:
        return None
    uri, spool = tracking_uri(config, storage), spool_dir(storage)
    handle = RunHandle(token or uuid.uuid4().hex, config.experiment or name, uri, str(spool))
    all_tags = source_tags(name, project) | dict(config.tags) | dict(tags or {}) | {KEY_TAG: pipeline_key}
    head = _head(handle, config.run_name or run_name or name, all_tags, after)
    try:
        if resume and token is None:
            # Stripped, because a quote in it would change the query.
            head["unfinished_key"] = re.sub("[^0-9A-Za-z_.-]", "", pipeline_key)
        session = Session.create(spool, {**head, "experiment_note": experiment_note})
    except OSError as error:
        _log.warning("Nothing is recorded in MLflow; the spool %s cannot be written: %s", spool, error)
        return None
    run = TrackedRun(handle, session, Background(spool, uri, leaves_local=leaves_local))
    run.set_tags(all_tags)  # also of a continued run: what changed since is seen
    run.log_params(params)
    return run


def _head(handle: RunHandle, run_name: str, tags: Mapping[str, str], after: str | None) -> dict[str, Any]:
    """A run as a flow's session describes it: enough to find it on the server, or to create it."""
    # A clock that was put back must not have it begin before the end of the command that it follows.
    after_ms = int(datetime.fromisoformat(after).timestamp() * 1000) if after else 0
    return {
        # Without credentials: they come from the environment of the process that delivers.
        "tracking_uri": handle.server,
        "token": handle.token,
        "experiment": handle.experiment,
        "artifact_location": artifact_location(handle.tracking_uri),
        "run_name": run_name,
        "start_ms": max(now_ms(), after_ms + 1),
        "tags": _clean_tags(tags),
    }


def _tracking_dir(storage: Store) -> Path:
    if storage.is_local:
        return storage.local_path()
    return user_data_dir() / "tracking" / hashlib.sha256(storage.url.encode()).hexdigest()[:16]


def _clean_tags(tags: Mapping[str, str | None]) -> dict[str, str | None]:
    return {clean_key(key): None if value is None else mask(str(value)) for key, value in tags.items()}


@dataclass(frozen=True)
class RunHandle:
    """One MLflow run, as plain text: it can be passed to another process of this machine.

    `token` names the run before, and whether or not, the server was reached. `tracking_uri` may hold credentials when
    it came from the environment: show `server` instead. The flow of the machine `host` delivers what waits in
    `spool_dir`.
    """

    token: str
    experiment: str
    tracking_uri: str
    spool_dir: str
    host: str = field(default_factory=socket.gethostname)

    def __repr__(self) -> str:
        return f"RunHandle({self.token!r} at {self.server!r})"

    @property
    def run_id(self) -> str | None:
        """The run's id on the server; None before it was reached."""
        return known_run(Path(self.spool_dir), self.token).get("run_id")

    @property
    def experiment_id(self) -> str | None:
        """The experiment's id on the server; None before it was reached."""
        return known_run(Path(self.spool_dir), self.token).get("experiment_id")

    @property
    def server(self) -> str:
        """The tracking URI without credentials."""
        return mask(self.tracking_uri)

    def ui_path(self) -> str:
        """The run's page below the address of any MLflow UI that shows this store."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def ui_url(self) -> str | None:
        """The run's page on the tracking server; None for a database, which has no page, and before it was reached."""
        if urlsplit(self.server).scheme not in {"http", "https"} or self.run_id is None:
            return None
        return f"{self.server.rstrip('/')}/{self.ui_path()}"

    def worker_env(self) -> dict[str, str]:
        """The environment in which a worker's MLflow tracker adds its points to this run."""
        run_id = self.run_id
        return {
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            **({} if run_id is None else {"MLFLOW_RUN_ID": run_id}),
            TRACKED_RUN: json.dumps({"token": self.token, "experiment": self.experiment, "host": self.host}),
            SPOOL_DIR: self.spool_dir,
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": str(HTTP_TIMEOUT_S),
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
