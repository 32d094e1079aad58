"""Training on an XLA device: torch_xla's CPU client, in an environment of its own (CONTRIBUTING.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.xla import run_cases

pytestmark = pytest.mark.needs("xla")
_RESUMED = ("resume", "resume_bf16", "resume_syncfree")
_TOGETHER = (*_RESUMED, "other_dropout", "equal_cpu", "save", "compiled_graphs", "refusals")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def answers(output: Path) -> dict[str, Any]:
    return run_cases(output, *_TOGETHER)


@pytest.mark.parametrize("case", _RESUMED)
def test_a_resumed_training_equals_an_uninterrupted_one(case: str, answers: dict[str, Any]) -> None:
    answer = answers[case]
    assert (answer["device"], answer["weights"], answer["random"]) == ("xla", True, True)
    assert answer["losses"][0] == answer["losses"][1]
    assert len(answer["losses"][0]) == 6


def test_the_default_optimizer_is_not_fused_and_a_line_says_so(answers: dict[str, Any], output: Path) -> None:
    assert answers["resume"]["fused"] == [None, None]
    assert "torch's fused AdamW does not serve XLA devices" in (output / "log").read_text(encoding="utf-8")


def test_the_seed_reaches_dropout_on_the_device(answers: dict[str, Any]) -> None:
    assert answers["other_dropout"]


def test_training_evaluation_and_prediction_equal_those_of_the_cpu(answers: dict[str, Any]) -> None:
    answer = answers["equal_cpu"]
    assert answer["predicted"] == [22, 2]
    assert max(answer["weights"], answer["eval_loss"], answer["logits"]) < 1e-4


def test_every_weight_is_saved_and_tied_ones_stay_tied(answers: dict[str, Any]) -> None:
    """XLA's tensors have no addresses: weights of one shape were taken for one, and all but the first were lost."""
    answer = answers["save"]
    names = ["first.bias", "first.weight", "head.bias", "head.weight", "second.bias", "second.weight", "third.bias"]
    assert answer == {"tied": True, "names": [names, names], "equal": [True, True], "trained": True}


def test_steps_and_batches_are_compiled_once(answers: dict[str, Any]) -> None:
    first, second, third, evaluated, again = answers["compiled_graphs"]
    assert first > 0
    assert second == third
    assert evaluated == again


def test_what_xla_devices_do_not_serve_is_refused(answers: dict[str, Any]) -> None:
    refused = answers["refusals"]
    assert "torch's FSDP does not serve XLA devices" in refused["fsdp"]
    assert "compiles every step by itself" in refused["torch_compile"]
    assert "float16 is not supported on XLA" in refused["fp16"]


def test_several_processes_are_refused(tmp_path: Path) -> None:
    answer = run_cases(tmp_path, "device", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    assert "XLA serves one process only" in answer["device"]


def test_replicas_of_torch_xlas_launcher_are_refused(tmp_path: Path) -> None:
    answers = run_cases(tmp_path, "launched", CPU_NUM_DEVICES="2")["launched"]
    assert len(answers) == 2
    assert all("XLA serves one process only" in each for each in answers)
