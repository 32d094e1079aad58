"""A registered model by MLflow's flavor of transformers: what is described, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tasks.stage.facts import PrepareFacts, TrainFacts
from tasks.stage.manifest import StageManifest
from tasks.stage.model_flavor import describe_flavor
from trainer_lib.errors import ConfigError
from trainer_lib.model_folder.description import ModelDescription
from trainer_lib.storage import FileEntry
from trainer_lib.trackers.model_record import Flavor

BERT = {"config.json": json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}).encode()}


def describe(folder: Path, weights: dict[str, bytes], assets: dict[str, bytes] | None = None) -> Flavor:
    """The flavor of a model with these files."""
    entries: dict[str, list[FileEntry]] = {"model": [], "data": []}
    for place, files, below in (("model", weights, "model"), ("data", assets or {}, "assets")):
        for name, content in files.items():
            path = folder / place / below / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            listed = name if place == "model" else f"assets/{name}"
            entries[place].append(FileEntry(listed, len(content), hashlib.sha256(content).hexdigest()))
    data, model = (
        StageManifest[Any](stage, "k" * 64, str(folder / place), "d" * 64, facts=facts)
        for stage, place, facts in (("prepare-data", "data", PrepareFacts({})), ("train", "model", TrainFacts()))
    )
    description = ModelDescription(
        name="texts",
        recipe="recipe.py",
        code=(),
        weights=tuple(entries["model"]),
        assets=tuple(entries["data"]),
        versions={"transformers": "5.0"},
    )
    return describe_flavor(description, data, model)


def test_a_model_and_the_tokenizer_of_its_data_are_described(tmp_path: Path) -> None:
    tokenizer = {"tokenizer/tokenizer_config.json": b"{}", "tokenizer/tokenizer.json": b"{}", "other.txt": b"x"}
    flavor = describe(tmp_path, {**BERT, "model.safetensors": b"w"}, tokenizer)
    assert flavor.config == {
        "task": "text-classification",
        "instance_type": "Pipeline",
        "pipeline_model_type": "BertForSequenceClassification",
        "source_model_name": "texts",
        "model_binary": "model",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        "transformers_version": "5.0",
        "code": None,
    }
    assert {(file.path, Path(file.folder, file.name).read_bytes()) for file in flavor.files} == {
        ("model/config.json", BERT["config.json"]),
        ("model/model.safetensors", b"w"),
        ("components/tokenizer/tokenizer_config.json", b"{}"),
        ("components/tokenizer/tokenizer.json", b"{}"),
    }


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"model.safetensors": b"w"}, "not a model of transformers"),
        ({"config.json": b'{"recipe": "recipe.py"}'}, "not a model of transformers"),
        ({"adapter_config.json": b"{}", **BERT}, "needs the weights of its base model"),
    ],
)
def test_a_model_of_another_kind_is_refused(tmp_path: Path, weights: dict[str, bytes], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        describe(tmp_path, weights)
    assert (refused.value.field, refused.value.value) == ("register.flavor", "transformers")
    assert "Remove register.flavor" in (refused.value.remedy or "")
