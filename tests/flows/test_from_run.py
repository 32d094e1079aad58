"""A run that begins in the middle, with what an earlier run has made before it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.past_runs import list_runs
from flows.plan import Plan, StageReason
from tests.support.runs import broken, ran, reason, run, spec_of
from trainer_lib.errors import ConfigError


def newest(folder: Path) -> str:
    return list_runs(str(folder / "store"))[0].id


def plan(folder: Path, *overrides: str, **how: Any) -> Plan:
    return Plan.of(spec_of(folder, *overrides), **how)


def hits(reasons: Mapping[str, StageReason]) -> set[str]:
    return {name for name, each in reasons.items() if each.hit}


def test_a_failed_run_goes_on_at_its_failed_stage_with_what_it_had_made(folder: Path) -> None:
    sound = (folder / "recipe.py").read_text()
    broken(folder, 'return {"error"', 'return {"error": 1 / 0, "e"')
    assert run(folder, "train.args.learning_rate=1e-2").error is not None
    failed = newest(folder)
    (folder / "recipe.py").write_text(sound.replace("Linear(1, 1)", "Linear(1, 1, bias=True)"))
    ways: tuple[str, ...] = ("train.args.learning_rate=3e-2",)
    planned = plan(folder, *ways, from_run=failed[:6])
    assert planned.start == "evaluate"
    assert hits(planned.reasons) == {"prepare-data", "train"}
    assert planned.reasons["train"].reason.startswith(f"taken from run {failed}, committed ")
    [sentence] = planned.warnings["train"]
    assert sentence.startswith(f"The result of train is that of run {failed}; since then: ")
    assert "build_model changed (recipe.py:" in sentence
    assert "args.learning_rate: 0.01 -> 0.03" in sentence
    assert planned.warnings["prepare-data"] == []

    result = run(folder, *ways, from_run=failed)
    result.raise_for_error()
    assert ran(result) == {"evaluate", "predict", "push-to-hub"}
    assert {each.stage: each.reason for each in result.stages if each.status == "cached"} == {
        name: planned.reasons[name].reason for name in ("prepare-data", "train")
    }
    # What it ran is found again, and a plain run trains with the settings of the spec.
    assert ran(run(folder, *ways, from_run=failed)) == set()
    past = list_runs(str(folder / "store"))[0]
    assert (past.from_run, past.start, past.is_finished) == (failed, "evaluate", True)
    assert not plan(folder, *ways).reasons["train"].hit


def test_a_run_that_changed_nothing_is_the_same_run(folder: Path) -> None:
    finished = newest(folder)
    assert plan(folder, from_run=finished, start="train").pipeline_key == plan(folder).pipeline_key
    other = plan(folder, "train.args.learning_rate=1e-2", from_run=finished, start="evaluate")
    assert other.pipeline_key != plan(folder, "train.args.learning_rate=1e-2").pipeline_key
    assert hits(other.reasons) == set(other.stages), "the model is the same, so is what follows"
    only = run(folder, "predict.rows_per_file=3", "train.args.learning_rate=1e-2", from_run=finished, only="predict")
    assert ran(only) == {"predict"}
    assert reason(only, "train").startswith("taken from run")


def test_what_a_run_does_not_have_is_refused_with_what_to_do(folder: Path) -> None:
    finished = newest(folder)

    def refused(**how: Any) -> ConfigError:
        result = run(folder, **how)
        assert isinstance(result.error, ConfigError)
        assert result.error.exit_code == 2
        assert result.error.remedy
        return result.error

    assert "has finished" in refused(from_run=finished).message
    assert "--from STAGE" in str(refused(from_run=finished).remedy)
    assert f"Did you mean {finished}?" in str(refused(from_run=finished[:-1] + "x").remedy)
    shutil.rmtree(folder / "store" / "stages" / "train")
    gone = refused(from_run=finished, start="evaluate")
    assert gone.message == f"The stage train cannot be taken: its result in run {finished} is gone from the storage."
    assert gone.remedy == "Begin with it: --from train."
    broken(folder, "y = self.linear(x.float())", "raise ValueError('wrong shape')")
    assert run(folder, "name=second").error is not None
    failed = newest(folder)
    assert "a run of the pipeline 'second', and the spec is that of 'toy'" in refused(from_run=failed).message
    missing = run(folder, "name=second", from_run=failed, start="predict").error
    assert missing is not None
    assert missing.message == f"The stage train cannot be taken: run {failed} has no committed result of it."


@pytest.mark.parametrize("stage", ["evaluate"])
def test_a_stage_that_takes_a_later_ones_place_needs_all_its_inputs(folder: Path, stage: str) -> None:
    shutil.rmtree(folder / "store" / "stages" / stage)
    error = run(folder, start="predict").error
    assert isinstance(error, ConfigError)
    assert "evaluate comes before it and has no committed result" in error.message
