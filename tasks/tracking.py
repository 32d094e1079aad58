"""One MLflow run per pipeline run: opened once, re-attached by every retry and stage, ended with its status.

Nothing here fails a stage: when the tracking server is out of reach, the first failure is logged and the work goes on.
Metrics then wait in a spool on disk (see `trainer_lib.trackers.spool`) and are delivered by the next run; artifacts and
tags are not: the model itself is in the storage, not in MLflow.

The default tracking store is sqlite, `mlflow.db` beside a local storage root with artifacts in `mlartifacts/`. Remote
storage has it in a folder of this user's own, one per storage; set `MLFLOW_TRACKING_URI` where machines share a run.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tasks.configs import TrackingConfig
from trainer_lib.errors import ConfigError, first_line
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainer_lib.trackers import mlflow as tracker
from trainer_lib.trackers.params import clean_key, flatten_params
from trainer_lib.trackers.spool import SPOOL_DIR, Session, user_data_dir

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY_TAG = "trainflow.pipeline_key"
STATUSES = ("FINISHED", "FAILED", "KILLED")
DIGEST_CHARS = 36  # MLflow's limit for a dataset's digest; the whole sha256 goes into a tag
HTTP_RETRIES = 1
HTTP_TIMEOUT_S = 15

_log = logging.getLogger(__name__)
_silenced: set[str] = set()  # servers whose failure has been logged


@dataclass(frozen=True)
class RunHandle:
    """One MLflow run, as plain text: it can be stored and taken up by another process.

    Attributes:
        tracking_uri: where the run is. May hold credentials when it came from the environment: show `server` instead.
        spool_dir: local folder where metrics wait for the server.
    """

    run_id: str
    experiment_id: str
    tracking_uri: str
    spool_dir: str

    def __repr__(self) -> str:
        return f"RunHandle({self.run_id!r} at {self.server!r})"

    @property
    def server(self) -> str:
        """The tracking URI without credentials."""
        return mask(self.tracking_uri)

    def ui_path(self) -> str:
        """The run's page below the address of any MLflow UI that shows this store."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def ui_url(self) -> str | None:
        """The run's page on the tracking server; None for a database, which has no page until a UI is started."""
        return (
            f"{self.server.rstrip('/')}/{self.ui_path()}" if urlsplit(self.server).scheme in {"http", "https"} else None
        )

    def worker_env(self) -> dict[str, str]:
        """The environment in which a worker's MLflow tracker adds its points to this run."""
        return {
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            "MLFLOW_RUN_ID": self.run_id,
            SPOOL_DIR: self.spool_dir,
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(HTTP_RETRIES),
            "MLFLOW_HTTP_REQUEST_TIMEOUT": str(HTTP_TIMEOUT_S),
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }

    def to_dict(self) -> dict[str, str]:
        """As JSON, for a file of the user's own: the tracking URI is not masked."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunHandle:
        """The inverse of `to_dict`."""
        return cls(*(str(data[name]) for name in ("run_id", "experiment_id", "tracking_uri", "spool_dir")))


def default_tracking_uri(storage: Store) -> str:
    """`MLFLOW_TRACKING_URI`, else `mlflow.db` beside a local storage root or in this user's folder for a remote one."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{_tracking_dir(storage) / 'mlflow.db'}"


def open_run(
    config: TrackingConfig,
    storage: Store,
    *,
    name: str,
    pipeline_key: str,
    params: Mapping[str, Any],
    resume: bool,
    tags: Mapping[str, str] | None = None,
    project: Path | None = None,
) -> RunHandle | None:
    """Open the run of one pipeline run; with `resume`, the unfinished one of the same key if there is one.

    Args:
        config: the spec's `tracking` section; disabled returns None.
        storage: the pipeline's storage root.
        name: the pipeline's name: default of experiment and run name.
        pipeline_key: the key by which a later command finds the run.
        params: nested settings; flattened, shortened and masked here. On a re-attached run only new ones are logged;
            changed ones become the artifact `params/<when>.json`.
        tags: further tags (stage keys, origin run, ...).
        project: folder whose git commit is noted; the working directory when unset.

    Returns:
        The handle, or None when tracking is off or the server is out of reach (logged once, never raised).

    Raises:
        ConfigError: `tracking.uri` holds a password.
    """
    if not config.enabled:
        return None
    uri = _configured_uri(config) or default_tracking_uri(storage)
    handle: RunHandle | None = None
    with _never_failing(uri, "open a run"):
        client = _client(uri)
        experiment = tracker.experiment_id(client, config.experiment or name, _artifact_location(uri))
        all_tags = _source_tags(name, project) | dict(config.tags) | dict(tags or {}) | {KEY_TAG: pipeline_key}
        run_id = _unfinished(client, experiment, pipeline_key) if resume else None
        if run_id is None:
            run = client.create_run(experiment, run_name=config.run_name or name, tags=all_tags)
            run_id = str(run.info.run_id)
        else:
            client.update_run(run_id, status="RUNNING")
            client.log_batch(run_id, tags=_tags(all_tags))
        handle = RunHandle(run_id, experiment, uri, str(_tracking_dir(storage) / "spool"))
        tracker.log_params(client, run_id, flatten_params(params), when=time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
        tracker.ship_leftovers(Path(handle.spool_dir), uri)
    return handle


def log_metrics(handle: RunHandle | None, metrics: Mapping[str, float], step: int) -> None:
    """Log values at an optimizer step. Values the run already has at that step are not written twice.

    They go through the spool, so those that an unreachable server cannot take are delivered later.
    """
    if handle is None or not metrics:
        return
    with _never_failing(handle.tracking_uri, "log metrics"):
        wanted = {clean_key(key): float(value) for key, value in metrics.items()}
        with contextlib.suppress(Exception):  # out of reach: everything goes to the spool
            known = {
                metric.key: metric.value
                # From the proto: `data.metrics` has values without their steps.
                for metric in _client(handle.tracking_uri).get_run(handle.run_id).data.to_proto().metrics
                if metric.step == step
            }
            wanted = {key: value for key, value in wanted.items() if known.get(key) != value}
        if not wanted:
            return
        root = Path(handle.spool_dir)
        head = {"tracking_uri": handle.tracking_uri, "run_id": handle.run_id, "dedupe": False}
        session = Session.create(root, head)
        try:
            session.append(wanted, step)
        finally:
            session.end_writing()
            session.release()
        tracker.ship_leftovers(root, handle.tracking_uri)


def log_folder(handle: RunHandle | None, store: Store, artifact_path: str) -> None:
    """Log every file below `store`, byte for byte, as artifacts below `artifact_path`."""
    if handle is None:
        return
    with _never_failing(handle.tracking_uri, f"log {artifact_path}"):
        client = _client(handle.tracking_uri)
        for info in store.list():
            folder = str((PurePosixPath(artifact_path) / info.path).parent)
            if store.is_local:
                client.log_artifact(handle.run_id, str(store.local_path(info.path)), folder)
                continue
            with _private_folder() as local:  # one file at a time: no room for the whole folder is needed
                target = local / PurePosixPath(info.path).name
                store.download(info.path, target)
                client.log_artifact(handle.run_id, str(target), folder)


def log_file(handle: RunHandle | None, content: bytes | str | Path, artifact_path: str) -> None:
    """Log a file, or text, under the whole path `artifact_path` (`report/index.html`) in the run's artifacts."""
    if handle is None:
        return
    with _never_failing(handle.tracking_uri, f"log {artifact_path}"), _private_folder() as local:
        path = PurePosixPath(artifact_path)
        target = local / path.name
        if isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        # MLflow takes None for the root, not ".".
        folder = None if path.parent == PurePosixPath() else str(path.parent)
        _client(handle.tracking_uri).log_artifact(handle.run_id, str(target), folder)


def log_dataset(
    handle: RunHandle | None,
    *,
    name: str,
    url: str,
    digest: str,
    context: str = "training",
    schema: Mapping[str, str] | None = None,
    profile: Mapping[str, Any] | None = None,
) -> None:
    """Log a dataset as an input of the run: its name, its URL, its SHA-256 (complete in the tag `data.<name>`)."""
    if handle is None:
        return
    with _never_failing(handle.tracking_uri, f"log the dataset {name}"):
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=digest[:DIGEST_CHARS],
            source_type="trainflow",
            source=json.dumps({"uri": mask(url)}),
            schema=json.dumps({"columns": dict(schema)}) if schema else None,
            profile=json.dumps(dict(profile)) if profile else None,
        )
        client = _client(handle.tracking_uri)
        client.log_inputs(handle.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])])
        client.set_tag(handle.run_id, f"data.{clean_key(name)}", digest)


def set_tags(handle: RunHandle | None, tags: Mapping[str, str]) -> None:
    """Set tags of the run (stage keys, content digests, where the model was published)."""
    if handle is None or not tags:
        return
    with _never_failing(handle.tracking_uri, "set tags"):
        _client(handle.tracking_uri).log_batch(handle.run_id, tags=_tags(tags))


def finish(handle: RunHandle | None, status: str) -> None:
    """End the run: "FINISHED", "FAILED" or "KILLED"."""
    if handle is None:
        return
    if status not in STATUSES:
        raise ValueError(f"status {status!r} is none of {', '.join(STATUSES)}")
    with _never_failing(handle.tracking_uri, "end the run"):
        tracker.ship_leftovers(Path(handle.spool_dir), handle.tracking_uri)
        _client(handle.tracking_uri).set_terminated(handle.run_id, status)


def _configured_uri(config: TrackingConfig) -> str | None:
    if config.uri and mask(config.uri) != config.uri:
        raise ConfigError(
            "A spec holds no credentials: it is stored with every run.",
            field="tracking.uri",
            value=mask(config.uri),
            remedy="Set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.",
        )
    return config.uri


def _tracking_dir(storage: Store) -> Path:
    if storage.is_local:
        return storage.local_path()
    return user_data_dir() / "tracking" / hashlib.sha256(storage.url.encode()).hexdigest()[:16]


def _artifact_location(uri: str) -> str | None:
    """For a sqlite file the folder `mlartifacts` beside it; any other server knows its own."""
    path = uri.removeprefix("sqlite:///")
    return (Path(path).absolute().parent / "mlartifacts").as_uri() if path != uri and path else None


@functools.lru_cache(maxsize=8)
def _client(uri: str) -> MlflowClient:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    client = tracker.connect(uri)
    # A server that does not answer must cost seconds, not MLflow's minutes; the environment still has the last word.
    from mlflow import environment_variables as settings

    settings.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = HTTP_RETRIES
    settings.MLFLOW_HTTP_REQUEST_TIMEOUT.default = HTTP_TIMEOUT_S
    settings.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.default = True
    return client


def _unfinished(client: MlflowClient, experiment: str, pipeline_key: str) -> str | None:
    # Stripped, because a quote in it would change the query.
    query = f"tags.`{KEY_TAG}` = '{re.sub('[^0-9A-Za-z_.-]', '', pipeline_key)}'"
    # The newest run whatever its status: an old unfinished one behind a finished one is not taken up again.
    newest = client.search_runs([experiment], query, order_by=["attributes.start_time DESC"], max_results=1)
    return str(newest[0].info.run_id) if newest and newest[0].info.status != "FINISHED" else None


def _tags(tags: Mapping[str, str]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(clean_key(key), mask(str(value))) for key, value in tags.items()]


def _source_tags(name: str, project: Path | None) -> dict[str, str]:
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


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:  # made with mode 0700
        yield Path(folder)


@contextlib.contextmanager
def _never_failing(uri: str, what: str) -> Iterator[None]:
    """Log the first failure of a server and go on. Exceptions that stop the process pass through."""
    try:
        yield
    except Exception as error:
        # One warning per outage: a server that is away would otherwise be reported at every point.
        if uri not in _silenced:
            _silenced.add(uri)
            line = first_line(error)
            _log.warning("MLflow could not %s; the pipeline goes on without it. %s: %s", what, mask(uri), mask(line))
    else:
        _silenced.discard(uri)
