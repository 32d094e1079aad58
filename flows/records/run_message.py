"""Messages of `notify` at the end of a run or a sweep."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from trainer_lib.base.suggestions import number_words
from trainer_lib.errors import ConfigError, Interrupted, Preempted, Pruned, TrainflowError
from trainflow.flows.records.past_runs import PastRun, run_folder
from trainflow.flows.records.recorded_spec import read_spec_record
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult, collect_metrics
from trainflow.tasks.tracking.notify_settings import BLOCK, End, NotifySettings

if TYPE_CHECKING:
    from trainflow.tasks.tracking.notifying import Message

_MOST_METRICS = 6
_TOLD = "told"  # files for deaths, in the run's folder
_log = logging.getLogger(__name__)


def tell_of_run(settings: NotifySettings, result: PipelineResult) -> None:
    """Send how a run ended. Nothing is sent of one that found every stage committed, or that its sweep ended."""
    is_idle = result.ok and not any(outcome.status == "ran" for outcome in result.stages)
    if not settings.to or is_idle or isinstance(result.error, Pruned):
        return
    from trainflow.tasks.tracking.notifying import send

    send(settings, describe_run(result))


def tell_of_death(storage: str, run: PastRun, died: str) -> None:
    """Send that a run's process ended without a word; of several processes that find it, one sends.

    Args:
        died: stage, progress and process, as far as they are known.
    """
    if run.sweep is not None:  # the sweep tells how it ended itself
        return
    try:
        settings = NotifySettings.model_validate(read_spec_record(storage, run).get("notify") or {})
    except (ConfigError, ValueError) as error:
        _log.debug("The addresses for the death of %s are not known: %s", run.id, error)
        return
    # It may be found in a shell, or on a machine, that has no addresses; then another one tells.
    places = [place for place in settings.to if place.startswith(BLOCK) or os.environ.get(place)]
    if not places:
        return
    from trainflow.tasks.tracking.notifying import Message, send

    if not run_folder(storage, run.id).create(f"{_TOLD}/{run.started.replace(':', '')}", died.encode()):
        return
    lines = [f"Its process ended without a word: {died}", f"Resume: trainflow resume {run.id} --storage {storage}"]
    send(settings.model_copy(update={"to": places}), Message("failed", f"{run.run_name or run.name} died", lines))


def describe_run(result: PipelineResult) -> Message:
    """The message of a run: its stages, what was measured, what went wrong, and where it is."""
    from trainflow.tasks.tracking.notifying import Message

    state = state_of(result.error)
    name = result.run_name or result.name
    lines = [
        f"{outcome.stage}: {outcome.status}" + (f", {outcome.took}" if outcome.took else "")
        for outcome in result.stages
        if outcome.status != "skipped"
    ]
    found = {key: value for key, value in collect_metrics(result.stages).items() if not key.startswith("train_")}
    lines += [f"{key} {number_words(value)}" for key, value in list(found.items())[:_MOST_METRICS]]
    lines += describe_error(result.error)
    if result.report_url:
        lines.append(f"Report: {result.report_url}")
    if result.run_url:
        lines.append(f"MLflow: {result.run_url}")
    if result.error is not None and result.pipeline_key:
        lines.append(f"Resume: trainflow resume {result.pipeline_key[:RUN_ID_CHARS]} --storage {result.storage}")
    return Message(state, f"{name} {state}", lines)


def describe_error(error: TrainflowError | None) -> list[str]:
    """The failure, and its remedy."""
    if error is None:
        return []
    return [f"{error.title}: {error.message}", *([error.remedy] if error.remedy else [])]


def state_of(error: TrainflowError | None) -> End:
    """The kind of end, by the failure that caused it."""
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, Interrupted | Preempted) else "failed"
