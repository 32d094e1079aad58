"""What a logged model gets after it was logged: a flavor of MLflow beside our reference, and the schema of its outputs.

MLflow's flavors load what lies among the artifacts of a model, so a flavor is the one place where weights are uploaded,
and only for a spec that asks for it. Safe to repeat: files that are there in their size are left out, and the MLmodel
file is written last.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow_client import RefusedError
from trainer_lib.trackers.model_record import TYPES, Flavor, FlavorFile, nested
from trainer_lib.yaml_text import dump_yaml, parse_yaml

_MLMODEL = "MLmodel"


def send_flavor(client: Any, model_id: str, flavor: Flavor) -> None:
    """Add a flavor to a logged model, unless it has it.

    Raises:
        RefusedError: a file is not the one that was committed.
        StorageError: a file cannot be read.
        Exception: whatever mlflow raises.
    """
    description = _read(client, model_id)
    if flavor.name in description["flavors"]:
        return
    sizes: dict[str, dict[str, int]] = {}
    for file in flavor.files:
        parent = str(PurePosixPath(file.path).parent)
        if parent not in sizes:
            listed = client.list_logged_model_artifacts(model_id, parent)
            sizes[parent] = {each.path: int(each.file_size or 0) for each in listed if not each.is_dir}
        if sizes[parent].get(file.path) != file.size:
            _send_file(client, model_id, file)
    description["flavors"][flavor.name] = flavor.config
    _write(client, model_id, description)


def send_outputs(client: Any, model_id: str, columns: Mapping[str, str]) -> None:
    """Write what the model predicts into its signature, unless it is there.

    Args:
        columns: column of the predictions -> its type, with `[*]` for each list around a value (`float64[*]`).
    """
    description = _read(client, model_id)
    outputs = json.dumps([{**_type(text), "name": name, "required": True} for name, text in columns.items()])
    if description["signature"]["outputs"] != outputs:
        description["signature"]["outputs"] = outputs
        _write(client, model_id, description)


def _read(client: Any, model_id: str) -> dict[str, Any]:
    return dict(parse_yaml(client.read_model_artifact(model_id, _MLMODEL).decode()))


def _write(client: Any, model_id: str, description: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:
        Path(folder, _MLMODEL).write_text(dump_yaml(description))
        client.log_model_artifacts(model_id, folder)


def _type(text: str) -> dict[str, Any]:
    name, depth = text.replace("[*]", ""), text.count("[*]")
    return nested(TYPES.get(name, "double" if name.startswith("float") else "long"), depth)


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
