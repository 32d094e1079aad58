"""The MLflow run of a pipeline run: opened with its settings, sampled while it lasts, described at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from flows.ending import expected_ending
from flows.plan import Plan
from flows.results import PipelineResult
from flows.run_notes import describe_end, describe_experiment, describe_start, settings_files, tracked_params
from tasks import tracking
from tasks.stage.facts import TrainFacts
from tasks.stage.manifest import StageManifest
from tasks.stage.progress import Event, subscribe
from tasks.stage.retry import now
from tasks.system_load import SystemLoad
from trainer_lib.errors import CodeError, ConfigError, DataError
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow_client import DISCARDED

_MISTAKES = (CodeError, ConfigError, DataError)


class RunTracking:
    """The run, and the thread that samples this machine for it.

    Attributes:
        run: what the stages log to.
        since: when the run began, as ISO time; that of its first command.
    """

    def __init__(self, run: tracking.TrackedRun, result: PipelineResult, run_id: str, known: Mapping[str, Any]) -> None:
        self.run = run
        self._is_new = run.handle.token != known.get("tracked_run")
        self.since = (None if self._is_new else known.get("tracked_since")) or now()
        self._result = result
        self._run_id = run_id
        storage = Store.open(result.storage)
        self._load = SystemLoad(
            partial(run.log_metrics, once=False),
            since_s=datetime.fromisoformat(self.since).timestamp(),
            folder=storage.local_path() if storage.is_local else None,
        )
        run.set_tags(describe_start(result, run_id))
        self._trained = 0
        self._listening = contextlib.ExitStack()
        self._listening.enter_context(subscribe(self._listen))

    @classmethod
    def open(cls, plan: Plan, result: PipelineResult, run_id: str, *, known: Mapping[str, Any]) -> Self | None:
        """Open the run, or take up the one of an earlier command; None where tracking is off.

        Args:
            known: the record of the earlier command; empty if there was none.
        """
        spec, storage = plan.spec, Store.open(plan.spec.storage)
        finished = known.get("status") == "FINISHED"
        # A finished run is history: what runs now gets an MLflow run of its own.
        token = None if finished else known.get("tracked_run")
        wanted = (reason.manifest for name, reason in plan.reasons.items() if plan.is_wanted(name))
        run = tracking.open_run(
            spec.tracking,
            storage,
            name=spec.name,
            run_name=result.run_name,
            pipeline_key=plan.pipeline_key,
            params=tracked_params(plan),
            resume=not finished,
            token=token,
            after=known.get("ended"),
            tags={**spec.tracking.tags, **_origin(wanted, storage)},
            project=Path(spec.root or "."),
            experiment_note=describe_experiment(spec),
            leaves_local=expected_ending().delivers_later,
        )
        if run is None:
            return None
        for path, text in settings_files(plan).items():
            run.log_file(text, path)
        return cls(run, result, run_id, known)

    def is_discarded(self) -> bool:
        """Whether the run is not worth keeping: it is new, and a mistake in spec, recipe or data came before training.

        The mistake is on the terminal, and in the record and the report of the run.
        """
        trained = self._result.outcome("train")
        is_trained = self._trained > 0 or (trained is not None and trained.manifest is not None)
        return self._is_new and not is_trained and isinstance(self._result.error, _MISTAKES)

    def describe_end(self) -> None:
        """Give the run its last description, and the reason of a failure."""
        self.run.set_tags(describe_end(self._result, self._run_id))

    def end(self, status: str) -> None:
        """Note how the run has ended."""
        self.run.end(DISCARDED if self.is_discarded() else _status_in_mlflow(status))

    def _listen(self, event: Event) -> None:
        if event.get("stage") == "train":
            self._trained = max(self._trained, int(event.get("step") or 0))

    def finish(self, status: str, *, stages: int) -> None:
        """End the run, and wait a second per stage for the server. Safe to repeat."""
        self._listening.close()
        self._load.close()
        self.run.finish(_status_in_mlflow(status), stages=stages)


def _origin(committed: Iterable[StageManifest | None], storage: Store) -> dict[str, str]:
    """A tag that names the run which trained a model found committed."""
    for manifest in committed:
        if manifest is not None and isinstance(manifest.facts, TrainFacts):
            run_id = manifest.facts.mlflow_run_id or tracking.find_run_id(storage, manifest.facts.tracked_run)
            return {} if run_id is None else {"trainflow.origin_run": run_id}
    return {}


def _status_in_mlflow(status: str) -> str:
    """The status in MLflow, which knows no pruned runs."""
    return "KILLED" if status == "PRUNED" else status
