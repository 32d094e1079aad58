"""Adapters that a pipeline has trained are published merged into their base model, and as they were beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.lineage_chain import find_chain
from flows.lineage_checks import verify_chain
from tasks.configs import TrackingConfig
from tests.support.model_folders import remove_fetched_code
from tests.support.runs import ran, reason, run
from tests.support.tiny_models import WORDS, bert, tokenizer
from trainer_lib import load_model
from trainer_lib.model_folder.lineage import read_lineage_file
from trainer_lib.storage import Store
from trainer_lib.yaml_text import dump_yaml

# peft asks transformers by the old name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("prefect_server"),
]

OFF = ("predict.enabled=false", "tracking.enabled=false")
NEW = [{"text": "the cat sat"}, {"text": "a red tree"}]


def _project(folder: Path) -> Path:
    """A spec that adapts a small classifier, which lies beside it as `save_pretrained` writes it."""
    folder.mkdir()
    bert(num_labels=2).save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    lines = [f"{one} {other} {WORDS[number % 7]},{number % 2}" for number, (one, other) in enumerate(_pairs())]
    (folder / "lines.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    base = str(folder / "base")  # an absolute path, which load_model finds from anywhere
    spec: dict[str, Any] = {
        "name": "adapted",
        "recipe": "text-classification",
        "storage": "store",
        "prepare": {"sources": ["lines.csv"], "options": {"text": "text", "label": "label", "folder": base}},
        "train": {
            "model": {"folder": base, "lora": {"r": 2}},
            "args": {"max_steps": 12, "learning_rate": 5e-2, "save_strategy": "no", "use_cpu": True},
        },
        "evaluate": {"splits": ["test"]},
        "publish": {"merge_adapters": True},
    }
    (folder / "pipeline.yaml").write_text(dump_yaml(spec))
    return folder


def _pairs() -> list[tuple[str, str]]:
    return [(one, other) for one in WORDS[:6] for other in WORDS[6:14]]


def _published(folder: Path) -> Path:
    return max((folder / "store" / "hub" / "adapted" / "revisions").iterdir())


def test_merged_weights_are_published_with_the_adapters_beside_them_and_lineage_has_both(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = _project(tmp_path / "project")
    run(folder, *OFF).raise_for_error()
    published = _published(folder)
    assert not list(published.glob("adapter_*"))
    assert not list((folder / "store" / "stages" / "push-to-hub").glob("*/merged"))
    [trained] = (folder / "store" / "stages" / "train").glob("*/model/adapter_model.safetensors")
    assert (published / "adapter" / "adapter_model.safetensors").read_bytes() == trained.read_bytes()
    # Plain transformers, without peft and without the base: what the adapters give.
    shutil.move(folder / "base", folder / "away")
    plain = AutoModelForSequenceClassification.from_pretrained(published)
    batch = AutoTokenizer.from_pretrained(folder / "away")([each["text"] for each in NEW], return_tensors="pt")
    with torch.no_grad():
        merged = plain.eval()(**batch).logits.softmax(-1)
    shutil.move(folder / "away", folder / "base")
    [recorded] = (folder / "store" / "runs").iterdir()
    for address in (published, recorded):
        scores = load_model(str(address), trust_code=True).predict(NEW)["scores"]
        assert np.allclose(merged.numpy(), np.stack(list(scores)), atol=1e-5), address
    remove_fetched_code()
    card = (published / "README.md").read_text()
    assert "BertForSequenceClassification.from_pretrained" in card and "AutoPeftModel" not in card
    assert "with the trained adapters merged in" in card
    assert 'load_file("model.safetensors")' in card
    lineage = read_lineage_file(Store.open(published))
    assert lineage is not None
    digests = {entry.path: entry.sha256 for entry in lineage.files}
    assert {"model.safetensors", "adapter/adapter_model.safetensors"} <= digests.keys()
    checks = {each.link: each for each in verify_chain(find_chain(str(recorded)), TrackingConfig(enabled=False))}
    assert checks["publication"].state == "held", checks["publication"]
    commit = json.loads((trained.parent.parent / "COMMIT.json").read_text())
    committed = {entry["path"]: entry["sha256"] for entry in commit["files"]}
    assert committed["model/adapter_model.safetensors"] == digests["adapter/adapter_model.safetensors"]
    # The setting belongs to the publication alone.
    assert ran(run(folder, *OFF)) == set()
    again = run(folder, *OFF, "publish.merge_adapters=false")
    again.raise_for_error()
    assert ran(again) == {"push-to-hub"}
    assert "merge_adapters" in reason(again, "push-to-hub")
    second = _published(folder)
    assert (second / "adapter_model.safetensors").exists() and not (second / "model.safetensors").exists()
