"""Files for MLflow's transformers flavor of a registered model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import ConfigError
from trainer_lib.model_folder.description import ModelDescription
from trainer_lib.storage import FileEntry
from trainer_lib.trackers.mlflow.model_record import Flavor, FlavorFile
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest

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


def describe_flavor(
    description: ModelDescription, data: StageManifest[PrepareFacts], model: StageManifest[TrainFacts]
) -> Flavor:
    """The flavor of the exported model: its class, its task, the weights, and the tokenizer that `prepare` wrote.

    Raises:
        ConfigError: the model is not one of transformers, or is an adapter. StorageError: it cannot be read.
    """
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
    return ConfigError(
        f"{what} MLflow's flavor of transformers cannot load {url}.",
        field="register.flavor",
        value=TRANSFORMERS,
        remedy="Remove register.flavor: mlflow.pyfunc.load_model and load_model take the version without it.",
    )
