"""`trainflow prove-resume`: equal runs are proved equal, a lost state is found and named, the storage stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.prove_resume import seal_holds
from tests.support import toy
from tests.support.command import trainflow

# What no checkpoint holds: a number that the model counts up by itself.
FORGETFUL = toy.RECIPE.replace("self.linear = torch.nn.Linear(1, 1)", "self.linear = torch.nn.Linear(1, 1); self.n = 0")
FORGETFUL = FORGETFUL.replace("y = self.linear(", "self.n += self.training; y = (1 + 0.01 * self.n) * self.linear(")


def test_equal_runs_are_proved_and_the_verdict_is_sealed(tmp_path: Path) -> None:
    spec, verdict = toy.project(tmp_path), tmp_path / "verdict.json"
    done = trainflow("prove-resume", spec, "train.launch.processes=1", "--kill", "--at", "7", "-o", verdict)
    assert done.code == 0, done.err
    assert "equal  toy: 8 steps, stopped by SIGKILL after step 7, resumed from 4" in done.out
    found: dict[str, Any] = json.loads(verdict.read_text())
    assert (found["verdict"], found["resumed_from"], found["compared"]["checkpoints"]) == ("equal", 4, [4, 8])
    assert found["compared"]["steps"] == found["compared"]["learning_rates"] == 8
    assert {"model.safetensors", "optimizer.safetensors", "rng/rank-00000.json"} <= set(found["compared"]["states"])
    assert list(found["source"]) == ["recipe.py:build_model"]  # what train reaches in the recipe
    assert seal_holds(found) and not seal_holds({**found, "steps": 9})
    assert not (tmp_path / "store").exists()


def test_a_state_that_is_lost_is_found_and_named(tmp_path: Path) -> None:
    spec = toy.project(tmp_path, recipe=FORGETFUL)
    done = trainflow("prove-resume", spec, "--steps", "4", "--at", "2", "--json", "--keep", tmp_path / "kept")
    assert done.code == 20, done.err
    answer = json.loads(done.out)
    assert (answer["ok"], answer["exit_code"]) == (False, 20)
    found = answer["proof"]
    assert found["verdict"] == "different" and found["repeatable"] and seal_holds(found)
    first = found["first_difference"]
    assert (first["step"], first["what"]) == (3, "loss") and first["whole"] != first["resumed"]
    assert "optimizer.safetensors: linear.weight/exp_avg" in [each["what"] for each in found["differences"]]
    assert sorted(path.name for path in (tmp_path / "kept" / "whole" / "checkpoints").iterdir()) == ["checkpoint-4"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--at", "8"], "--at = 8"),
        (["--at", "4", "--steps", "4"], "Name a step from 1 to 3."),
        (["train.args.save_only_model=true"], "train.args.save_only_model = True"),
        (["--keep", "."], "is not empty."),
    ],
)
def test_what_cannot_be_proved_is_refused_before_anything_starts(
    arguments: list[str], expected: str, tmp_path: Path
) -> None:
    done = trainflow("prove-resume", toy.project(tmp_path), *arguments, cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err and "Traceback" not in done.err
