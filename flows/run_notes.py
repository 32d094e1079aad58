"""What a pipeline's MLflow run says of itself: parameters, settings as files, descriptions, the reason of a failure.

Parameters are what decides the numbers, as the stages take it. How processes are started and what is published are in
the file of the whole spec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.plan import Plan, StagePlan
from flows.prefect_runs import configured_api
from flows.results import PipelineResult, collect_metrics
from flows.run_summary import summarize
from flows.spec.spec import PipelineSpec
from trainer_lib.arguments.numeric import numeric_fields
from trainer_lib.errors import Pruned
from trainer_lib.foreign_text import to_markdown
from trainer_lib.secrets import mask
from trainer_lib.trackers.mlflow_client import FAILURE_TAG
from trainer_lib.trackers.names import with_intervals
from trainer_lib.trackers.params import flatten_params

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
    """Path in the run's artifacts -> text: the resolved spec, and every training argument of each stage."""
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
    words = f"At work, or its process is gone: `trainflow status --storage {mask(result.storage)}` says which."
    return {NOTE: f"{_heading(result, run_id)}\n\n{words}", **_prefect_tags()}


def describe_end(result: PipelineResult, run_id: str) -> dict[str, str | None]:
    """The tags of a run that ends: its summary, and why it failed; None takes a tag away."""
    failed = next((each.stage for each in result.stages if each.status == "failed"), None)
    reason = None
    note = "\n\n".join(filter(None, [_heading(result, run_id), _measured(result), summarize(result)]))
    pruned = result.error.message if isinstance(result.error, Pruned) else None
    if pruned is not None:
        note += f"\n\nPruned: {to_markdown(pruned)}"
    elif result.error is not None:
        reason = mask(f"{type(result.error).__name__}: {result.error.message}")[:NOTE_CHARS]
        note += f"\n\nIt goes on from there: `trainflow resume {run_id} --storage {mask(result.storage)}`"
    if len(note) > NOTE_CHARS:
        note = f"{note[:NOTE_CHARS]}..."
    return {NOTE: note, FAILURE_TAG: reason, FAILED_STAGE: None if pruned else failed, PRUNED_TAG: pruned}


def _measured(result: PipelineResult) -> str:
    """The final evaluation in one line; empty without one. First, because the page folds a long description."""
    outcome = result.outcome("evaluate")
    if outcome is None or outcome.manifest is None:
        return ""
    found = with_intervals(collect_metrics([outcome]))
    parts = {name: text.partition(" ") for name, text in found.items()}
    return ", ".join(
        f"{to_markdown(name)} **{value}**{gap}{interval}" for name, (value, gap, interval) in parts.items()
    )


def _heading(result: PipelineResult, run_id: str) -> str:
    return f"Run `{run_id}` of the pipeline {to_markdown(result.name)}."


def _prefect_tags() -> dict[str, str]:
    """The Prefect run that this code runs in."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return {}
    tags = {FLOW_RUN: str(context.flow_run.id)}
    # The embedded server ends with the command: no address of its page lasts.
    if (api := configured_api()) is not None:
        tags[FLOW_RUN_URL] = f"{api.rstrip('/').removesuffix('/api')}/runs/flow-run/{context.flow_run.id}"
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
        args |= numeric_fields(stage.arguments, data_parallel_size=processes)
        given["processes"] = processes
    return {**given, "args": args}


def _without_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        inner = _without_unset(value) if isinstance(value, Mapping) else value
        if inner is not None and inner != {} and inner != []:
            kept[name] = inner
    return kept
