"""The MLflow tracker: the training loop appends to a spool on the local disk, and a thread sends it.

`log` costs one small write. The import of mlflow, new tables, and slow or dead servers cost only the thread's time.
What cannot be delivered stays in the spool, and the next attempt (or the next `ship_leftovers`) delivers it first,
exactly once (`spool` says how). After a resume, points that the server already has are not written again.

Environment: `MLFLOW_TRACKING_URI` (default: sqlite `mlflow.db` in the working directory, as `mlflow ui` expects),
`MLFLOW_RUN_ID` (an *orchestrated* run: we add points to it, its owner sets its parameters, its status and its end),
`MLFLOW_EXPERIMENT_NAME` (for a run of our own), `TRAINFLOW_SPOOL_DIR` (default: `.spool` in a local `output_dir`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.errors import first_line
from trainer_lib.trackers.params import clean_key, flatten_params
from trainer_lib.trackers.shipper import GoneError, Shipper
from trainer_lib.trackers.spool import Point, Session, spool_root

if TYPE_CHECKING:
    from mlflow import MlflowClient

BATCH = 1000  # MLflow's limit of metrics in one call
PARAM_BATCH = 100
DATABASE_TRIES = 3  # 0.4 s in all
TOKEN_TAG = "trainflow.attempt"  # noqa: S105 - the tag by which we find our own run again

_log = logging.getLogger(__name__)
# A process that is forked while another thread imports inherits half a module and a lock that no thread releases. So a
# fork (of a data loader's worker) waits until the import has ended.
_importing = threading.RLock()
os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)


class MLflowTracker:
    """Writes metrics to MLflow and never delays or ends training."""

    name = "mlflow"

    def __init__(self, output_dir: str | None) -> None:
        self._output_dir = output_dir
        self._head: dict[str, Any] | None = None
        self._root: Path | None = None
        self._session: Session | None = None
        self._shipper: Shipper | None = None
        self._last: dict[str, tuple[int, float]] = {}

    def start(self, *, run_name: str | None, params: Mapping[str, Any], resume_step: int) -> None:
        """Attach to the run `MLFLOW_RUN_ID`, or to a run of our own: a new one, or the earlier one after a resume."""
        # mlflow reads it when it is imported, and the thread that imports it should not change the environment.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._root = spool_root(self._output_dir)
        head: dict[str, Any] = {"tracking_uri": default_tracking_uri(), "run_id": os.environ.get("MLFLOW_RUN_ID")}
        head["dedupe"] = True
        if head["run_id"] is None:
            head |= {
                "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default",
                "run_name": run_name,
                "params": flatten_params(params),
                "resume_step": resume_step,
                "token": self._own_token(head["tracking_uri"], resume=resume_step > 0),
            }
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
        news = {clean_key(key): value for key, value in metrics.items() if self._last.get(key) != (step, value)}
        if self._session is not None and news:
            self._last |= {key: (step, value) for key, value in metrics.items()}
            try:
                self._session.append(news, step)
            except OSError as error:
                self._disable(error)

    def close(self, status: str = "FINISHED") -> None:
        """Send what is left, waiting at most `CLOSE_S` seconds; end the run if it is ours."""
        shipper, session, self._shipper, self._session = self._shipper, self._session, None, None
        if shipper is not None:
            shipper.close(status)
        if session is not None:
            session.end_writing()

    def _open(self) -> None:
        if self._root is None or self._head is None:
            return
        try:
            self._session = Session.create(self._root, self._head)
        except OSError as error:
            self._disable(error)
            return
        self._shipper = Shipper(self._session, _Delivery(self._root, self._session))
        self._shipper.start()

    def _disable(self, error: OSError) -> None:
        _log.warning("Metrics no longer go to MLflow: the spool %s cannot be written: %s", self._root, error)
        self.close("FAILED")
        self._head = None

    def _own_token(self, tracking_uri: str, *, resume: bool) -> str:
        """The token that identifies our run on the server; the spool keeps it, so that a resumed training finds it."""
        assert self._root is not None  # noqa: S101
        memo = self._root / "run.json"
        if resume:
            with contextlib.suppress(OSError, ValueError, KeyError):
                known = json.loads(memo.read_bytes())
                if known["tracking_uri"] == tracking_uri:
                    return str(known["token"])
        token = uuid.uuid4().hex
        with contextlib.suppress(OSError):  # `Session.create` reports a spool that cannot be written
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            memo.write_text(json.dumps({"tracking_uri": tracking_uri, "token": token}), encoding="utf-8")
        return token


class _Delivery:
    """Sends one session to MLflow, after the sessions that dead processes left in the same spool."""

    server = "MLflow"

    def __init__(self, root: Path, session: Session) -> None:
        self._root = root
        self._session = session
        self._client: MlflowClient | None = None
        self._behind: list[Session] | None = None
        self._attached = False

    def ship(self) -> None:
        uri = self._session.head["tracking_uri"]
        self._client = self._client or connect(uri)
        if self._behind is None:
            self._behind = _leftovers(self._root, uri)
        while self._behind:
            _ship_leftover(self._client, self._behind[0], current=self._session)
            self._behind.pop(0)
        if not self._attached:
            _attach(self._client, self._session)
            self._attached = True
        _send_all(self._client, self._session)

    def finish(self) -> None:
        if self._client is not None:
            _end_own_run(self._client, self._session)

    def release(self) -> None:
        for session in self._behind or []:
            session.release()


def default_tracking_uri() -> str:
    """Return `MLFLOW_TRACKING_URI`, or MLflow's own default: the absolute address of `mlflow.db` in this directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def connect(tracking_uri: str) -> MlflowClient:
    """Return a client for `tracking_uri`, after creating the tables of a new sqlite database (one process at a time).

    The first call in a process takes seconds, because it imports mlflow. Raises what mlflow raises.
    """
    with _importing:
        from mlflow import MlflowClient

        # mlflow logs a line for each migration of a new database, and for each try to reach one.
        for name in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(name).setLevel(logging.ERROR)
    is_database = tracking_uri.startswith(("sqlite", "postgresql", "mysql", "mssql"))
    with _database_set_up(tracking_uri), _few_tries() if is_database else contextlib.nullcontext():
        return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


@contextlib.contextmanager
def _few_tries() -> Iterator[None]:
    """Make MLflow give up soon on a database that it cannot open: it tries for 102 s, and we try again ourselves."""
    with _importing:
        import mlflow.store.db.utils as databases

        before, databases.MAX_RETRY_COUNT = databases.MAX_RETRY_COUNT, DATABASE_TRIES
        try:
            yield
        finally:
            databases.MAX_RETRY_COUNT = before


@contextlib.contextmanager
def _database_set_up(tracking_uri: str) -> Iterator[None]:
    """Lock a sqlite database: two processes that find no tables would both create them."""
    scheme, _, path = tracking_uri.partition(":///")
    if scheme != "sqlite" or not path:
        yield
        return
    database = Path(path)
    database.parent.mkdir(parents=True, exist_ok=True)
    with (database.parent / f".{database.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ship_leftovers(root: Path, tracking_uri: str) -> int:
    """Send what dead processes left in the spool `root` for this server.

    Returns:
        how many sessions were sent.

    Raises:
        Exception: whatever mlflow raises, when the server cannot be reached.
    """
    sessions = _leftovers(root, tracking_uri)
    try:
        client = connect(tracking_uri) if sessions else None
        for session in sessions:
            assert client is not None  # noqa: S101
            _ship_leftover(client, session, current=None)
    finally:
        for session in sessions:
            session.release()
    return len(sessions)


def latest_steps(client: MlflowClient, run_id: str) -> dict[str, int]:
    """Return the last step of every metric of a run."""
    metrics = client.get_run(run_id).data.to_proto().metrics  # the only public way to the steps of all keys at once
    return {metric.key: int(metric.step) for metric in metrics}


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, str], *, when: str) -> None:
    """Log parameters once; the artifact `params/<when>.json` lists those that already have another value there."""
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    new = [Param(key, value) for key, value in params.items() if key not in known]
    for start in range(0, len(new), PARAM_BATCH):
        client.log_batch(run_id, params=new[start : start + PARAM_BATCH])
    changed = {key: {"was": known[key], "is": value} for key, value in params.items() if known.get(key, value) != value}
    if changed:
        client.log_text(run_id, json.dumps(changed, indent=2), f"params/{when}.json")


def send(client: MlflowClient, run_id: str, points: Sequence[Point]) -> None:
    """Log points in batches; a value or key that the server refuses is left out, with a warning.

    Raises:
        GoneError: the server does not know the run.
        MlflowException: the server cannot be reached, or fails.
    """
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    for start in range(0, len(points), BATCH):
        batch = [Metric(*point) for point in points[start : start + BATCH]]
        try:
            client.log_batch(run_id, metrics=batch)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise GoneError(f"the run {run_id} is not known there.") from error
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            if len(batch) == 1:
                _log.warning("MLflow refuses the metric %r: %s", batch[0].key, first_line(error))
            else:
                # One point makes the server refuse the whole batch: find it.
                for point in points[start : start + BATCH]:
                    send(client, run_id, [point])


def _leftovers(root: Path, tracking_uri: str) -> list[Session]:
    found = []
    for session in Session.leftovers(root):
        if session.head.get("tracking_uri") == tracking_uri:
            found.append(session)
        else:
            session.release()
    return found


def _ship_leftover(client: MlflowClient, session: Session, *, current: Session | None) -> None:
    try:
        _attach(client, session)
        _send_all(client, session)
        taken_up = current is not None and current.head.get("token") == session.head.get("token")
        if not taken_up:
            if session.state.closed is None:  # its process was killed
                session.state.closed = "FAILED"
            _end_own_run(client, session)
        session.remove()
    except GoneError as error:
        session.set_aside("orphan")
        _log.warning("Metrics kept in %s could not be sent: %s", session.path, error)
    except (KeyError, TypeError, ValueError) as error:  # its session.json is not ours
        session.set_aside("damaged")
        _log.warning("Metrics kept in %s could not be sent: %r", session.path, error)


def _attach(client: MlflowClient, session: Session) -> None:
    """Find or create the session's run, log its parameters, and record which steps the server already has."""
    if session.head["run_id"] is None:
        session.head["run_id"] = _find_or_create_run(client, session.head)
        session.save_head()
    run_id = session.head["run_id"]
    if session.head.get("params"):
        log_params(client, run_id, session.head["params"], when=f"resumed-at-step-{session.head['resume_step']}")
    if session.state.floor is None:
        session.state.floor = _steps_of(client, run_id) if session.head["dedupe"] else {}
        session.save_state()


def _steps_of(client: MlflowClient, run_id: str) -> dict[str, int]:
    from mlflow.exceptions import MlflowException

    try:
        return latest_steps(client, run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise GoneError(f"the run {run_id} is not known there.") from error
        raise


def _find_or_create_run(client: MlflowClient, head: Mapping[str, Any]) -> str:
    experiment = experiment_id(client, head["experiment"])
    for run in client.search_runs([experiment], f"tags.`{TOKEN_TAG}` = '{head['token']}'", max_results=1):
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")
        return str(run.info.run_id)
    run = client.create_run(experiment, run_name=head["run_name"], tags={TOKEN_TAG: head["token"]})
    return str(run.info.run_id)


def experiment_id(client: MlflowClient, name: str, artifact_location: str | None = None) -> str:
    """Return the id of the experiment `name`; create it if there is none (two processes at once get the same one)."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name, artifact_location=artifact_location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)
    assert experiment is not None  # noqa: S101
    if experiment.lifecycle_stage != "active":
        client.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


def _send_all(client: MlflowClient, session: Session) -> None:
    floor = session.state.floor or {}
    while True:
        points, offset = session.read(session.state.offset, BATCH)
        if offset == session.state.offset:
            return
        send(client, session.head["run_id"], [point for point in points if point.step > floor.get(point.key, -1)])
        session.state.offset = offset
        session.save_state()


def _end_own_run(client: MlflowClient, session: Session) -> None:
    if "token" in session.head and session.state.closed is not None:
        client.set_terminated(session.head["run_id"], session.state.closed, session.state.end_ms)
