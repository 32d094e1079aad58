"""Additions of stages to the MLflow run of their pipeline: called by the flow, also for a cached stage.

So every run is whole. The model is logged once it is described (`trainflow.tasks.model.logged_models`).
"""

from __future__ import annotations

import json
from datetime import datetime

from trainer_lib.base.json_text import parse_json
from trainer_lib.trackers.names import group_log, group_results
from trainflow.tasks.stage.facts import PrepareFacts, PublishFacts, TrainFacts
from trainflow.tasks.stage.goodput import Goodput
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.retry import Ledger
from trainflow.tasks.tracking.mlflow_run import TrackedRun

_ARTIFACT_BYTES = 64 << 20  # files of an evaluation larger than this stay on the storage alone


def track_stage(run: TrackedRun, manifest: StageManifest, *, step: int) -> None:
    """Log what every stage has: its key as a tag, and its metrics in groups, at an optimizer step."""
    tags = {f"trainflow.{manifest.stage}": manifest.key[:16]}
    if manifest.batch_halvings:
        halved = f"memory ran out: batch halved {manifest.batch_halvings} times"
        tags[f"trainflow.{manifest.stage}.batch_halvings"] = halved
    run.set_tags(tags)
    if isinstance(manifest.facts, PrepareFacts):
        return  # numbers of rows: they describe the datasets
    run.log_metrics(group_results(manifest.stage, manifest.metrics), step, time_ms=_committed_ms(manifest))


def _committed_ms(manifest: StageManifest) -> int | None:
    """When a stage was committed: a later command that logs it again repeats the very same points."""
    return int(datetime.fromisoformat(manifest.created).timestamp() * 1000) if manifest.created else None


def track_splits(run: TrackedRun, manifest: StageManifest[PrepareFacts], ran: bool) -> None:
    """Log every prepared split as an input dataset of the run, and its rows as a parameter."""
    run.log_params({"data": {"rows": {name: split.rows for name, split in manifest.facts.splits.items()}}})
    for name, split in manifest.facts.splits.items():
        run.log_dataset(name, manifest.store().url, manifest.content_digest, split.columns, split.rows)


def track_training(run: TrackedRun, manifest: StageManifest[TrainFacts], ran: bool) -> None:
    """Log how much of the time was trained, and how much of the device was used; of another run's training, its curves.

    The page of a run whose training was committed before, as that of a champion may be, shows how it was trained.
    """
    facts = manifest.facts
    if ran or facts.tracked_run == run.handle.token:
        goodput = Goodput.of(Ledger(manifest.store()).records())
        shares = {"train/goodput": goodput.share, "train/mfu": facts.mfu}
        run.log_metrics({name: value for name, value in shares.items() if value is not None}, facts.global_step or 0)
        run.log_file(json.dumps(goodput.metrics(), indent=2), "goodput.json")
        return
    history = manifest.store().read_if_exists("history.json", limit=_ARTIFACT_BYTES)
    for entry in parse_json(history) if history else []:
        numbers = {name: value for name, value in entry.items() if isinstance(value, int | float) and name != "step"}
        run.log_metrics(group_log(numbers), int(entry.get("step", 0)), time_ms=_committed_ms(manifest))


def track_evaluation(run: TrackedRun, manifest: StageManifest, ran: bool) -> None:
    """Log the files of an evaluation (reports, figures) as artifacts."""
    for entry in manifest.files:
        if entry.size <= _ARTIFACT_BYTES:
            run.log_file(manifest.store().read_bytes(entry.path), f"evaluate/{entry.path}")


def track_publication(run: TrackedRun, manifest: StageManifest[PublishFacts], ran: bool) -> None:
    """Tag the run with the address, the revision and the content digest of the publication."""
    facts = manifest.facts
    if facts.held is not None:
        run.set_tags({"trainflow.not_published": facts.held})
        return
    tags = {"url": facts.published_url, "revision": facts.revision, "digest": facts.published_digest}
    run.set_tags({f"trainflow.published_{name}": value for name, value in tags.items()})
