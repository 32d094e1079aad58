"""What `why` says before a run is what the run then does."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.plan import Plan
from flows.spec import checks
from flows.spec.spec import load_spec
from tasks.stage.facts import TrainFacts
from tasks.stage.manifest import StageManifest
from tasks.stage.runner import StageAttempt, StageOutput, run_stage
from tests.support.planned_edits import FACTS, SPEC, compare_plans_with_runs
from tests.support.recipe_edits import ENTRIES


# tests/flows/test_random_edits.py has more of them.
def test_the_plan_is_what_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The random functions take one argument; how a recipe's functions are called is not the question here.
    monkeypatch.setattr(checks, "check_definitions", lambda *_, **__: None)
    assert compare_plans_with_runs(tmp_path, seed=0, most=4) == 4


def test_the_curve_of_a_training_that_is_not_made_yet_is_no_difference(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pipeline.yaml").write_text(SPEC)
    recipe = "".join(f"def {name}(*given): ...\n" for name in (*ENTRIES, "after_evaluate"))
    (tmp_path / "recipe.py").write_text(recipe)
    first = Plan.of(load_spec(tmp_path / "pipeline.yaml"))
    manifests: dict[str, StageManifest] = {}
    for name in ("prepare-data", "train", "evaluate"):

        def work(attempt: StageAttempt, name: str = name) -> StageOutput:
            written = attempt.store.write_bytes("output", name.encode())
            facts = TrainFacts(metrics_code="0" * 64) if name == "train" else FACTS[name]
            return StageOutput([written], facts=facts)

        manifests[name] = run_stage(first.key_of(name, manifests), first.context, work)
    (tmp_path / "pipeline.yaml").write_text(SPEC.replace("use_cpu: true", "use_cpu: true, learning_rate: 1.0e-4"))
    evaluate = Plan.of(load_spec(tmp_path / "pipeline.yaml")).reasons["evaluate"]
    assert not any(each.field == "history" for each in evaluate.differences), evaluate
    assert not evaluate.certain
