"""The lineage of a model, from the manifests of the stages, and the versions and processor it was made with."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from trainer_lib.checkpoint.layout import parse_step
from trainer_lib.errors import DamagedError, StorageError
from trainer_lib.hub.base import Content
from trainer_lib.model_folder.lineage import (
    FILE,
    CheckpointLink,
    Lineage,
    PublicationLink,
    SourceLink,
    StageLink,
)
from trainer_lib.secrets import mask, mask_value
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import read_commit
from trainflow.tasks.stage.facts import PublishFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest, read_key

MODEL = "model/"
# In a key, as the parameters of the tasks: the content digests of what a stage was made from.
_INPUTS = {"data": "prepare-data", "model": "train"}
_PACKAGES = ("trainflow", "torch", "numpy", "safetensors", "transformers", "accelerate", "pyarrow")


def digest_checkpoints(
    store: Store, names: Iterable[str], files: Collection[FileEntry]
) -> tuple[dict[str, str], str | None]:
    """The content digests of a training's checkpoints by name, and the one with the weights of the model."""
    weights = {(entry.path.removeprefix(MODEL), entry.sha256) for entry in files if entry.path.endswith(".safetensors")}
    digests: dict[str, str] = {}
    exported: str | None = None
    for name in sorted(names, key=step_of):
        try:
            commit = read_commit(store.child("checkpoints", name), kind="checkpoint")
        except (DamagedError, StorageError):  # the model is whole all the same
            continue
        if commit is not None:
            digests[name] = commit.content_digest
            if weights and weights <= {(entry.path, entry.sha256) for entry in commit.files}:
                exported = name
    return digests, exported


def describe_lineage(
    name: str,
    manifests: Sequence[StageManifest],
    *,
    code_digest: str | None = None,
    run: str | None = None,
    mlflow: tuple[str | None, str | None] | None = None,
    files: Iterable[FileEntry] = (),
) -> Lineage:
    """The origins of a model, from the manifests of the stages in the order in which they ran.

    `code_digest` is of the code that predicts, `run` is on the storage, and `mlflow` is the run's tracked run and its
    id, by default those of the training. `files` are those of the folder that the lineage is for.
    """
    keys = {manifest.stage: key_fields(manifest) for manifest in manifests}
    model = next((manifest for manifest in manifests if isinstance(manifest.facts, TrainFacts)), None)
    facts = TrainFacts() if model is None else model.facts
    changed = {"mixture": list(facts.mixture)} if facts.mixture else {}
    tracked, mlflow_id = mlflow or (facts.tracked_run, facts.mlflow_run_id)
    published = (manifest.facts for manifest in manifests if isinstance(manifest.facts, PublishFacts))
    fact = next((fact for fact in published if not fact.held), None)
    return Lineage(
        name=name,
        sources=tuple(_sources(keys.get("prepare-data", {}).get("sources"))),
        stages=tuple(
            StageLink(
                stage=manifest.stage,
                key=manifest.key,
                content_digest=manifest.content_digest,
                inputs=find_inputs(keys[manifest.stage]),
            )
            for manifest in manifests
        ),
        checkpoints=tuple(
            CheckpointLink(name=checkpoint, step=step_of(checkpoint), content_digest=digest)
            for checkpoint, digest in facts.checkpoint_digests.items()
        ),
        exported=facts.exported,
        tracked_run=tracked,
        mlflow_run_id=mlflow_id,
        code_digest=code_digest,
        arguments={} if model is None else mask_value("", {**changed_arguments(model), **changed}),
        versions=facts.environment or dict(keys.get("train", {}).get("versions") or {}),
        run=run,
        publication=None
        if fact is None
        else PublicationLink(revision=fact.revision, content_digest=fact.published_digest),
        files=tuple(files),
    )


def add_lineage(content: Content, lineage: Lineage) -> Content:
    """A publication with its lineage."""
    whole = replace(lineage, files=tuple(content.entries()))
    return replace(content, texts={**content.texts, FILE: whole.to_json()})


def find_inputs(fields: Mapping[str, Any]) -> dict[str, str]:
    """From the fields of a stage's key: stage -> content digest of its result that this one was made from."""
    named = fields.get("inputs")
    found = dict(named) if isinstance(named, Mapping) else {}
    found |= {stage: fields[parameter] for parameter, stage in _INPUTS.items() if parameter in fields}
    return {str(stage): digest for stage, digest in found.items() if isinstance(digest, str) and len(digest) == 64}


def key_fields(manifest: StageManifest) -> dict[str, Any]:
    """The fields of the key of a stage's result; empty where they cannot be read."""
    record = read_key(manifest.store())
    return {} if record is None else dict(record["fields"])


def changed_arguments(model: StageManifest) -> dict[str, Any]:
    """The arguments the model was trained with, from the key of its stage: those that differ from the defaults."""
    from trainer_lib.arguments import TrainingArguments, numeric_fields

    # The key holds what the training resolved to; the spec may hold less.
    used = key_fields(model).get("args")
    if not isinstance(used, dict):
        return {}
    defaults = numeric_fields(TrainingArguments(), data_parallel_size=1)
    always = ("global_batch_size", "learning_rate", "num_train_epochs", "max_steps", "optim", "seed")
    return {name: value for name, value in used.items() if name in always or defaults.get(name, value) != value}


def _sources(recorded: object) -> Iterable[SourceLink]:
    for source in recorded if isinstance(recorded, list) else ():
        if isinstance(source, Mapping):
            yield SourceLink(source=mask(str(source.get("source"))), digest=str(source.get("digest")))


def step_of(checkpoint: str) -> int:
    """The optimizer step of a checkpoint, given its name."""
    return parse_step(checkpoint) or 0


def find_versions() -> dict[str, str]:
    """Python's version and those of the packages that train and predict; no entry for one that is not installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def find_processor() -> str:
    """The processor's name, as the system gives it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
            names = (row.partition(":")[2].strip() for row in text.splitlines() if row.startswith("model name"))
            return next(names, "")
    return platform.processor()
