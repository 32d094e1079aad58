"""Every call of mlflow: connecting, runs, points, parameters, tags, inputs, artifacts. The one file that imports it.

Nothing is sent twice by mlflow itself (no retries): after an answer that did not come, what has arrived is found out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_lib.base.ready_databases import Kind, create
from trainer_lib.errors import first_line
from trainer_lib.secrets import mask
from trainer_lib.storage.local import make_folders
from trainer_lib.storage.outages import describe_outage

if TYPE_CHECKING:
    from mlflow import MlflowClient

BATCH = 1000  # MLflow's limit of metrics in one call
PARAM_BATCH = 100
DATABASE_TRIES = 3  # 0.4 s in all
HTTP_TIMEOUT_S = 15
UPLOAD_BYTES_S = 10e6  # an upload slower than this counts as one that hangs
_REASON_CHARS = 160
TOKEN_TAG = "trainflow.attempt"  # noqa: S105 - the tag by which we find our own run again
KEY_TAG = "trainflow.pipeline_key"
DISCARDED = "DISCARDED"  # how a run ends that a recipe mistake ended before it began
FAILURE_TAG = "trainflow.failure"
DATABASES = Kind("mlflow", "store/db_migrations/versions", ("alembic_version", "workspaces"))
_REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MAX_LIMIT_EXCEEDED"}
GONE = "RESOURCE_DOES_NOT_EXIST"

_log = logging.getLogger(__name__)
# A process that is forked while another thread imports inherits half a module and a lock that no thread releases. So a
# fork (of a data loader's worker) waits until the import has ended.
_importing = threading.RLock()
os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)


class GoneError(Exception):
    """The server does not know the run, so it will never accept these records."""


class RefusedError(Exception):
    """The server will never accept this record, whatever the run."""


class Point(NamedTuple):
    """One value of one metric; `timestamp` is in milliseconds since 1970, `step` counts optimizer steps."""

    key: str
    value: float
    timestamp: int
    step: int


class Clock:
    """Seconds that the current request has gone without an answer; read by another thread."""

    def __init__(self) -> None:
        self.granted_s = 0.0  # seconds granted to the bytes of all uploads so far
        self._due: float | None = None

    @contextlib.contextmanager
    def request(self, size: int = 0) -> Iterator[None]:
        """Measure the block, a request that sends `size` bytes."""
        self.granted_s += size / UPLOAD_BYTES_S
        self._due = time.monotonic() + size / UPLOAD_BYTES_S
        try:
            yield
        finally:
            self._due = None

    def is_overdue(self, patience_s: float) -> bool:
        """Whether the answer should have come `patience_s` seconds ago."""
        due = self._due
        return due is not None and time.monotonic() > due + patience_s


class _Timed:
    """An MlflowClient whose calls are measured, and whose failures are ours."""

    def __init__(self, client: MlflowClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._file = sqlite_file(client.tracking_uri)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        target = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            size = _bytes_below(Path(args[1])) if name in ("log_artifact", "log_model_artifacts") else 0
            with self._clock.request(size), _typed():
                if self._file is not None:  # mlflow would make the folder of a storage that is gone again
                    make_folders(self._file.parent)
                return target(*args, **kwargs)

        return call

    def read_artifact(self, address: str, path: str) -> bytes:
        """Return the content of a file below the address of a run's artifacts, or a logged model's.

        The client's own download leaves threads behind.
        """
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        with self._clock.request(), _typed(), tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
            artifacts: Any = get_artifact_repository(address, tracking_uri=self._client.tracking_uri)
            with artifacts.thread_pool:
                return Path(artifacts.download_artifacts(path, folder)).read_bytes()


def _bytes_below(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links count as what they lead to."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code == GONE:
            raise GoneError(f"its run is not known there: {first_line(error)}") from error
        if error.error_code in _REFUSED:
            raise RefusedError(first_line(error)) from error
        raise
    except Exception as error:
        # Uploads raise what `requests` raises. These four may be accepted later.
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int) and 400 <= status < 500 and status not in {401, 403, 408, 429}:
            raise RefusedError(first_line(error)) from error
        raise


def shorten(error: Exception) -> str:
    """Return why a request failed, in a few words: what HTTP clients say of a connection fills several lines."""
    if (outage := describe_outage(error)) is not None:
        return outage
    text = mask(first_line(error))
    return text if len(text) <= _REASON_CHARS else f"{text[:_REASON_CHARS]}..."


def artifact_location(uri: str) -> str | None:
    """For a sqlite file the folder `mlartifacts` next to it; any other server knows its own."""
    path = uri.removeprefix("sqlite:///")
    return (Path(path).absolute().parent / "mlartifacts").as_uri() if path != uri and path else None


def load() -> None:
    """Import mlflow, which takes seconds the first time, and give it our limits of time."""
    # mlflow reads it when it is imported.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    with _importing:
        import mlflow.artifacts  # noqa: F401 - `list_artifacts` would import it in the middle of a request
        from mlflow import environment_variables as settings

        # mlflow logs lines for all migrations of a new database, and for all tries to reach one.
        for name in ("alembic", "mlflow.store.db.utils", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.ERROR)
    # A second try by mlflow could make a second run. The environment still has the last word.
    settings.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = 0
    settings.MLFLOW_HTTP_REQUEST_TIMEOUT.default = HTTP_TIMEOUT_S
    settings.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.default = True
    settings.MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR.default = False


def connect(tracking_uri: str) -> MlflowClient:
    """Return a client for `tracking_uri`, after creating the tables of a new sqlite database (one process at a time).

    The first call in a process takes seconds, because it imports mlflow. Raises what mlflow raises.
    """
    load()
    from mlflow import MlflowClient

    is_database = tracking_uri.startswith(("sqlite", "postgresql", "mysql", "mssql"))
    file = sqlite_file(tracking_uri)
    if file is not None:
        make_folders(file.parent)
    # Two processes that find no tables would both create them.
    tables = contextlib.nullcontext() if file is None else create(DATABASES, file, _make_tables)
    with _few_tries() if is_database else contextlib.nullcontext(), tables:
        return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def sqlite_file(tracking_uri: str) -> Path | None:
    """Return the database file that a tracking URI names; None for any other URI."""
    scheme, _, path = tracking_uri.partition(":///")
    return Path(path) if scheme == "sqlite" and path and "?" not in path else None


def _make_tables(database: Path) -> None:
    """Make MLflow's tables in a new file, or check those that are there. Raises what mlflow raises."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - its models say which tables there are
    from mlflow.store.db import utils

    databases: Any = utils
    engine = databases.create_sqlalchemy_engine_with_retry(f"sqlite:///{database}")
    try:
        if not databases._all_tables_exist(engine):
            databases._initialize_tables(engine)
        databases._verify_schema(engine)
    finally:
        engine.dispose()


def connect_timed(tracking_uri: str, clock: Clock) -> MlflowClient:
    """Return a client whose calls are measured, and raise `GoneError` and `RefusedError` where they apply."""
    load()  # its time is none of the server's
    with clock.request():
        client = connect(tracking_uri)
    timed: Any = _Timed(client, clock)
    return timed  # type: ignore[no-any-return]


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


# ---------------------------------------------------------------------------------------------------------------- runs
class Run(NamedTuple):
    """A run's address on the server."""

    run_id: str
    experiment_id: str


def find_run(client: MlflowClient, head: Mapping[str, Any]) -> Run | None:
    """Find the run of a session's token; of several, which a lost answer may have made, the oldest.

    An experiment that was deleted is restored first, and its runs with it: the session's may be one of them.
    """
    experiment = client.get_experiment_by_name(head["experiment"])
    if experiment is None:
        return None
    if experiment.lifecycle_stage != "active":
        client.restore_experiment(experiment.experiment_id)
        _log.warning(
            "The MLflow experiment %s was deleted. It is restored with its runs, because this run is logged there; "
            "tracking.experiment names another one.",
            head["experiment"],
        )
    return _search(client, experiment.experiment_id, TOKEN_TAG, head["token"], "ASC")


def make_run(client: MlflowClient, head: Mapping[str, Any]) -> Run:
    """Create the run of a session; if its pipeline has an unfinished one, use that instead."""
    experiment = _experiment_id(client, head)
    if key := head.get("unfinished_key"):
        # The newest run whatever its status: an old unfinished one behind a finished one is not taken up again.
        newest = _search(client, experiment, KEY_TAG, key, "DESC")
        if newest is not None and client.get_run(newest.run_id).info.status != "FINISHED":
            client.set_tag(newest.run_id, TOKEN_TAG, head["token"])
            return newest
    tags = {**head.get("tags", {}), TOKEN_TAG: head["token"]}
    run = client.create_run(experiment, run_name=head["run_name"], tags=tags, start_time=head.get("start_ms"))
    return Run(str(run.info.run_id), experiment)


def is_active(client: MlflowClient, run_id: str) -> bool:
    """Whether the server has the run, and no person has deleted it."""
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage != "deleted")
    except GoneError:  # removed for good
        return False


def _require_active(client: MlflowClient, run_id: str, error: RefusedError) -> None:
    if not is_active(client, run_id):
        raise GoneError(f"its run {run_id} is deleted there.") from error


def _search(client: MlflowClient, experiment: str, tag: str, value: str, order: str) -> Run | None:
    query, ordered = f"tags.`{tag}` = '{value}'", [f"attributes.start_time {order}"]
    found = client.search_runs([experiment], query, order_by=ordered, max_results=1)
    return Run(str(found[0].info.run_id), experiment) if found else None


def _experiment_id(client: MlflowClient, head: Mapping[str, Any]) -> str:
    """The id of a session's experiment; created if there is none (two processes at once get the same one)."""
    from mlflow.exceptions import MlflowException

    name, note = head["experiment"], head.get("experiment_note")
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            # MLflow's page shows what belongs to training, and not to language models behind an API.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            tags |= {"mlflow.note.content": note} if note else {}
            return str(client.create_experiment(name, artifact_location=head.get("artifact_location"), tags=tags))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)
    assert experiment is not None  # noqa: S101
    return str(experiment.experiment_id)


# ------------------------------------------------------------------------------------------------------------- records
def latest_points(client: MlflowClient, run_id: str) -> dict[str, Point]:
    """Return the point of the last step of every metric of a run."""
    metrics = client.get_run(run_id).data.to_proto().metrics  # the only public way to the steps of all keys at once
    return {last.key: Point(last.key, float(last.value), int(last.timestamp), int(last.step)) for last in metrics}


def history(client: MlflowClient, run_id: str, key: str) -> list[Point]:
    """Return every point of a metric of a run."""
    with contextlib.suppress(GoneError):  # a file store does not know a metric without points
        points = client.get_metric_history(run_id, key)
        return [Point(key, float(point.value), int(point.timestamp), int(point.step)) for point in points]
    return []


def send_points(client: MlflowClient, run_id: str, points: Sequence[Point]) -> None:
    """Log points in batches; one that the server refuses is left out, with a warning. Raises GoneError for no run."""
    from mlflow.entities import Metric

    for start in range(0, len(points), BATCH):
        batch = points[start : start + BATCH]
        try:
            client.log_batch(run_id, metrics=[Metric(*point) for point in batch])
        except RefusedError as error:
            _require_active(client, run_id, error)
            if len(batch) == 1:
                _log.warning("MLflow refuses the metric %r: %s", batch[0].key, error)
                continue
            # One point makes the server refuse the whole batch: find it.
            half = len(batch) // 2
            send_points(client, run_id, batch[:half])
            send_points(client, run_id, batch[half:])


def send_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str | None]) -> None:
    """Set tags; those that are None are deleted where the run has them."""
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items() if value is not None])
    gone = [key for key, value in tags.items() if value is None]
    known = client.get_run(run_id).data.tags if gone else {}
    for key in gone:
        if key in known:
            client.delete_tag(run_id, key)


def send_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    """Log the parameters that the run does not have yet."""
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    new = [Param(key, value) for key, value in params.items() if key not in known]
    for start in range(0, len(new), PARAM_BATCH):
        client.log_batch(run_id, params=new[start : start + PARAM_BATCH])


def send_changed_params(client: MlflowClient, run_id: str, params: Mapping[str, str], when: str) -> None:
    """Log the artifact `params/<when>.json` with the parameters that have another value on the server, if any."""
    known = client.get_run(run_id).data.params
    changed = {key: {"was": known[key], "is": value} for key, value in params.items() if known.get(key, value) != value}
    if changed:
        client.log_text(run_id, json.dumps(changed, indent=2), f"params/{when}.json")


def send_dataset(client: MlflowClient, run_id: str, record: Mapping[str, Any]) -> None:
    """Log a dataset as an input; MLflow keeps one of each name and digest."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    tag = InputTag("mlflow.data.context", record["context"])
    client.log_inputs(run_id, [DatasetInput(Dataset(**record["dataset"]), [tag])])


def send_file(client: MlflowClient, run_id: str, local: Path, path: PurePosixPath) -> None:
    """Log a local file as the artifact `path`."""
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        link = Path(folder, path.name)  # it gives the file its name, and no bytes are copied
        link.symlink_to(local)
        # MLflow takes None for the root, not ".".
        client.log_artifact(run_id, str(link), None if path.parent == PurePosixPath() else str(path.parent))


def end_run(client: MlflowClient, run_id: str, status: str, end_ms: int | None) -> None:
    """End the run, unless it has ended since, on another machine that took it up; safe to repeat.

    `status` is MLflow's, or `DISCARDED`: the run is deleted, as a person would do on the page.
    """
    run = client.get_run(run_id)
    info = run.info
    if status == DISCARDED:
        if info.lifecycle_stage == "deleted":
            return
        # An unfinished run of the same pipeline may have been taken up: what it has measured is kept.
        if not any(key.startswith("train/") for key in run.data.metrics):
            client.delete_run(run_id)
            return
        status = "FAILED"
    if info.status == "RUNNING" or (info.end_time or 0) <= (end_ms or 0):
        try:
            client.set_terminated(run_id, status, end_ms)
        except RefusedError as error:
            _require_active(client, run_id, error)
            raise


def reopen_run(client: MlflowClient, run_id: str, start_ms: int) -> None:
    """Mark a run that continues at `start_ms` as running, unless it has ended since, on another machine."""
    info = client.get_run(run_id).info
    if info.status != "RUNNING" and (info.end_time or 0) <= start_ms:
        client.update_run(run_id, status="RUNNING")
