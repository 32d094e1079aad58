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


def test_a_metric_is_shown_with_its_interval_and_a_count_in_full() -> None:
    measured = {"test_accuracy": 0.95, "test_accuracy_low": 0.9312, "test_accuracy_high": 0.97, "test_words": 12345}
    manifest = {"metrics": {"test": {**measured, "test_runtime": 3.0}}}
    result = PipelineResult("p", "k", "s", [StageOutcome("evaluate", "ran", "why", manifest=manifest)])
    shown = "\n".join(line.plain for line in summary(result, ["trainflow", "ui"]))
    assert "  test         accuracy 0.95 (0.9312 to 0.97)  words 12,345\n" in shown
