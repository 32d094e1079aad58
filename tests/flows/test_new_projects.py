"""Projects of every recipe, and of Keras, run through all stages with few rows and steps."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.model_folders import code_is_removed as code_is_removed
from tests.support.repository import ROOT
from tests.support.runs import ALL, IN_PROCESS, ran, reason, run, succeeded
from tests.support.toy import RECIPE, project
from trainer_lib import load_model
from trainer_lib.model_folder.lineage import read_lineage_file
from trainer_lib.protocol.recipe_names import ABOUT
from trainer_lib.recipes.shared.model_places import new_causal_model
from trainer_lib.recipes.texts.tokenizing import learn_byte_tokenizer
from trainer_lib.storage import Store
from trainflow.flows.cli.main import main
from trainflow.flows.lineage.lineage_chain import find_chain
from trainflow.flows.lineage.lineage_checks import verify_chain
from trainflow.flows.new_project.starting import write_project
from trainflow.flows.pipeline import run_pipeline
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks.configs import TrackingConfig

SMALL = (
    "limit=24",
    "train.args.max_steps=3",
    "train.args.eval_strategy=no",
    "train.eval_split=null",
    "evaluate.splits=[test]",
    "evaluate.require={}",  # a gate that these few steps may not pass
)


ELSEWHERE = {"tabular-classification"}
"""Recipes whose project runs whole in tests/e2e/test_wheel.py."""


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("recipe", sorted(set(ABOUT) - ELSEWHERE))
def test_a_new_project_runs_through_all_stages(tmp_path: Path, recipe: str) -> None:
    folder = tmp_path / "project"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["init", str(folder), "--recipe", recipe, "--quiet"])
    result = succeeded(folder, *SMALL)
    assert ran(result) == ALL
    stages = folder / ".trainflow" / "limited" / "stages"
    [metrics] = stages.glob("evaluate/*/metrics.json")
    measured = json.loads(metrics.read_text())["test"]
    gates = load_spec(folder / "pipeline.yaml").evaluate.require
    assert gates
    assert {gate.removeprefix("test_") for gate in gates} <= set(measured), "the gate is on a metric that is measured"
    assert list(stages.glob("predict/*/predictions/test/*"))
    assert list(folder.glob(".trainflow/limited/hub/*/revisions/*/README.md"))


PARTS = (
    *("prepare.options.split={validation: 0, test: 0.3}", "train.args.eval_strategy=no", "train.eval_split=null"),
    "train.model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}",
    *("train.args.learning_rate=1.0e-2", "train.args.max_steps=100", "evaluate.splits=[test]"),
)


@pytest.mark.usefixtures("prefect_server")
def test_an_example_is_published_because_it_beats_what_is_trivial(tmp_path: Path) -> None:
    example = ROOT / "examples" / "token_classification" / "parts.yaml"
    run_pipeline(load_spec(example, (f"storage={tmp_path}", *IN_PROCESS, *PARTS))).raise_for_error()
    [metrics] = tmp_path.glob("stages/evaluate/*/metrics.json")
    assert json.loads(metrics.read_text())["test"]["accuracy_over_usual_low"] > 0
    [published] = tmp_path.glob("hub/*/revisions/*/model.safetensors")
    card = (published.parent / "README.md").read_text()
    assert " | without a model | margin |" in card
    assert all((published.parent / link).exists() for link in re.findall(r"!\[.*?\]\((.*?)\)", card))
    loaded = load_model(str(published.parent), trust_code=True)
    assert "prediction" in loaded.predict([{"words": ["def", "main", "(", ")", ":"]}])


@pytest.mark.usefixtures("prefect_server")
def test_an_example_learns_to_answer_and_then_to_prefer_right_answers(tmp_path: Path) -> None:
    short = (*SMALL[1:4], "train.args.warmup_steps=0", "evaluate.require={}")
    learn = runpy.run_path(str(ROOT / "examples" / "conversations" / "learn.py"))
    right = learn["train"](tmp_path, *IN_PROCESS, *short, "evaluate.splits=[test]")
    assert [name for name in right if len(right[name]) > 500] == ["fine-tuned", "then preferred", "gain"]
    assert len(list(tmp_path.glob("store/hub/library-*/revisions/*/model.safetensors"))) == 2


KERAS = """
def build_model(options, data):
    import keras

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    return model


"""


@pytest.mark.needs("keras")
@pytest.mark.usefixtures("prefect_server")
def test_a_keras_model_goes_through_every_stage(tmp_path: Path) -> None:
    """In one process the same code builds four models, whose layers Keras numbers on and on."""
    data, _, rest = RECIPE.partition("def build_model")
    folder = project(
        tmp_path, recipe=data + KERAS.lstrip() + "def compute_metrics" + rest.split("def compute_metrics")[1]
    )
    result = succeeded(folder.parent, "train.args.max_steps=40")
    assert ran(result) == ALL
    [metrics] = tmp_path.glob("store/stages/evaluate/*/metrics.json")
    measured = json.loads(metrics.read_text())["test"]
    assert measured["error"] < 0.5 and measured["loss"] < 0.5
    assert list(tmp_path.glob("store/stages/predict/*/predictions/test/*"))


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
def test_adapters_of_a_language_model_are_trained_measured_loaded_and_published_as_they_are_and_merged(
    tmp_path: Path,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder, base = write_base(tmp_path), tmp_path / "base"
    model, data = f"{{folder: {base}", "length: 64, overlong: split, split: {validation: 0, test: 0.3}"
    small: tuple[str, ...] = (
        *SMALL,
        f"prepare.options={model}, {data}}}",
        f"train.model={model}, adapter: {{rank: 4}}}}",
    )
    small += ("evaluate.options={prompts: ['Return '], sample_tokens: 5}", "tracking.enabled=false")
    result = succeeded(folder, *small)
    assert ran(result) == ALL
    limited = folder / ".trainflow" / "limited"
    [published] = limited.glob("hub/*/revisions/*/adapter_model.safetensors")
    assert not (published.parent / "model.safetensors").exists(), "the base is where it was"
    [samples] = limited.glob("stages/evaluate/*/**/samples.txt")
    assert samples.read_text().startswith("Return ")
    loaded: Any = load_model(str(published.parent), trust_code=True)
    predicted = loaded.predict([{"text": "Return the names.", "new_tokens": 3}])
    assert predicted["perplexity"][0] > 1
    batch = {"input_ids": torch.arange(20)[None]}
    with torch.no_grad():
        adapted = loaded.model(**batch).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(**batch).logits
    assert not torch.allclose(adapted, plain, atol=1e-4), "three steps changed something"

    merged = publish_merged(folder, small)
    # Plain transformers, without peft and without the base: what the adapters give.
    base.rename(tmp_path / "away")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(merged)(**batch).logits
    (tmp_path / "away").rename(base)
    torch.testing.assert_close(logits, adapted, atol=1e-5, rtol=1e-4)
    again: Any = load_model(str(merged), trust_code=True).predict([{"text": "Return the names.", "new_tokens": 3}])
    assert np.allclose(again["perplexity"], predicted["perplexity"], rtol=1e-4)


def publish_merged(folder: Path, small: tuple[str, ...]) -> Path:
    """Publish the run's adapters merged, and check what was published; return its folder."""
    # The setting belongs to the publication alone.
    result, limited = run(folder, *small, "publish.merge_adapters=true"), folder / ".trainflow" / "limited"
    result.raise_for_error()
    assert ran(result) == {"push-to-hub"}
    assert "merge_adapters" in reason(result, "push-to-hub")
    [merged] = limited.glob("hub/*/revisions/*/adapter")
    assert not list(merged.parent.glob("adapter_*")) and not list(limited.glob("stages/push-to-hub/*/merged"))
    [trained] = limited.glob("stages/train/*/model/adapter_model.safetensors")
    assert (merged / "adapter_model.safetensors").read_bytes() == trained.read_bytes()
    card = (merged.parent / "README.md").read_text()
    assert "with the trained adapters merged in" in card and "AutoPeftModel" not in card
    lineage = read_lineage_file(Store.open(merged.parent))
    assert lineage is not None
    assert {"model.safetensors", "adapter/adapter_model.safetensors"} <= {entry.path for entry in lineage.files}
    chain = find_chain(str((result.report_url or "").rpartition("/")[0]))
    checks = {check.link: check for check in verify_chain(chain, TrackingConfig(enabled=False))}
    assert checks["publication"].state == "held", checks["publication"]
    return merged.parent


def write_base(where: Path) -> Path:
    """A new project for a language model in `where`, and beside it in `base` a model that is to be adapted."""
    write_project(where / "project", "causal-language-modeling")
    lines = (where / "project" / "docstrings.jsonl").read_text().splitlines()[:50]
    tokenizer = learn_byte_tokenizer((json.loads(line)["text"] for line in lines), vocabulary=300)
    tokenizer.save_pretrained(where / "base")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    new_causal_model(shape, length=64, vocabulary=300, ends=ends).save_pretrained(where / "base")
    return where / "project"
