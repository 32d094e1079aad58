"""The MLflow run of a pipeline run: opened with its settings, sampled while it lasts, described at its end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from trainer_lib.arguments.configs.parallelism_config import data_size
from trainer_lib.arguments.numeric import numeric_fields
from trainer_lib.base.suggestions import to_markdown
from trainer_lib.errors import CodeError, ConfigError, DataError, Pruned
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow.mlflow_client import DISCARDED, FAILURE_TAG
from trainer_lib.trackers.names import flatten_params
from trainflow.flows.planning.plan import Plan, StagePlan
from trainflow.flows.records.ending import expected_ending
from trainflow.flows.records.prefect_runs import configured_api, current_flow_run_id
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.reports.report import render_summary
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.progress import Event, subscribe
from trainflow.tasks.stage.retry import now
from trainflow.tasks.tracking import mlflow_run as tracking
from trainflow.tasks.tracking.system_load import SystemLoad

# What a pipeline's MLflow run says of itself: parameters, settings as files, descriptions, the reason of a failure.
#
# Parameters are what decides the numbers, as the stages take it. How processes are started and what is published are
# in the file of the whole spec.


NOTE = "mlflow.note.content"
FAILED_STAGE = "trainflow.failed_stage"
PRUNED_TAG = "trainflow.pruned"
FLOW_RUN, FLOW_RUN_URL = "trainflow.prefect_flow_run", "trainflow.prefect_url"
SPEC_FILE, ARGUMENTS_FILE = "settings/spec.yaml", "settings/arguments.json"
NOTE_CHARS = 5000
# Of a stage: what changes no number, or stands in the file of the whole spec.
_ASIDE = {"launch", "retries", "enabled", "recipe", "require", "preemption", "rows_per_file", "shard_rows"}


def tracked_params(plan: Plan) -> dict[str, Any]:
    """The settings that decide the results, by the names that they have on the command line; unset ones are left out.

    The arguments of train are the effective ones: those that can change the weights, and those that the spec sets.
    """
    spec = plan.spec
    params: dict[str, Any] = {"recipe": Path(spec.recipe).name}
    if spec.limit is not None:
        params["limit"] = spec.limit
    for stage in plan.stages.values():
        # What is published is named by the publication itself.
        if stage.stage.section != "publish":
            params[stage.stage.section] = _stage_params(stage, getattr(spec, stage.stage.section, None))
    return _without_unset(params)


def settings_files(plan: Plan) -> dict[str, str]:
    """Path in the run's artifacts -> text: the resolved spec, and every training argument of the stages."""
    arguments = {
        name: flatten_params(stage.arguments.to_dict()) for name, stage in plan.stages.items() if stage.arguments
    }
    return {
        SPEC_FILE: mask(plan.spec_text),
        ARGUMENTS_FILE: json.dumps(arguments, indent=2),
    }


def describe_experiment(spec: PipelineSpec) -> str:
    """The description that the experiment of a pipeline gets when it is made."""
    about = f"Runs of the pipeline **{spec.name}** ({Path(spec.recipe).name})."
    return mask("\n\n".join(filter(None, [about, spec.publish.description.strip()])))


def describe_start(result: PipelineResult, run_id: str) -> dict[str, str]:
    """The tags of a run that begins, or is taken up."""
    words = f"Running, or its process is gone: `trainflow status --storage {mask(result.storage)}` says which."
    return {NOTE: f"{_heading(result, run_id)}\n\n{words}", **_prefect_tags()}


def describe_end(result: PipelineResult, run_id: str) -> dict[str, str | None]:
    """The tags of a run that ends: its summary, and why it failed; None takes a tag away."""
    failed = next((outcome.stage for outcome in result.stages if outcome.status == "failed"), None)
    reason = None
    note = f"{_heading(result, run_id)}\n\n{render_summary(result)}"
    pruned = result.error.message if isinstance(result.error, Pruned) else None
    if pruned is not None:
        note += f"\n\nPruned: {to_markdown(pruned)}"
    elif result.error is not None:
        reason = mask(f"{type(result.error).__name__}: {result.error.message}")[:NOTE_CHARS]
        note += f"\n\nResume it: `trainflow resume {run_id} --storage {mask(result.storage)}`"
    if len(note) > NOTE_CHARS:
        note = f"{note[:NOTE_CHARS]}..."
    return {NOTE: note, FAILURE_TAG: reason, FAILED_STAGE: None if pruned else failed, PRUNED_TAG: pruned}


def _heading(result: PipelineResult, run_id: str) -> str:
    return f"Run `{run_id}` of the pipeline {to_markdown(result.name)}."


def _prefect_tags() -> dict[str, str]:
    """The Prefect run that this code runs in."""
    if (run_id := current_flow_run_id()) is None:
        return {}
    tags = {FLOW_RUN: str(run_id)}
    # The embedded server ends with the command: no address of its page lasts.
    if (api := configured_api()) is not None:
        tags[FLOW_RUN_URL] = f"{api.rstrip('/').removesuffix('/api')}/runs/flow-run/{run_id}"
    return tags


def _stage_params(stage: StagePlan, section: Any) -> dict[str, Any]:
    given: dict[str, Any] = stage.config.model_dump(mode="json", exclude=_ASIDE)
    if stage.arguments is None:
        return given
    effective = stage.arguments.to_dict()
    # Of the spec's own section: what a later stage takes over from train stands there.
    args = {name: effective.get(name, value) for name, value in (getattr(section, "args", None) or {}).items()}
    if stage.stage.name == "train":
        processes = getattr(stage.launch, "world_size", 1) or 1
        args |= numeric_fields(stage.arguments, data_parallel_size=data_size(stage.arguments, processes))
        given["processes"] = processes
    return {**given, "args": args}


def _without_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        inner = _without_unset(value) if isinstance(value, Mapping) else value
        if inner is not None and inner != {} and inner != []:
            kept[name] = inner
    return kept


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
