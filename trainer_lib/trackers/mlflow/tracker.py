"""The MLflow tracker: the training loop appends to a spool on the local disk, and a thread delivers it.

`log` costs one small write. The import of mlflow, new tables, and slow or dead servers cost only the thread's time.
What cannot be delivered stays in the spool, and the next process that delivers it sends it once (`delivery` says how).

Environment: `MLFLOW_TRACKING_URI` (default: sqlite `mlflow.db` in the working directory, as `mlflow ui` expects),
`MLFLOW_RUN_ID` (an *orchestrated* run: we add points to it, its owner sets its parameters, its status and its end),
`MLFLOW_EXPERIMENT_NAME` (for a run of our own), `MLFLOW_TAGS` (a JSON object, for the run), `TRAINFLOW_SPOOL_DIR`
(default: `.spool` in a local `output_dir`).
In a pipeline, `TRAINFLOW_TRACKED_RUN` names the run, and the pipeline delivers; its metrics are grouped (`names`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer_lib.base.json_text import parse_json, read_json
from trainer_lib.secrets import mask
from trainer_lib.trackers.mlflow.delivery import Delivery, Shipper
from trainer_lib.trackers.names import clean_key, flatten_params, group_log
from trainer_lib.trackers.spool import TRACKED_RUN, Session, make_private, now_ms, spool_root

CLOSE_S = 30.0  # how long `close` waits for a server that answers
REQUEST_S = 10.0  # how long it waits for one answer

_log = logging.getLogger(__name__)


class MLflowTracker:
    """Writes metrics to MLflow and never delays or ends training."""

    name = "mlflow"

    def __init__(self, output_dir: str | None) -> None:
        self._output_dir = output_dir
        self._head: dict[str, Any] | None = None
        self._first_records: list[dict[str, Any]] = []
        self._root: Path | None = None
        self._session: Session | None = None
        self._shipper: Shipper | None = None
        self._last: dict[str, tuple[int, float]] = {}
        self._is_full = False
        self._is_delivered = False
        # A run of a pipeline is grouped; one of our own has the names that scripts of transformers' Trainer know.
        self._name: Callable[[Mapping[str, float]], Mapping[str, float]] = dict

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Attach to the run of the environment, or to one of our own: a new one, or the earlier one after a resume."""
        self._root = spool_root(self._output_dir)
        # Without credentials: the process that delivers has them from its environment.
        head: dict[str, Any] = {"tracking_uri": mask(default_tracking_uri()), "dedupe": True}
        self._first_records, self._is_delivered = [], False
        if pipeline := os.environ.get(TRACKED_RUN):
            run = parse_json(pipeline)
            self._name = group_log
            # The flow's process delivers, unless it is on another machine, which does not see this spool.
            self._is_delivered = run.pop("host", None) == socket.gethostname()
            head |= run
        elif run_id := os.environ.get("MLFLOW_RUN_ID"):
            head["run_id"] = run_id
            self._first_records = _environment_tags()
        else:
            head |= {
                "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default",
                "run_name": run_name,
                "token": self._own_token(head["tracking_uri"], resume=resume_step > 0),
                "start_ms": now_ms(),
            }
            written = {"params": flatten_params(params), "when": f"resumed-at-step-{resume_step}"}
            self._first_records = [written, *_environment_tags()]
        self._head = head
        self._last = {}
        self._open()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append to the spool."""
        if self._head is None:
            return
        if self._session is None:  # an evaluation after `close`
            self._head = {**self._head, "dedupe": False}
            self._open()
        # The epoch is part of every kind of log, so it comes several times a step.
        named = {clean_key(key): value for key, value in self._name(metrics).items()}
        news = {key: value for key, value in named.items() if self._last.get(key) != (step, value)}
        if self._session is not None and news:
            self._last |= {key: (step, value) for key, value in named.items()}
            self._write({"t": now_ms(), "s": step, "m": news})

    def close(self, status: str = "FINISHED") -> None:
        """End the run if it is ours; deliver what is left, waiting a bounded time for a server that answers."""
        shipper, session, self._shipper, self._session = self._shipper, self._session, None, None
        if session is None or self._head is None:
            return
        try:
            session.write_last({"end": status, "t": now_ms()} if "run_name" in self._head else {})
        except OSError as error:
            _log.warning("The last metrics are not in MLflow: %s cannot be written: %s", session.path, error)
        session.close()
        # A stage of a pipeline loses at most a second to MLflow.
        patience = (1.0, 0.5) if TRACKED_RUN in os.environ else (CLOSE_S, REQUEST_S)
        if shipper is not None and not shipper.close(*patience):
            what = (
                "MLflow did not accept all metrics; the rest is kept in %s, and the next training with it delivers it."
            )
            _log.warning(what, self._root)

    def _open(self) -> None:
        if self._root is None or self._head is None:
            return
        try:
            self._session = Session.create(self._root, self._head)
        except OSError as error:
            _log.warning("Metrics do not go to MLflow: the spool %s cannot be written: %s", self._root, error)
            self._head = None
            return
        for record in self._first_records:
            self._write(record)
        self._first_records = []
        if not self._is_delivered:
            self._shipper = Shipper(Delivery(self._root, default_tracking_uri()))
            self._shipper.start()

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._session is not None  # noqa: S101
        try:
            self._session.write(record)
            self._is_full = False
        except OSError as error:
            if not self._is_full:
                _log.warning("Metrics wait in memory: the spool %s cannot be written: %s", self._root, error)
            self._is_full = True

    def _own_token(self, tracking_uri: str, *, resume: bool) -> str:
        """The token that identifies our run on the server; the spool keeps it, so that a resumed training finds it."""
        assert self._root is not None  # noqa: S101
        memo = self._root / "run.json"
        if resume:
            with contextlib.suppress(OSError, ValueError, KeyError):
                known = read_json(memo)
                if known["tracking_uri"] == tracking_uri:
                    return str(known["token"])
        token = uuid.uuid4().hex
        with contextlib.suppress(OSError):  # `Session.create` reports a spool that cannot be written
            make_private(self._root)
            memo.write_text(json.dumps({"tracking_uri": tracking_uri, "token": token}), encoding="utf-8")
        return token


def _environment_tags() -> list[dict[str, Any]]:
    """The record of the tags in `MLFLOW_TAGS`, without secrets; none where it is not a JSON object."""
    try:
        tags = parse_json(os.environ.get("MLFLOW_TAGS") or "{}", dict)
    except ValueError:
        _log.warning("MLFLOW_TAGS is not a JSON object, so it sets no tags.")
        return []
    return [{"tags": {name: mask(str(value)) for name, value in tags.items()}}] if tags else []


def default_tracking_uri() -> str:
    """Return `MLFLOW_TRACKING_URI`, or MLflow's own default: the absolute address of `mlflow.db` in this directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"
