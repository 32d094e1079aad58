"""The example that generates: its script runs as a user runs it, and is ported by its import alone."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT

SCRIPT = ROOT / "examples" / "seq2seq_t5" / "train.py"


@pytest.fixture
def example() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_numbers_are_read_in_english(example: dict[str, Any]) -> None:
    words = example["words"]
    assert words(0) == "zero"
    assert words(13) == "thirteen"
    assert words(4071) == "four thousand seventy one"
    assert words(9900) == "nine thousand nine hundred"
    tokenizer = example["build_tokenizer"]()
    assert tokenizer.decode(tokenizer("4071").input_ids) == "4 0 7 1 </s>"
    assert tokenizer.unk_token_id not in tokenizer(words(8765)).input_ids


def test_the_script_trains_evaluates_and_generates(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output_dir", str(tmp_path / "out"), "--epochs", "0.2"])
    metrics = example["main"]()
    assert metrics["eval_loss"] < 4
    assert 0 <= metrics["eval_exact_match"] <= 1
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert len([line for line in capsys.readouterr().out.splitlines() if " -> " in line]) == 5


def test_only_the_import_tells_it_from_a_script_for_transformers() -> None:
    ours = [line for line in SCRIPT.read_text(encoding="utf-8").splitlines() if "trainer_lib" in line]
    assert ours == ["from trainer_lib import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments"]
