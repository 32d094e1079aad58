"""Messages of `notify` at the end of a run or a sweep."""

from __future__ import annotations

from trainer_lib.base.suggestions import number_words
from trainer_lib.errors import Interrupted, Preempted, Pruned, TrainflowError
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult, collect_metrics
from trainflow.tasks.tracking.notifying import End, Message, NotifySettings

_MOST_METRICS = 6


def tell_of_run(settings: NotifySettings, result: PipelineResult) -> None:
    """Send how a run ended. Nothing is sent of one that found every stage committed, or that its sweep ended."""
    is_idle = result.ok and not any(outcome.status == "ran" for outcome in result.stages)
    if settings.to and not is_idle and not isinstance(result.error, Pruned):
        settings.send(describe_run(result))


def describe_run(result: PipelineResult) -> Message:
    """The message of a run: its stages, what was measured, what went wrong, and where it is."""
    state = state_of(result.error)
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
    return Message(state, f"{result.run_name or result.name} {state}", lines)


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
