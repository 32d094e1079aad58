"""The examples: honest splits, complete coverage, measures that mean what they say, and scripts ported by an import."""

from __future__ import annotations

import ast
import bz2
import json
import math
import runpy
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.repository import ROOT
from trainer_lib import EvalPrediction
from trainer_lib.errors import DataError
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.storage import Store
from trainflow.flows.spec.spec import load_spec

MODULES = ["abc", "ast", "base64", "bdb", "bisect", "calendar", "cmd", "code", "copy", "csv", "dis", "enum", "io"]
SHARES = {"validation": 0.1, "test": 0.2}
OPTIONS = {"vocab_size": 400, "block_tokens": 16, "seed": 30}
SCRIPT = ROOT / "examples" / "seq2seq_t5" / "train.py"


def _recipe(name: str) -> Recipe:
    return load(ROOT / "examples" / name / "recipe.py", ROOT)


def _prepared(recipe: Recipe, options: dict[str, Any], folder: Path) -> tuple[dict[str, list[Any]], DataInfo]:
    out = PrepareOutput(Store.open(folder))
    splits = {name: list(rows) for name, rows in recipe.prepare(options, out).items()}
    files = [vars(entry) for entry in out.files()]
    described = {name: {"rows": len(rows)} for name, rows in splits.items()}
    return splits, DataInfo({"url": str(folder), "info": out.checked_info(), "splits": described, "files": files})


# -------------------------------------------------------------------------------------------------------- digits


def test_digits_splits_share_no_scan_keep_the_classes_proportions_and_depend_on_the_seed_only(tmp_path: Path) -> None:
    recipe, chosen = _recipe("digits"), []
    for number, seed in enumerate((0, 0, 1)):
        splits, data = _prepared(recipe, {**SHARES, "seed": seed}, tmp_path / str(number))
        chosen.append([row["row_id"] for row in splits["test"]])
    assert chosen[0] == chosen[1] != chosen[2]
    assert sorted([row["row_id"] for rows in splits.values() for row in rows]) == list(range(1797))
    for name, share in (("train", 0.7), *SHARES.items()):
        counts = np.bincount([row["label"] for row in splits[name]], minlength=10)
        assert counts == pytest.approx(share * 179.7, rel=0.1)
    # Predictions name the class and a probability.
    logits = np.zeros((1, 10), dtype=np.float32)
    logits[0, 7] = math.log(9.0)
    columns = recipe.prediction_columns(logits, data)
    assert columns["prediction"] == ["7"]
    assert columns["confidence"] == pytest.approx([0.5])
    # The network treats every sample alone.
    torch.manual_seed(0)
    model = recipe.build_model({"width": 8, "dropout": 0.5}, data).eval()
    pixels = torch.rand(4, 1, 8, 8)
    together, alone = model(pixels)["logits"], torch.cat([model(pixel[None])["logits"] for pixel in pixels])
    torch.testing.assert_close(together, alone)


def test_digits_divided_over_processes_are_the_same_digits() -> None:
    whole = load_spec(ROOT / "examples" / "digits" / "pipeline.yaml").model_dump()
    divided = load_spec(ROOT / "examples" / "digits" / "fsdp.yaml").model_dump()
    assert divided["train"]["args"].pop("fsdp") == "full_shard"
    assert divided["train"]["args"].pop("fsdp_config")
    assert divided["train"]["launch"].pop("processes") == 2
    assert whole["train"]["launch"].pop("processes") == 1
    assert {name for name in whole if whole[name] != divided[name]} == {"name"}


def test_digits_collate_scales_the_ink_and_does_without_labels() -> None:
    recipe = _recipe("digits")
    assert recipe.collate is not None
    scan = np.full((8, 8), 16, dtype=np.uint8)
    batch = recipe.collate([{"row_id": 0, "pixels": scan, "label": 3}, {"row_id": 1, "pixels": scan // 2, "label": 4}])
    assert batch["pixels"].shape == (2, 1, 8, 8)
    assert batch["pixels"][:, 0, 0, 0].tolist() == [1.0, 0.5]
    assert batch["labels"].tolist() == [3, 4]
    assert set(recipe.collate([{"row_id": 0, "pixels": scan}])) == {"pixels"}


# ----------------------------------------------------------------------------------------------------- stdlib_lm
@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library, with everything that must be left out."""
    root = tmp_path / "lib"
    for name in MODULES:
        text = f'"""Module {name}: naïve."""\n' + f"def {name}(x):\n    return x + {len(name)}\n\n" * 20
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text(text, encoding="utf-8")
    for name in ("test/a.py", "abc/tests/b.py", "encodings/c.py", "site-packages/d.py", "_sysconfigdata_x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("secret = 1\n" * 50)
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(root)}.__getitem__)
    return root


def test_stdlib_modules_are_held_out_whole_and_their_bytes_are_covered_once(library: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    recipe = _recipe("stdlib_lm")
    splits, data = _prepared(recipe, OPTIONS, tmp_path)
    corpus = data.info["corpus"]
    assert sum(split["files"] for split in corpus.values()) == len(MODULES)
    assert all(split["files"] for split in corpus.values())
    total = sum((library / name / "__init__.py").stat().st_size for name in MODULES)
    assert sum(split["bytes"] for split in corpus.values()) == total
    assert recipe.collate is not None
    token_bytes = np.frombuffer(data.read_file("token_bytes.bin"), dtype=np.uint16)
    for name, rows in splits.items():
        labels = recipe.collate(rows)["labels"].numpy()
        assert token_bytes[labels[labels >= 0]].sum() == corpus[name]["bytes"]
        assert [row["tokens"][-1] for row in rows[:-1]] == [row["tokens"][0] for row in rows[1:]]
    # Compressors see the same bytes.
    tokenizer = Tokenizer.from_str(data.read_file("tokenizer.json").decode())
    tokens = [int(token) for row in splits["test"] for token in row["tokens"][1 : row["num_targets"] + 1]]
    text = tokenizer.decode(tokens).encode()  # the separators decode to nothing
    assert data.info["compressors"]["test"]["bz2"] == 8 * len(bz2.compress(text, 9)) / len(text)


def test_stdlib_bits_per_byte_are_those_of_the_models_distribution(library: Path, tmp_path: Path) -> None:
    recipe = _recipe("stdlib_lm")
    splits, data = _prepared(recipe, OPTIONS, tmp_path)
    assert recipe.collate is not None and recipe.preprocess_logits_for_metrics is not None
    assert recipe.compute_metrics is not None
    model = recipe.build_model({"width": 16, "layers": 1, "heads": 2}, data)
    nn.init.zeros_(model.get_parameter("tokens.weight"))  # every next token is as likely as any other
    kept = []
    for start in range(0, len(splits["test"]), 3):
        batch = recipe.collate(splits["test"][start : start + 3])
        outputs = model(**batch)
        logits = outputs["logits"].detach(), outputs["target_bytes"]
        kept.append(recipe.preprocess_logits_for_metrics(logits, batch["labels"]).numpy())
    metrics = recipe.compute_metrics(EvalPrediction(predictions=np.concatenate(kept), label_ids=None))
    targets = sum(row["num_targets"] for row in splits["test"])
    expected = targets * math.log2(data.info["vocab_size"]) / data.info["corpus"]["test"]["bytes"]
    assert metrics["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert metrics["bytes"] == data.info["corpus"]["test"]["bytes"]


def test_stdlib_attention_looks_back_only_and_samples_the_curve_and_the_compressors_come_afterwards(
    library: Path, tmp_path: Path
) -> None:
    recipe = _recipe("stdlib_lm")
    _, data = _prepared(recipe, OPTIONS, tmp_path)
    torch.manual_seed(0)
    model = recipe.build_model({"width": 16, "layers": 2, "heads": 2}, data)
    ids = torch.randint(data.info["vocab_size"], (1, 16))
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % data.info["vocab_size"]
    before, after = model(ids)["logits"], model(changed)["logits"]
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])
    data.history = [{"step": 10, "eval_bits_per_byte": 3.0}, {"step": 20, "eval_bits_per_byte": 2.5}, {"step": 20}]
    assert recipe.after_evaluate is not None
    options = {"prompts": ["def f(x):\n", "import "], "sample_tokens": 20}
    first, again = (recipe.after_evaluate(model, data, options) for _ in range(2))
    assert first == again
    assert first["files"]["samples.txt"].startswith(b"def f(x):\n") and b"import " in first["files"]["samples.txt"]
    assert b"<svg" in first["files"]["curve.svg"]
    assert set(first["metrics"]) == {f"{c}_bits_per_byte_{s}" for c in ("bz2", "xz") for s in ("test", "validation")}


def test_stdlib_a_seed_that_holds_nothing_out_is_refused(library: Path, tmp_path: Path) -> None:
    for name in MODULES[1:]:
        (library / name / "__init__.py").unlink()
    with pytest.raises(DataError, match=r"prepare\.options\.seed"):
        _prepared(_recipe("stdlib_lm"), OPTIONS, tmp_path)


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


def test_seq2seq_trains_evaluates_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(SCRIPT))
    numbers = {0: "zero", 13: "thirteen", 4071: "four thousand seventy one", 9900: "nine thousand nine hundred"}
    assert {number: example["words"](number) for number in numbers} == numbers
    tokenizer = example["build_tokenizer"]()
    assert tokenizer.decode(tokenizer("4071").input_ids) == "4 0 7 1 </s>"
    assert tokenizer.unk_token_id not in tokenizer(example["words"](8765)).input_ids
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output_dir", str(tmp_path / "out"), "--epochs", "0.2"])
    metrics = example["main"]()
    assert metrics["eval_loss"] < 4
    assert 0 <= metrics["eval_exact_match"] <= 1
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert len([line for line in capsys.readouterr().out.splitlines() if " -> " in line]) == 5
    # Only the import tells it from a script for transformers.
    ours = [line for line in SCRIPT.read_text(encoding="utf-8").splitlines() if "trainer_lib" in line]
    assert ours == ["from trainer_lib import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments"]


# -------------------------------------------------------------------------------------------------- conversations
def test_what_is_asked_in_held_out_words_was_learned_in_others_and_pairs_are_right_over_wrong() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "conversations" / "learn.py"))
    rows = example["chats"]()
    folds: dict[str, dict[str, str]] = {}
    for row in rows:
        asked, answered = (turn["content"] for turn in row["messages"])
        assert folds.setdefault(row["fold"], {}).setdefault(asked, answered) == answered
    assert {name: len(fold) for name, fold in folds.items()} == {
        name: share * len(folds["test"]) for name, share in (("train", 4), ("validation", 1), ("test", 1))
    }
    for name, (module, parameter) in example["functions"]().items():
        for fold in folds.values():
            assert {module, parameter} <= {answer for asked, answer in fold.items() if f" {name}" in f" {asked}"}
    assert not set(folds["test"]) & {*folds["train"], *folds["validation"]}
    said = ["", *(row["messages"][1]["content"] for row in rows[1:-1]), "wrong"]
    made = list(example["pairs"](rows, said))
    assert made[-1]["rejected"][0]["content"] == "wrong"
    assert all(pair["chosen"] == row["messages"][1:] != pair["rejected"] for pair, row in zip(made, rows, strict=True))
