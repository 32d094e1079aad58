"""Random edits of a recipe in one storage: what a plan says before each run, beside what the run then does."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

from flows.plan import Plan
from flows.spec.spec import load_spec
from tasks.stage import manifest as _manifests
from tasks.stage.facts import EvaluateFacts, PredictFacts, PrepareFacts, PublishFacts, StageFacts, TrainFacts
from tasks.stage.manifest import StageManifest
from tasks.stage.publication import publication_target
from tasks.stage.runner import StageAttempt, StageOutput, run_stage
from tests.support.recipe_edits import STAGES, Project, edit, make_project, run_stages, write
from trainer_lib.hub.base import Content
from trainer_lib.hub.transport import open_hub

SPEC = "name: edits\nrecipe: recipe.py\nstorage: store\ntrain: {args: {use_cpu: true}}\n"
FACTS: dict[str, StageFacts] = {
    "prepare-data": PrepareFacts({}),
    "train": TrainFacts(),
    "evaluate": EvaluateFacts(),
    "predict": PredictFacts(1, "test"),
}


def _publish(plan: Plan) -> PublishFacts:
    """Publish one file below the storage."""
    to = publication_target(plan.spec.publish, plan.context)
    done = open_hub(to).publish(Content({}, {"README.md": b"published"}), message="again")
    return PublishFacts(done.target, done.url, done.revision, done.content_digest, done.created)


def _run(plan: Plan, outputs: dict[str, str | None]) -> dict[str, tuple[bool, str]]:
    """Run the plan's stages, each of which writes what the recipe really gives: stage -> (whether it ran, why)."""
    manifests: dict[str, StageManifest] = {}
    done: dict[str, tuple[bool, str]] = {}
    for name, planned in plan.stages.items():
        ran: list[str] = []
        inspect = partial(planned.stage.inspect, planned.config, plan.context)

        def work(attempt: StageAttempt, name: str = name, ran: list[str] = ran) -> StageOutput:
            ran.append(name)
            written = attempt.store.write_bytes("output", (outputs.get(name) or "published").encode())
            return StageOutput([written], facts=_publish(plan) if name == "push-to-hub" else FACTS[name])

        manifests[name] = run_stage(plan.key_of(name, manifests), plan.context, work, inspect=inspect)
        done[name] = (bool(ran), manifests[name].reason)
        if name in outputs:
            kept = manifests[name].store().read_bytes("output").decode()
            assert kept == outputs[name], f"{name} kept what another recipe made"
    return done


def _outputs_of(project: Project) -> dict[str, str | None] | None:
    """What each stage gives; None where one of them fails."""
    found = {stage: ran.output for stage, ran in run_stages(project.sources()).items()}
    return found if len(found) == len(STAGES) and None not in found.values() else None


def compare_plans_with_runs(folder: Path, seed: int, most: int) -> int:
    """Edit a random recipe up to `most` times; before each run compare what is planned, and return the edits made.

    Raises:
        AssertionError: a run did something else than its plan.
    """
    (folder / "pyproject.toml").write_text("")
    (folder / "pipeline.yaml").write_text(SPEC)
    draw = random.Random(seed)
    project = make_project(draw)
    while _outputs_of(project) is None:
        project = make_project(draw)
    edits = 0
    for _ in range(60):
        if edits == most:
            break
        changed, what = edit(project, draw)
        outputs = _outputs_of(changed)
        if outputs is None:
            continue
        edits, project = edits + 1, changed
        write(folder, project.sources())
        if edits % 4 == 0:
            what = "the publication is damaged"
            for file in folder.glob("store/hub/*/revisions/*/README.md"):
                file.write_bytes(b"p")
        _manifests._verified.clear()
        plan = Plan.of(load_spec(folder / "pipeline.yaml"))
        planned = dict(plan.reasons)
        for name, (ran, reason) in _run(plan, outputs).items():
            told = planned[name]
            assert told.hit == (not ran) or not told.certain, f"{what}: {name} {told}"
            if ran and told.key is not None:
                assert told.reason == reason, what
        assert all(each.hit for each in Plan.of(load_spec(folder / "pipeline.yaml")).reasons.values()), what
    return edits
