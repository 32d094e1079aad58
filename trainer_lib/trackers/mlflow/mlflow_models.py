"""MLflow's models: LoggedModels by reference. With `mlflow_client` the only files that import mlflow.

A LoggedModel holds the model's description, its code and an MLmodel file: a few kilobytes, whatever the size of the
weights, which stay where training committed them. `mlflow.pyfunc` loads it through `trainer_lib.model_folder.pyfunc`,
a module of this package, so that nothing is unpickled.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import platform
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from trainer_lib.base.records import from_record, to_record
from trainer_lib.base.yaml_text import dump_yaml, parse_yaml
from trainer_lib.data.rows.column import Column
from trainer_lib.errors import ConfigError, StorageError, StoreUnreachableError, first_line
from trainer_lib.storage import Store
from trainer_lib.storage.outages import describe_outage
from trainer_lib.trackers.mlflow.mlflow_client import (
    BATCH,
    GoneError,
    RefusedError,
    history,
    latest_points,
    load,
    shorten,
)
from trainer_lib.trackers.mlflow.mlflow_registry import (
    DIGEST_TAG,
    FOLDER,
    OUTCOME_FILE,
    Flavor,
    FlavorFile,
    ModelRecord,
    Registered,
    Registration,
    register,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

# What a logged model gets with its version: a flavor of MLflow in addition to our reference.
#
# MLflow's flavors load what lies among the artifacts of a model, so a flavor is the one place where weights are
# uploaded, and only for a spec that asks for it. Safe to repeat: files that are there in their size are left out, and
# the MLmodel file is written last.


_MLMODEL = "MLmodel"
# Types -> MLflow's. A number is as wide as JSON's: MLflow narrows none, and the model converts what it is given.
_TYPES = {"bool": "boolean", "string": "string", "bytes": "binary", "binary": "binary"}


def send_flavor(client: Any, model_id: str, flavor: Flavor) -> None:
    """Add a flavor to a logged model, unless it has it. Raises RefusedError for a file that is not as committed."""
    address = client.get_logged_model(model_id).artifact_location
    description = dict(parse_yaml(client.read_artifact(address, _MLMODEL).decode()))
    if flavor.name in description["flavors"]:
        return
    sizes: dict[str, dict[str, int]] = {}
    for file in flavor.files:
        parent = str(PurePosixPath(file.path).parent)
        if parent not in sizes:
            listed = client.list_logged_model_artifacts(model_id, parent)
            sizes[parent] = {artifact.path: int(artifact.file_size or 0) for artifact in listed if not artifact.is_dir}
        if sizes[parent].get(file.path) != file.size:
            _send_file(client, model_id, file)
    description["flavors"][flavor.name] = flavor.config
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        Path(folder, _MLMODEL).write_text(dump_yaml(description))
        client.log_model_artifacts(model_id, folder)


def _send_file(client: Any, model_id: str, file: FlavorFile) -> None:
    store, path = Store.open(file.folder), PurePosixPath(file.path)
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:  # one file at a time needs no room for all
        local = Path(folder, path.name)
        if store.is_local:
            local.symlink_to(store.local_path(file.name))
        else:
            store.download(file.name, local)
        with local.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != file.sha256:
            raise RefusedError(f"{store.url}/{file.name} has the digest {found[:12]}, committed was {file.sha256[:12]}")
        client.log_model_artifacts(model_id, folder, str(path.parent))


_log = logging.getLogger(__name__)
LOADER = "trainer_lib.model_folder.pyfunc"


def find_model(client: MlflowClient, experiment_id: str, digest: str, run_id: str | None = None) -> Any:
    """The LoggedModel with a digest: of a run, or the newest of the experiment; None if there is none."""
    query = f"tags.`{DIGEST_TAG}` = '{digest}'" + (f" AND source_run_id = '{run_id}'" if run_id else "")
    order = [{"field_name": "creation_time", "ascending": False}]
    found = list(client.search_logged_models([experiment_id], query, order_by=order))
    return found[0] if found else None


def download_model(address: str) -> Path:
    """The folder that describes a model of MLflow, copied to this machine; removed when the process ends.

    `address` is ``models:/name@alias``, ``models:/name/version`` or ``models:/m-id``. Raises ConfigError when there is
    no such model, or trainflow did not log it, and StoreUnreachableError without an answer.
    """
    load()
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    folder = Path(tempfile.mkdtemp(prefix="trainflow-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        place = Path(download_artifacts(artifact_uri=address, dst_path=str(folder))) / FOLDER
    except Exception as error:  # whatever mlflow and its stores raise
        shutil.rmtree(folder, ignore_errors=True)
        if describe_outage(error) is not None or not isinstance(error, MlflowException):
            remedy = "Check MLFLOW_TRACKING_URI, and try again."
            message = f"The registry does not answer: {shorten(error).rstrip('.')}."
            raise StoreUnreachableError(message, field="model", value=address, remedy=remedy) from error
        # Without the name of its error code and the full stop.
        message = re.sub(r"^[A-Z_]+: ", "", first_line(error)).rstrip(".")
        what = f"The registry has no such model: {message}."
        remedy = "Set MLFLOW_TRACKING_URI to its server; trainflow models lists names, versions and aliases."
        raise ConfigError(what, field="model", value=address, remedy=remedy) from error
    if not place.is_dir():
        remedy = "Load it with mlflow.pyfunc.load_model."
        raise ConfigError("This model was not logged by trainflow.", field="model", value=address, remedy=remedy)
    return place


def send_model(
    client: MlflowClient, experiment_id: str, run_id: str, record: ModelRecord, files: Mapping[str, Path]
) -> str:
    """Make the LoggedModel of a run from its record and local files by path, unless it is there; return its id.

    Safe to repeat after any interruption. Raises RefusedError where the server has no logged models.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    model = find_model(client, experiment_id, record.digest, run_id)
    if model is None:
        # With its tags, so that a process that dies right after is followed by one that finds it.
        model = client.create_logged_model(
            experiment_id,
            name=record.name,
            source_run_id=run_id,
            tags={**record.tags, DIGEST_TAG: record.digest},
            params=record.params,
            model_type="trainflow",
        )
    model_id = str(model.model_id)
    if model.status != LoggedModelStatus.READY:
        with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
            _write_folder(Path(folder), record, files, run_id, model_id)
            client.log_model_artifacts(model_id, folder)
        client.finalize_logged_model(model_id, LoggedModelStatus.READY)
    run = client.get_run(run_id)
    outputs = run.outputs.model_outputs if run.outputs is not None else []
    if model_id not in [output.model_id for output in outputs]:
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=record.step)])
    link_metrics(client, run_id, model_id, record.step)
    return model_id


def link_metrics(client: MlflowClient, run_id: str, model_id: str, step: int, keys: Collection[str] = ()) -> None:
    """Link the run's points at a step to the model measured there; no `keys`: those of evaluations while training."""
    from mlflow.entities import Metric

    linked = {(metric.key, metric.step) for metric in client.get_logged_model(model_id).metrics or []}
    wanted = set(keys)
    found = []
    for key, latest in latest_points(client, run_id).items():
        if (key in wanted if wanted else key.startswith("eval")) and (key, step) not in linked:
            # The newest point of the step, just as it is: the run gets no second one. Mostly it is the run's last.
            known = [latest] if latest.step <= step else history(client, run_id, key)
            points = [point for point in known if point.step == step]
            found += [max(points, key=lambda point: point.timestamp)] if points else []
    for start in range(0, len(found), BATCH):
        metrics = [Metric(*point, model_id=model_id) for point in found[start : start + BATCH]]
        client.log_batch(run_id, metrics=metrics)


def deliver_model(client: MlflowClient, run_id: str, record: Mapping[str, Any], folder: Path) -> None:
    """Send what the spool holds about a model: the model itself, its version, or what was measured.

    `folder` has the session's files. Raises RefusedError where the server has no logged models, or not this one.
    """
    experiment_id = str(client.get_run(run_id).info.experiment_id)
    try:
        if "model" in record:
            files = {path: folder / name for path, name in record["files"].items()}
            send_model(client, experiment_id, run_id, ModelRecord(**record["model"]), files)
        elif "registration" in record:
            asked = from_record(Registration, record["registration"])
            if (model := find_model(client, experiment_id, asked.digest)) is None:
                raise RefusedError("the model is not logged there")
            if asked.flavor is not None:  # before the version: nobody finds one that is not whole
                send_flavor(client, str(model.model_id), asked.flavor)
            version, verdict = register(client, str(model.model_id), run_id, asked)
            client.log_text(run_id, verdict.to_json(), f"registry/{asked.name}-version-{version}.json")
            if record.get("kept_in"):  # the run's folder, for its report
                outcome = json.dumps(to_record(Registered.of(asked, version, verdict)), allow_nan=False)
                try:
                    Store.open(record["kept_in"]).replace(OUTCOME_FILE, outcome.encode())
                except (StorageError, ConfigError) as error:  # MLflow has it
                    _log.debug("The outcome of the registration could not be kept: %s", error)
            note = "%s version %s is registered. %s"
            _log.warning(note, asked.name, version, verdict.reason, extra={"label": "note"})
        else:
            measured = record["measured"]
            model = find_model(client, experiment_id, measured["digest"], run_id)
            if model is not None:
                link_metrics(client, run_id, str(model.model_id), measured["step"], measured["keys"])
    except GoneError as error:  # the run is there: it is the server that has no logged models
        raise RefusedError(first_line(error)) from error


def bad_request(message: str) -> Exception:
    """The error that MLflow's server answers with status 400 and this text, without a traceback."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import BAD_REQUEST

    return MlflowException(message, error_code=BAD_REQUEST)


def _write_folder(folder: Path, record: ModelRecord, files: Mapping[str, Path], run_id: str, model_id: str) -> None:
    """Write the artifacts: the MLmodel file, an input example, what a serving environment needs, and the files."""
    for path, local in files.items():
        target = folder / FOLDER / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(local.read_bytes())
    # Zeros of the right types: an input example that shows nothing of the data.
    example = {name: Column.parse(kind).example() for name, kind in record.columns.items()}
    split = {"columns": list(example), "data": [list(example.values())]}
    has_example = not any(isinstance(value, bytes) for value in example.values())
    if has_example:
        (folder / "input_example.json").write_text(json.dumps(split))
        (folder / "serving_input_example.json").write_text(json.dumps({"dataframe_split": split}))
    (folder / "requirements.txt").write_text(f"trainflow=={metadata.version('trainflow')}\n")
    (folder / "python_env.yaml").write_text("dependencies:\n- -r requirements.txt\n")
    (folder / _MLMODEL).write_text(dump_yaml(_describe(record, run_id, model_id, has_example=has_example)))


def _describe(record: ModelRecord, run_id: str, model_id: str, *, has_example: bool) -> dict[str, Any]:
    """The contents of the MLmodel file. Not written by `mlflow.models`, whose import takes seconds of a run."""
    # Labels have other names in other recipes, so only a table's columns are required: the model names a missing one.
    needed = record.required
    inputs = [
        {**({"type": "any"} if name in needed else _type(kind)), "name": name, "required": name in needed}
        for name, kind in record.columns.items()
    ]
    example = {
        "artifact_path": "input_example.json",
        "type": "dataframe",
        "pandas_orient": "split",
        "serving_input_path": "serving_input_example.json",
    }
    return {
        "artifact_path": f"models:/{model_id}",
        "flavors": {
            "python_function": {
                "data": FOLDER,
                "env": {"virtualenv": "python_env.yaml"},
                "loader_module": LOADER,
                "python_version": platform.python_version(),
            }
        },
        # The signature cannot say them: MLflow refuses [1, 2] for doubles.
        "metadata": {"columns": record.columns},
        "mlflow_version": metadata.version("mlflow"),
        "model_id": model_id,
        "model_uuid": model_id,
        "run_id": run_id,
        "saved_input_example_info": example if has_example else None,
        "signature": {"inputs": json.dumps(inputs), "outputs": None, "params": None},
        "utc_time_created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
    }


def _type(text: str) -> dict[str, Any]:
    column = Column.parse(text)
    depth = 1 if column.kind == "list" else len(column.shape)
    # MLflow refuses whole numbers for doubles, though JSON's writers and pandas.read_csv make them of 1.0, and arrays
    # ``[batch, …]`` where the type has a kind of element.
    if depth or column.dtype.startswith(("float", "bfloat")):
        nested: dict[str, Any] = {"type": "any"}
        for _ in range(depth):
            nested = {"type": "array", "items": nested}
        return nested
    return {"type": _TYPES.get(column.dtype or column.kind, "long")}
