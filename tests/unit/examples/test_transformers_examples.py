"""The examples written for the Trainer of transformers, ported by their import line only."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import pytest

from tests.support.repository import ROOT


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "examples" / name / "train.py"
    monkeypatch.setattr("sys.argv", [str(script), "--output_dir", str(folder), "--max_steps", "4"])
    runpy.run_path(str(script), run_name="__main__")


def test_the_text_classifier_trains_and_its_folder_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("text_classification", tmp_path, monkeypatch)
    assert "is from" in capsys.readouterr().out.splitlines()[-1]
    assert 0 < json.loads((tmp_path / "all_results.json").read_text())["eval_accuracy"] <= 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_adapters_train_and_their_folder_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("causal_lm_lora", tmp_path, monkeypatch)
    assert "perplexity" in capsys.readouterr().out
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("name", ["text_classification", "causal_lm_lora"])
def test_what_the_examples_take_from_us_is_what_transformers_offers(name: str) -> None:
    import transformers

    tree = ast.parse((ROOT / "examples" / name / "train.py").read_text(encoding="utf-8"))
    ours = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "trainer_lib"]
    assert len(ours) == 1
    assert all(hasattr(transformers, alias.name) for alias in ours[0].names)
