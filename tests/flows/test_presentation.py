"""What the closing summary shows of a run."""

from __future__ import annotations

from flows.cli.presentation import summary, where
from flows.results import PipelineResult, StageOutcome
from flows.stages import find_stage
from tasks.stage.facts import PublishFacts
from tasks.stage.manifest import StageManifest

REVISION = "https://huggingface.co/me/toy/tree/0f3a"


def test_the_published_revision_is_shown_not_only_its_repository() -> None:
    stage = find_stage("publish")
    assert stage is not None
    facts = PublishFacts("hf://me/toy", REVISION, "0f3a", "d" * 64)
    manifest = StageManifest("push-to-hub", "", "store/stages/push-to-hub/0123", "", facts=facts)
    outcome = StageOutcome("push-to-hub", "ran", "forced", 1.0, manifest.to_dict(), stage.places(manifest))
    result = PipelineResult("toy", "key", "store", [outcome])
    assert where(result)["published"] == REVISION
    assert any(REVISION in line.plain for line in summary(result, ["trainflow", "ui"]))
