"""A spec alone, with a recipe by name: killed and continued it gives the weights of a run that was left in peace."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.new_project.starter_data import FILES
from tests.support.chaos import Pipeline, kill_in_turn
from tests.support.repository import ROOT
from trainer_lib.yaml_text import dump_yaml

SPEC = ROOT / "examples" / "language_model" / "library.yaml"
SMALL = (
    "prepare.sources=[stdlib:json]",
    "prepare.options.vocabulary=300",
    "prepare.options.length=64",
    "prepare.options.split={validation: 0.2, test: 0.2}",
    "train.model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}",
    "train.args.max_steps=80",
    "train.args.learning_rate=1.0e-2",
    "train.args.warmup_steps=0",
    "train.args.save_steps=5",
    "train.args.eval_strategy=no",
    "train.eval_split=null",
    "evaluate.splits=[test]",
    "evaluate.options={prompts: ['def '], sample_tokens: 5}",
    "predict.enabled=false",
    "publish.enabled=false",
)


_NO_MIDDLE = ("train.args.eval_strategy=no", "train.eval_split=null", "evaluate.splits=[test]")
QUICK: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "token_classification/parts.yaml": (
        "test_accuracy_over_usual_low",
        {"words": ["def", "main", "(", ")", ":"]},
        (
            "prepare.options.split={validation: 0, test: 0.3}",
            "train.model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}",
            "train.args.learning_rate=1.0e-2",
            "train.args.max_steps=100",
        ),
    ),
    "question_answering/functions.yaml": (
        "test_f1_over_usual_low",
        {"question": "Which parameter comes first?", "context": "def add(self, item, place):\n    return item"},
        (
            "prepare.options.split={validation: 0, test: 0.3}",
            "train.model.config={hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}",
            "train.args.learning_rate=3.0e-3",
            "train.args.max_steps=150",
            'evaluate.require={test_f1_over_usual_low: "> 0"}',
        ),
    ),
    "sequence_to_sequence/characters.yaml": (
        "test_chrf_over_lead_low",
        {"name": "latin small letter e with acute"},
        (
            "prepare.options.split={validation: 0, test: 0.2}",
            "train.model.config={d_model: 64, d_kv: 16, d_ff: 128, num_layers: 2, num_heads: 4}",
            "train.args.learning_rate=1.0e-2",
            "train.args.max_steps=200",
            'evaluate.require={test_chrf_over_lead_low: "> 0"}',
        ),
    ),
    "embeddings/entities.yaml": (
        "test_mrr_over_overlap_low",
        {"entity": "Aacute"},
        (
            "prepare.options.split={validation: 0, test: 0.2}",
            "train.model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}",
            "train.args.learning_rate=5.0e-3",
            "train.args.max_steps=80",
        ),
    ),
    "preferences/sentences.yaml": (
        "test_accuracy_over_length_low",
        {"prompt": "Return a list of", "chosen": " the names of all files.", "rejected": " files of all names the."},
        (
            "prepare.options.split={validation: 0, test: 0.3}",
            "prepare.options.vocabulary=1000",
            "prepare.options.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1}",
            "train.args.learning_rate=1.0e-2",
            "train.args.max_steps=150",
        ),
    ),
}
"""Example -> the metric of its gate, a new row, and what makes it small."""
NEW_RECIPES = tuple(each for each in QUICK if not each.startswith("token"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", QUICK)
def test_an_example_is_published_because_it_beats_what_is_trivial(tmp_path: Path, example: str) -> None:
    gate, new, small = QUICK[example]
    pipeline = Pipeline(str(ROOT / "examples" / example), tmp_path / "store", (*_NO_MIDDLE, *small), tmp_path / "log")
    assert pipeline.finish() == 0, pipeline.log.read_text()
    [metrics] = (tmp_path / "store" / "stages" / "evaluate").glob("*/metrics.json")
    split, _, name = gate.partition("_")
    assert json.loads(metrics.read_text())[split][name] > 0
    [published] = (tmp_path / "store" / "hub").glob("*/revisions/*/model.safetensors")
    card = (published.parent / "README.md").read_text()
    assert " | without a model | margin |" in card or "language" in example  # its margin is in nats, per token
    assert all((published.parent / link).exists() for link in re.findall(r"!\[.*?\]\((.*?)\)", card))
    assert {"prediction", "embedding"} & set(_predict(published.parent, new, tmp_path))


def _predict(published: Path, new: dict[str, Any], where: Path) -> dict[str, Any]:
    """What a process of its own predicts for a new row with a published model."""
    program = (
        "import json, sys; import numpy; from trainer_lib import load_model; "
        "found = load_model(sys.argv[1], trust_code=True).predict([json.loads(sys.argv[2])]); "
        "print(json.dumps({name: numpy.asarray(each[0]).tolist() for name, each in found.items()}))"
    )
    command = [sys.executable, "-c", program, str(published), json.dumps(new)]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.timeout(300)
def test_a_language_model_by_name_survives_kills(tmp_path: Path) -> None:
    left_alone = Pipeline(str(SPEC), tmp_path / "alone", SMALL, tmp_path / "alone.log")
    assert left_alone.finish() == 0, left_alone.log.read_text()
    [metrics] = (tmp_path / "alone" / "stages" / "evaluate").glob("*/metrics.json")
    measured = json.loads(metrics.read_text())["test"]
    assert measured["perplexity"] < measured["unigram_perplexity"]
    assert measured["nats_below_unigram_low"] > 0
    [data] = (tmp_path / "alone" / "stages" / "prepare-data").glob("*/data.json")
    assert '"tokens_lost": 0' in re.sub(r"\s+", " ", data.read_text())
    [run] = (tmp_path / "alone" / "runs").iterdir()
    found = _predict(run, {"text": "def main():", "new_tokens": 5}, tmp_path)
    assert found["perplexity"] > 1
    assert isinstance(found["continuation"], str)
    pipeline = Pipeline(str(SPEC), tmp_path / "killed", SMALL, tmp_path / "killed.log")
    pipeline.take_prepared_data(left_alone)
    kill = kill_in_turn(pipeline, {"worker": 12, "flow": 30})
    assert kill.alive_after_kill == 0
    assert kill.digest == left_alone.model_digest()
    assert "continues from step" in pipeline.log.read_text()


DIGITS = ROOT / "examples" / "images" / "digits.yaml"
SMALL_IMAGES = (
    "prepare.options.size=8",
    "train.model={channels: [8, 16], dropout: 0.1, augment: {shift: 0.05, rotate: 5.0}}",
    "train.args.num_train_epochs=1",
    "train.args.max_steps=80",
    "train.args.save_steps=5",
    "train.args.eval_strategy=no",
    "train.eval_split=null",
    "evaluate.splits=[test]",
    "predict.enabled=false",
    "publish.enabled=false",
)


def _write_digits(folder: Path) -> str:
    program = ROOT / "examples" / "images" / "write_digits.py"
    subprocess.run([sys.executable, program, folder], check=True)
    return f"prepare.sources=[{folder}]"


@pytest.mark.timeout(300)
def test_images_by_name_survive_kills_with_their_random_changes(tmp_path: Path) -> None:
    _survives(DIGITS, (*SMALL_IMAGES, _write_digits(tmp_path / "digits")), "accuracy_over_majority", tmp_path)


FORECASTS = (
    "train.args.save_steps=5",
    "train.args.eval_strategy=no",
    "train.eval_split=null",
    "evaluate.splits=[test]",
    "predict.enabled=false",
    "publish.enabled=false",
)


@pytest.mark.timeout(300)
def test_forecasts_by_name_survive_kills(tmp_path: Path) -> None:
    _survives(ROOT / "examples" / "forecasting" / "elnino.yaml", FORECASTS, "mase_below_seasonal", tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", NEW_RECIPES)
def test_texts_by_name_survive_kills(tmp_path: Path, example: str) -> None:
    gate, _, small = QUICK[example]
    off = ("predict.enabled=false", "publish.enabled=false", "train.args.save_steps=5")
    margin = gate.removeprefix("test_").removesuffix("_low")
    _survives(ROOT / "examples" / example, (*_NO_MIDDLE, *small, *off), margin, tmp_path)


_PARTS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
ADAPTED: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "text-classification": ("lines.csv", {"text": "line", "label": "module"}, {"line": "import sys as system"}),
    "token-classification": ("lines.jsonl", {}, {"words": ["def", "main", "(", ")", ":"]}),
}
"""Recipe -> its data, the options that name its columns, and a new row."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_a_classifier_are_trained_saved_published_and_loaded(tmp_path: Path, name: str) -> None:
    file, options, new = ADAPTED[name]
    made = FILES[name][1]()
    assert isinstance(made, str)
    (tmp_path / file).write_text(made)
    spec: dict[str, Any] = {
        "name": "adapted",
        "recipe": name,
        "storage": str(tmp_path / "first"),
        "prepare": {"sources": [file], "options": {**options, "vocabulary": 800, "max_length": 32}},
        "train": {"model": {"config": _PARTS}, "args": {"max_steps": 20, "learning_rate": 1e-2}},
        "evaluate": {"splits": ["test"]},
        "predict": {"enabled": False},
        "publish": {"enabled": False},
    }
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(dump_yaml(spec))
    first = Pipeline(str(pipeline), tmp_path / "first", (), tmp_path / "first.log")
    assert first.finish() == 0, first.log.read_text()
    # What was trained is the base of adapters, as `save_pretrained` writes it.
    base = tmp_path / "base"
    [tokenizer] = (tmp_path / "first").glob("stages/prepare-data/*/assets/tokenizer")
    shutil.copytree(tokenizer, base)
    [trained] = (tmp_path / "first").glob("stages/train/*/model")
    for each in trained.iterdir():
        if each.is_file():
            shutil.copy(each, base)
    spec["prepare"]["options"]["folder"] = spec["train"]["model"]["folder"] = str(base)
    del spec["train"]["model"]["config"], spec["prepare"]["options"]["vocabulary"]
    spec["train"]["model"]["lora"] = {"r": 4}
    spec["publish"] = {}
    pipeline.write_text(dump_yaml(spec))
    second = Pipeline(str(pipeline), tmp_path / "second", (), tmp_path / "second.log")
    assert second.finish() == 0, second.log.read_text()
    [published] = (tmp_path / "second").glob("hub/*/revisions/*/adapter_model.safetensors")
    assert not (published.parent / "model.safetensors").exists(), "the base is where it was"
    assert _predict(published.parent, new, tmp_path)["prediction"]


def _survives(spec: Path, small: tuple[str, ...], margin: str, folder: Path) -> None:
    """The small run beats its trivial model, and a worker that is killed changes no bit of its weights."""
    left_alone = Pipeline(str(spec), folder / "alone", small, folder / "alone.log")
    assert left_alone.finish() == 0, left_alone.log.read_text()
    [metrics] = (folder / "alone" / "stages" / "evaluate").glob("*/metrics.json")
    assert json.loads(metrics.read_text())["test"][f"{margin}_low"] > 0
    pipeline = Pipeline(str(spec), folder / "killed", small, folder / "killed.log")
    pipeline.take_prepared_data(left_alone)
    kill = kill_in_turn(pipeline, {"worker": 12})
    assert kill.alive_after_kill == 0
    assert kill.digest == left_alone.model_digest()
    assert "continues from step" in pipeline.log.read_text()
