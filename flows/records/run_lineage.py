"""The lineage of a run: what was made from what, and where it was published, in `lineage.json` of the run's folder.

It is written when the run ends. For a run without one, which has not ended or is older, it is made from what the
stages have committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_lib.model_folder.description import FILE as MODEL_FILE
from trainer_lib.model_folder.description import SOURCE
from trainer_lib.model_folder.lineage import FILE, Lineage, StageLink
from trainer_lib.storage import FileEntry, Store
from trainflow.flows.records.past_runs import ARGUMENTS_FILE, KEYS_FILE, SPEC_FILE
from trainflow.flows.stages import stage_names
from trainflow.tasks.model.model_lineage import describe_lineage
from trainflow.tasks.stage.manifest import look_up_in

_KEPT = (SPEC_FILE, ARGUMENTS_FILE, KEYS_FILE, MODEL_FILE)


def write_lineage(storage: str, folder: Store, record: Mapping[str, Any]) -> None:
    """Write the lineage of a run that has ended into its folder; `record` is its `run.json`. Raises StorageError."""
    kept = [info for info in folder.list() if info.path in _KEPT or info.path.startswith(f"{SOURCE}/")]
    files = tuple(FileEntry(info.path, info.size, folder.digest(info.path)) for info in kept)
    folder.write_bytes(FILE, compose_lineage(storage, folder, record, files=files).to_json())


def compose_lineage(
    storage: str, folder: Store, record: Mapping[str, Any], *, files: tuple[FileEntry, ...] = ()
) -> Lineage:
    """The lineage of a run, from its record and the commit files of its stages; their files are not read."""
    keys = {str(stage): str(key) for stage, key in dict(record.get("stages") or {}).items()}
    order = [*(name for name in stage_names() if name in keys), *sorted(set(keys) - set(stage_names()))]
    found = (look_up_in(storage, name, keys[name]) for name in order)
    manifests = [manifest for manifest in found if manifest is not None and manifest.key == keys[manifest.stage]]
    lineage = describe_lineage(
        str(record.get("name")),
        manifests,
        run=folder.url.rstrip("/").rpartition("/")[2],
        mlflow=(record.get("tracked_run"), record.get("mlflow_run_id")),
        files=files,
    )
    known = {link.stage: link for link in lineage.stages}
    # A stage whose commit file is gone or damaged is a link all the same.
    stages = tuple(known.get(name, StageLink(stage=name, key=keys[name])) for name in order)
    return Lineage(**{**vars(lineage), "stages": stages})
