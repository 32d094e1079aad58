"""What `why` says before a run is what the run then does, over many random edits of a recipe in one storage."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from flows.plan import Plan
from flows.spec import checks
from flows.spec.spec import load_spec
from tasks.stage import manifest as _manifests
from tasks.stage.facts import EvaluateFacts, PredictFacts, PrepareFacts, PublishFacts, StageFacts, TrainFacts
from tasks.stage.manifest import StageManifest
from tasks.stage.publication import publication_target
from tasks.stage.runner import StageAttempt, StageOutput, run_stage
from tests.support.recipe_edits import ENTRIES, STAGES, Project, edit, make_project, run_stages, write
from trainer_lib.hub.base import Content
from trainer_lib.hub.transport import open_hub

SPEC = "name: edits\nrecipe: recipe.py\nstorage: store\ntrain: {args: {use_cpu: true}}\n"
FACTS: dict[str, StageFacts] = {
    "prepare-data": PrepareFacts({}),
    "train": TrainFacts(),
    "evaluate": EvaluateFacts(),
    "predict": PredictFacts(1, "test"),
}


def publish(plan: Plan) -> PublishFacts:
    """Publish one file below the storage."""
    to = publication_target(plan.spec.publish, plan.context)
    done = open_hub(to).publish(Content({}, {"README.md": b"published"}), message="again")
    return PublishFacts(done.target, done.url, done.revision, done.content_digest, done.created)


def run(plan: Plan, outputs: dict[str, str | None]) -> dict[str, tuple[bool, str]]:
    """Run the plan's stages, each of which writes what the recipe really gives: stage -> (whether it ran, why)."""
    manifests: dict[str, StageManifest] = {}
    done: dict[str, tuple[bool, str]] = {}
    for name, planned in plan.stages.items():
        ran: list[str] = []
        inspect = partial(planned.stage.inspect, planned.config, plan.context)

        def work(attempt: StageAttempt, name: str = name, ran: list[str] = ran) -> StageOutput:
            ran.append(name)
            written = attempt.store.write_bytes("output", (outputs.get(name) or "published").encode())
            return StageOutput([written], facts=publish(plan) if name == "push-to-hub" else FACTS[name])

        manifests[name] = run_stage(plan.key_of(name, manifests), plan.context, work, inspect=inspect)
        done[name] = (bool(ran), manifests[name].reason)
        if name in outputs:
            kept = manifests[name].store().read_bytes("output").decode()
            assert kept == outputs[name], f"{name} kept what another recipe made"
    return done


def outputs_of(project: Project) -> dict[str, str | None] | None:
    """What each stage gives; None where one of them fails."""
    found = {stage: ran.output for stage, ran in run_stages(project.sources()).items()}
    return found if len(found) == len(STAGES) and None not in found.values() else None


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_what_the_run_does(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The random functions take one argument; how a recipe's functions are called is not the question here.
    monkeypatch.setattr(checks, "check_definitions", lambda *_, **__: None)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pipeline.yaml").write_text(SPEC)
    draw = random.Random(seed)
    project = make_project(draw)
    while outputs_of(project) is None:
        project = make_project(draw)
    edits = 0
    for _ in range(60):
        changed, what = edit(project, draw)
        outputs = outputs_of(changed)
        if outputs is None or edits == 12:
            continue
        edits, project = edits + 1, changed
        write(tmp_path, project.sources())
        if edits % 4 == 0:
            what = "the publication is damaged"
            for file in tmp_path.glob("store/hub/*/revisions/*/README.md"):
                file.write_bytes(b"p")
        _manifests._verified.clear()
        plan = Plan.of(load_spec(tmp_path / "pipeline.yaml"))
        planned = dict(plan.reasons)
        for name, (ran, reason) in run(plan, outputs).items():
            told = planned[name]
            assert told.hit == (not ran) or not told.certain, f"{what}: {name} {told}"
            if ran and told.key is not None:
                assert told.reason == reason, what
        assert all(each.hit for each in Plan.of(load_spec(tmp_path / "pipeline.yaml")).reasons.values()), what
    assert edits > 4


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
