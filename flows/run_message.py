"""What the places of `notify` are sent when a run or a sweep ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.results import RUN_ID_CHARS, PipelineResult, collect_metrics
from tasks.notify_settings import End, NotifySettings
from tasks.stage.progress import duration
from trainer_lib.errors import Interrupted, Preempted, Pruned, TrainflowError

if TYPE_CHECKING:
    from tasks.notifying import Message

_MOST_METRICS = 6


def tell_of_run(settings: NotifySettings, result: PipelineResult) -> None:
    """Send how a run ended. Nothing is sent of one that found every stage committed, or that its sweep ended."""
    is_idle = result.ok and not any(outcome.status == "ran" for outcome in result.stages)
    if not settings.to or is_idle or isinstance(result.error, Pruned):
        return
    from tasks.notifying import send

    send(settings, describe_run(result))


def describe_run(result: PipelineResult) -> Message:
    """The message of a run: its stages, what was measured, what went wrong, and where it is."""
    from tasks.notifying import Message

    state = state_of(result.error)
    name = result.run_name or result.name
    lines = [
        f"{outcome.stage}: {outcome.status}" + (f", {duration(outcome.seconds)}" if outcome.seconds >= 0.5 else "")
        for outcome in result.stages
        if outcome.status != "skipped"
    ]
    found = {key: value for key, value in collect_metrics(result.stages).items() if not key.startswith("train_")}
    lines += [f"{key} {value:.4g}" for key, value in list(found.items())[:_MOST_METRICS]]
    lines += describe_error(result.error)
    if result.report_url:
        lines.append(f"Report: {result.report_url}")
    if result.run_url:
        lines.append(f"MLflow: {result.run_url}")
    if result.error is not None and result.pipeline_key:
        lines.append(f"Go on: trainflow resume {result.pipeline_key[:RUN_ID_CHARS]} --storage {result.storage}")
    return Message(state, f"{name} {state}", lines)


def describe_error(error: TrainflowError | None) -> list[str]:
    """What went wrong, and what to do."""
    if error is None:
        return []
    return [f"{error.title}: {error.message}", *([error.remedy] if error.remedy else [])]


def state_of(error: TrainflowError | None) -> End:
    """How something ended, by the failure that ended it."""
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, Interrupted | Preempted) else "failed"
