"""What each stage adds to the MLflow run of its pipeline: called by the flow, also for a cached stage.

So every run is whole. The model is logged once it is described (`tasks.stage.logged_models`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tasks.stage.facts import PrepareFacts, PublishFacts, TrainFacts
from tasks.stage.gates import GateVerdict
from tasks.stage.goodput import Goodput
from tasks.stage.manifest import StageManifest
from tasks.stage.retry import Ledger
from tasks.tracking import TrackedRun

_ARTIFACT_BYTES = 64 << 20
"""Files of an evaluation larger than this stay on the storage alone."""


def track_stage(run: TrackedRun, manifest: StageManifest, *, step: int) -> None:
    """Log what every stage has: its key as a tag, and its metrics.

    Args:
        step: the optimizer step that the metrics belong to.
    """
    tags = {f"trainflow.{manifest.stage}": manifest.key[:16]}
    if manifest.batch_halvings:
        text = f"memory ran out: batch halved {manifest.batch_halvings} times"
        # "rung" is the tag's name since the first version.
        tags[f"trainflow.{manifest.stage}.rung"] = text
    run.set_tags(tags)
    # Measured at its commit: a later command that logs the stage again repeats the very same points.
    time_ms = int(datetime.fromisoformat(manifest.created).timestamp() * 1000) if manifest.created else None
    run.log_metrics(flatten_metrics(manifest.metrics), step, time_ms=time_ms)


def track_splits(run: TrackedRun, manifest: StageManifest[PrepareFacts], ran: bool) -> None:
    """Log every prepared split as an input dataset of the run."""
    for name, split in manifest.facts.splits.items():
        run.log_dataset(
            name=name,
            url=manifest.store().url,
            digest=manifest.content_digest,
            context=name,
            schema=split.columns,
            profile={"rows": split.rows},
        )


def track_training(run: TrackedRun, manifest: StageManifest[TrainFacts], ran: bool) -> None:
    """Log where the time of the training went, unless another run has it."""
    facts = manifest.facts
    if ran or facts.tracked_run == run.handle.token:
        figures = Goodput.of(Ledger(manifest.store())).metrics() | ({} if facts.mfu is None else {"mfu": facts.mfu})
        run.log_metrics(figures, facts.global_step or 0)


def track_evaluation(run: TrackedRun, manifest: StageManifest, ran: bool) -> None:
    """Log the files of an evaluation (reports, figures) as artifacts."""
    for entry in manifest.files:
        if entry.size <= _ARTIFACT_BYTES:
            run.log_file(manifest.store().read_bytes(entry.path), f"evaluate/{entry.path}")


def track_publication(run: TrackedRun, manifest: StageManifest[PublishFacts], ran: bool) -> None:
    """Tag the run with the address, the revision and the content digest of the publication."""
    facts = manifest.facts
    tags = {"url": facts.published_url, "revision": facts.revision, "digest": facts.published_digest}
    run.set_tags({f"trainflow.published_{name}": value for name, value in tags.items()})


def track_gates(run: TrackedRun, verdict: GateVerdict) -> None:
    """Tag the run with the verdict on what the spec requires of its evaluation."""
    run.set_tags({"trainflow.gate": str(verdict)})


def flatten_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as MLflow takes them: those of a split are named ``<split>_<name>``; texts are left out."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{inner}": number for inner, number in flatten_metrics(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat
