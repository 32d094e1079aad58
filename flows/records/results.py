"""The result of a pipeline run, the one source of what its summary, report, note and message say. Imports no engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import number_words
from trainer_lib.errors import Interrupted, Preempted, Pruned, TrainflowError
from trainer_lib.storage import Store
from trainer_lib.trackers.names import is_measurement
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.tracking.notifying import End, Message, NotifySettings

RUN_ID_CHARS = 16
"""A run's id, and its folder below the storage's `runs/`, is the beginning of its pipeline's key."""

Status = Literal["cached", "ran", "failed", "skipped"]
_LIMIT = 256 << 20
Entry = dict[str, Any]
"""One entry of a trainer's log, with its `step`."""
_MOST_METRICS = 6


@dataclass(frozen=True)
class StageOutcome:
    """The end of a stage; `manifest` is `StageManifest.to_dict`, `places` are label -> URL of what people look for."""

    stage: str
    status: Status
    reason: str
    seconds: float = 0.0
    manifest: dict[str, Any] | None = None
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def took(self) -> str:
        """Its time in words; empty below half a second."""
        return describe_seconds(self.seconds) if self.seconds >= 0.5 else ""


@dataclass
class PipelineResult:
    """A pipeline run. A typed failure is held in `error`; `raise_for_error` raises it.

    `run_name` is its name in Prefect and MLflow; None before it is given.
    `mlflow_waiting` says what MLflow does not have yet, and where it waits; None: nothing does. `gates` are the checks
    of `evaluate.require`, as `trainflow.tasks.stage.gates.GateCheck` has them; empty without a gate, or before it was
    checked.
    """

    name: str
    pipeline_key: str
    storage: str
    stages: list[StageOutcome] = field(default_factory=list)
    seconds: float = 0.0
    run_name: str | None = None
    mlflow_run_id: str | None = None
    tracking_uri: str | None = None
    run_url: str | None = None
    report_url: str | None = None
    mlflow_waiting: str | None = None
    gates: list[dict[str, Any]] = field(default_factory=list)
    error: TrainflowError | None = None

    @property
    def ok(self) -> bool:
        """Whether no stage failed."""
        return self.error is None

    def outcome(self, stage: str) -> StageOutcome | None:
        """The outcome of `stage`; None if the run never reached it."""
        return next((outcome for outcome in self.stages if outcome.stage == stage), None)

    @property
    def places(self) -> dict[str, str]:
        """Label -> place of what the run left: what its stages made, the report, the MLflow run."""
        places = {label: url for outcome in self.stages for label, url in outcome.places.items()}
        mlflow = f"{self.mlflow_run_id} in {self.tracking_uri or ''}" if self.mlflow_run_id else ""
        places |= {"report": self.report_url or "", "MLflow run": (mlflow and self.run_url) or mlflow}
        return {label: place for label, place in places.items() if place}

    def manifests(self) -> dict[str, StageManifest]:
        """The committed results by their stages."""
        found = {outcome.stage: outcome.manifest for outcome in self.stages}
        return {stage: StageManifest.from_dict(record) for stage, record in found.items() if record}

    def measured(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The splits that stages measured, with their metrics."""
        for outcome in self.stages:
            for split, values in ((outcome.manifest or {}).get("metrics") or {}).items():
                if isinstance(values, Mapping):
                    yield split, values

    def raise_for_error(self) -> None:
        """Raise the failure that ended the run, if there is one."""
        if self.error is not None:
            raise self.error

    def to_dict(self) -> dict[str, Any]:
        """This result as plain JSON; the error as its record."""
        # These two are not JSON yet.
        plain = {name: value for name, value in vars(self).items() if name not in ("stages", "error")}
        error = None if self.error is None else self.error.to_record()
        return {**plain, "stages": [asdict(outcome) for outcome in self.stages], "error": error}


def describe_outcomes(outcomes: Iterable[StageOutcome], earlier: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The ends of stages, as in a run's record.

    Args:
        earlier: what the record had: a stage that an earlier command of the run has run, and this one found committed,
            keeps the time that it took.
    """
    found = dict(earlier or {})
    for outcome in outcomes:
        key = None if outcome.manifest is None else outcome.manifest.get("key")
        before = found.get(outcome.stage)
        is_known = isinstance(before, dict) and before.get("status") == "ran" and before.get("key") == key
        if outcome.status == "cached" and is_known:
            continue
        ended = {name: getattr(outcome, name) for name in ("status", "seconds", "reason")}
        found[outcome.stage] = {**ended, "key": key}
    return found


def collect_metrics(outcomes: Iterable[StageOutcome]) -> dict[str, float]:
    """The metrics of stages, by name; those of a split begin with its name."""
    found: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.manifest is not None:
            found |= flat_metrics(outcome.manifest["metrics"])
    return found


def flat_metrics(metrics: Mapping[str, Any], *, timings: bool = False) -> dict[str, float]:
    """``{"test": {"test_error": 0.1}}`` as ``{"test_error": 0.1}``; times and speeds only with `timings`."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            inner = flat_metrics(value, timings=timings)
            flat |= {f"{name}_{key.removeprefix(f'{name}_')}": number for key, number in inner.items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and (timings or is_measurement(name)):
            flat[name] = value
    return flat


def evaluation_warnings(result: PipelineResult) -> list[str]:
    """Warnings of evaluate about the model, also of an earlier run whose result is used again."""
    noted = [(outcome.manifest or {}).get("meta", {}) for outcome in result.stages if outcome.stage == "evaluate"]
    return [str(text) for meta in noted for text in meta.get("warnings") or ()]


def read_training_history(stage: Store) -> list[Entry]:
    """The trainer's log, as mappings with their `step`; empty where the stage left none. Raises ValueError if torn."""
    data = stage.read_if_exists("history.json", limit=_LIMIT)
    if not data:
        return []
    # Of the steps that no log covers: all of them, where `logging_steps` is larger than the training.
    losses = stage.read_if_exists("losses.json", limit=_LIMIT)
    return [*parse_json(data), *parse_json(losses or b"[]")]


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
