"""What the closing summary shows of a run."""

from __future__ import annotations

from typing import Any

from flows.cli.presentation import summary, where
from flows.results import PipelineResult, StageOutcome

REVISION = "https://huggingface.co/me/toy/tree/0f3a"


def published(meta: dict[str, Any]) -> PipelineResult:
    manifest = {"url": "store/stages/push-to-hub/0123", "files": [], "metrics": {}, "meta": meta}
    return PipelineResult("toy", "key", "store", [StageOutcome("push-to-hub", "ran", "forced", 1.0, manifest)])


def test_the_published_revision_is_shown_not_only_its_repository() -> None:
    result = published({"published_url": REVISION, "target": "hf://me/toy"})
    assert where(result)["published"] == REVISION
    assert any(REVISION in line.plain for line in summary(result, ["trainflow", "ui"]))


def test_a_publication_without_an_address_is_shown_by_its_target() -> None:
    assert where(published({"target": "hf://me/toy"}))["published"] == "hf://me/toy"
    assert where(published({}))["published"] == "store/stages/push-to-hub/0123"
