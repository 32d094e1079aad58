"""Logs a trained model and its kept checkpoints to MLflow, by reference: the weights stay on the storage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.metric_names import is_less_better
from trainer_lib.base.records import to_record
from trainer_lib.base.suggestions import suggestion, to_markdown
from trainer_lib.data.rows.column import LABELS
from trainer_lib.errors import ConfigError
from trainer_lib.model_folder.description import FILE, ModelDescription, Places
from trainer_lib.model_folder.locate import PIN, model_digest
from trainer_lib.recipes.tables.table_files import TableForm
from trainer_lib.storage import FileEntry
from trainer_lib.storage.commit import content_digest, read_commit
from trainer_lib.trackers.mlflow.mlflow_registry import Flavor, FlavorFile, ModelRecord, Registration, Score
from trainer_lib.trackers.names import clean_key, group_results, with_intervals
from trainflow.tasks.configs import RegisterConfig
from trainflow.tasks.model.model_lineage import step_of
from trainflow.tasks.model.portable_model import TrainedModel, code_texts
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.tracking.mlflow_run import TrackedRun

_RESAMPLES_BYTES = 16 << 20
RESAMPLES = "resamples"  # of a split: a file of evaluate
TRANSFORMERS = "transformers"
_FOLDER = "model"
_CONFIG_BYTES = 16 << 20
# The end of a class's name -> the pipeline of transformers that runs it.
_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
}
# A file that such a part writes -> MLflow's name of the part, and the class that reads it.
_PARTS = {
    "tokenizer_config.json": ("tokenizer", "AutoTokenizer"),
    "preprocessor_config.json": ("image_processor", "AutoImageProcessor"),
}


@dataclass(frozen=True)
class LoggedModel:
    """A model as MLflow is given it: the record, and the small files that describe it by path."""

    record: ModelRecord
    files: dict[str, bytes]


def log_models(
    run: TrackedRun, trained: TrainedModel, data: StageManifest[PrepareFacts], model: StageManifest[TrainFacts]
) -> None:
    """Log the model and every kept checkpoint, unless the run that trained it has them. Raises StorageError."""
    facts = model.facts
    # A continued run may have been stopped before it had them.
    is_its_run = facts.tracked_run == run.handle.token if facts.tracked_run else facts.mlflow_run_id is None
    for logged in logged_models(trained, data, model) if is_its_run else ():
        run.log_model({"model": to_record(logged.record)}, logged.files)


def link_evaluation(run: TrackedRun, exported: LoggedModel, evaluation: StageManifest) -> None:
    """Link the results of an evaluation to the model that was evaluated."""
    keys = [clean_key(name) for name in group_results(evaluation.stage, evaluation.metrics)]
    record = exported.record
    run.log_model({"measured": {"digest": record.digest, "step": record.step, "keys": keys}}, {})


def register_model(
    run: TrackedRun,
    exported: LoggedModel,
    evaluation: StageManifest | None,
    config: RegisterConfig,
    flavor: Flavor | None = None,
    *,
    kept_in: str | None = None,
) -> None:
    """Ask the registry for a version of the model, once; the run's folder, at `kept_in`, gets what came of it."""
    if config.name is None:
        return
    record = exported.record
    asked = Registration(
        name=config.name,
        digest=record.digest,
        alias=config.alias,
        description="\n\n".join(filter(None, [config.description, _measured(evaluation)])),
        tags={**record.tags, **config.tags},
        score=None
        if evaluation is None or config.metric is None
        else read_score(evaluation, config.metric, config.greater_is_better, field="register.metric"),
        flavor=flavor,
    )
    run.log_model({"registration": to_record(asked), "kept_in": kept_in}, {})


def _measured(evaluation: StageManifest | None) -> str:
    """The evaluation in one line; empty without one."""
    found = {} if evaluation is None else group_results(evaluation.stage, evaluation.metrics)
    return ", ".join(f"{to_markdown(name)} {text}" for name, text in with_intervals(found).items())


def read_score(evaluation: StageManifest, metric: str, greater_is_better: bool | None, *, field: str) -> Score:
    """The model's scores in the metric of a comparison. Raises ConfigError, about `field`, if it was not measured."""
    known: list[str] = []
    for split, values in evaluation.metrics.items():
        path = f"{RESAMPLES}/{split}.json"
        if not isinstance(values, dict) or path not in [entry.path for entry in evaluation.files]:
            continue
        found = parse_json(evaluation.store().read_bytes(path, limit=_RESAMPLES_BYTES))
        for name, resampled in found["metrics"].items():
            known.append(f"{split}_{name}")
            if known[-1] == metric and name in values:
                return Score(
                    metric=metric,
                    value=float(values[name]),
                    rows=found["rows"],
                    is_greater_better=not is_less_better(name) if greater_is_better is None else greater_is_better,
                    resampled=tuple(resampled),
                )
    remedy = suggestion(metric, known) if known else "Return it from compute_metrics."
    raise ConfigError("The evaluation has no such metric of compute_metrics.", field=field, value=metric, remedy=remedy)


def logged_models(
    trained: TrainedModel, data: StageManifest[PrepareFacts], model: StageManifest[TrainFacts]
) -> Iterator[LoggedModel]:
    """The kept checkpoints, oldest first, and then the exported model."""
    for name in sorted(model.facts.checkpoints, key=step_of):
        commit = read_commit(model.store().child("checkpoints", name), kind="checkpoint")
        if commit is not None:
            yield _describe(trained, data, model, name, name, step_of(name), commit.content_digest)
    yield describe_exported(trained, data, model)


def describe_exported(
    trained: TrainedModel, data: StageManifest[PrepareFacts], model: StageManifest[TrainFacts]
) -> LoggedModel:
    """The exported model."""
    step, weights = model.facts.global_step or 0, content_digest(trained.description.weights)
    return _describe(trained, data, model, trained.description.name, None, step, weights)


def _describe(
    trained: TrainedModel,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
    name: str,
    checkpoint: str | None,
    step: int,
    weights: str,
) -> LoggedModel:
    places = Places(weights=f"{model.url}/model", data=data.url, checkpoint=checkpoint)
    description = replace(trained.description, places=places)
    digest = model_digest(description, weights)
    pinned = {"format": 1, "digest": digest}
    files = {**code_texts(trained), FILE: description.to_json(), PIN: json.dumps(pinned).encode()}
    form = TableForm.of(description.info)
    left_out = {key for key in description.columns if form is not None and form.drops(key)} | {"row_id", *LABELS}
    columns = {key: kind for key, kind in description.columns.items() if key not in left_out}
    required = () if form is None else tuple(form.columns)
    tags = {f"trainflow.{stage}": key for stage, key in description.stages.items()}
    tags |= {"trainflow.weights": places.weights if checkpoint is None else f"{model.url}/checkpoints/{checkpoint}"}
    tags |= {"trainflow.data_digest": data.content_digest, "trainflow.code_digest": description.code_digest}
    params = {"step": str(step), **{key: str(value)[:500] for key, value in description.versions.items()}}
    return LoggedModel(
        ModelRecord(name=name, digest=digest, step=step, columns=columns, required=required, params=params, tags=tags),
        files,
    )


def describe_flavor(
    description: ModelDescription, data: StageManifest[PrepareFacts], model: StageManifest[TrainFacts]
) -> Flavor:
    """The flavor of the exported model: its class, its task, the weights, and the tokenizer that `prepare` wrote."""
    names = {entry.path for entry in description.weights}
    if "adapter_config.json" in names:
        raise _refuse("An adapter needs the weights of its base model, which are not its own.", model.url)
    found: Any = None
    if "config.json" in names:
        found = parse_json(model.store().read_bytes(f"{_FOLDER}/config.json", limit=_CONFIG_BYTES))
    classes = found.get("architectures") if isinstance(found, dict) and "model_type" in found else None
    if not isinstance(classes, list) or len(classes) != 1:
        raise _refuse("The trained model is not a model of transformers.", model.url)
    weights = [
        FlavorFile(f"{_FOLDER}/{entry.path}", f"{model.url}/{_FOLDER}", entry.path, entry.size, entry.sha256)
        for entry in description.weights
    ]
    parts = {name: (kind, files) for name, kind, files in _find_parts(description.assets, data.url)}
    config = {
        "task": next((task for end, task in _TASKS.items() if str(classes[0]).endswith(end)), "feature-extraction"),
        "instance_type": "Pipeline",
        "pipeline_model_type": str(classes[0]),
        "source_model_name": description.name,
        "model_binary": _FOLDER,
        "components": sorted(parts),
        **{f"{name}_type": kind for name, (kind, _) in parts.items()},
        "transformers_version": description.versions.get(TRANSFORMERS),
        "code": None,
    }
    files = (*weights, *(file for _, part in parts.values() for file in part))
    return Flavor(name=TRANSFORMERS, config=config, files=files)


def _find_parts(assets: tuple[FileEntry, ...], url: str) -> Iterator[tuple[str, str, list[FlavorFile]]]:
    """Name, class and files of each part that was saved among the assets, by the file that names it."""
    for entry in assets:
        path = PurePosixPath(entry.path)
        if path.name in _PARTS:
            name, kind = _PARTS[path.name]
            inside = [file for file in assets if PurePosixPath(file.path).is_relative_to(path.parent)]
            targets = [f"components/{name}/{PurePosixPath(file.path).relative_to(path.parent)}" for file in inside]
            files = zip(targets, inside, strict=True)
            yield name, kind, [FlavorFile(to, url, file.path, file.size, file.sha256) for to, file in files]


def _refuse(what: str, url: str) -> ConfigError:
    message = f"{what} MLflow's flavor of transformers cannot load {url}."
    remedy = "Remove register.flavor: mlflow.pyfunc.load_model and load_model take the version without it."
    return ConfigError(message, field="register.flavor", value=TRANSFORMERS, remedy=remedy)
