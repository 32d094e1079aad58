"""The MLflow run of a pipeline as plain text, for the processes of its stages."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from trainer_lib.secrets import mask
from trainer_lib.trackers.spool import SPOOL_DIR, TRACKED_RUN, known_run

HTTP_TIMEOUT_S = 15


@dataclass(frozen=True)
class RunHandle:
    """One MLflow run, as plain text: it can be passed to another process of this machine.

    Attributes:
        token: names the run before, and whether or not, the server was reached.
        experiment: the experiment's name.
        tracking_uri: where the run is. May hold credentials when it came from the environment: show `server` instead.
        spool_dir: local folder where what is logged waits for the server.
        host: name of the machine whose flow delivers it.
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
