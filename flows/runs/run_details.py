"""Everything that is recorded about one run, and how two runs differ.

Read from the run's folder and the commit files of its stages; no result is opened or verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer_lib.base.json_text import parse_record
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store
from trainflow.flows.records.past_runs import ARGUMENTS_FILE, PastRun, read_tags, run_folder
from trainflow.flows.records.recorded_spec import read_spec_record
from trainflow.flows.records.results import flat_metrics
from trainflow.flows.records.run_logs import Attempt, read_attempts
from trainflow.flows.records.run_names import flat_settings
from trainflow.flows.stages import find_stage, stage_names
from trainflow.tasks.keys.keys import Difference, describe_code, differences, read_places
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import KEY_FILE, look_up_in, stage_folder

_REPORT = "report.html"
_LIMIT = 64 << 20


@dataclass(frozen=True)
class StageDetails:
    """One stage of a run."""

    stage: str
    state: str  # ran, cached, failed, skipped, running, interrupted, or waiting
    seconds: float | None = None
    reason: str = ""
    key: str | None = None  # its content key; None: it was not reached
    url: str | None = None
    committed: str | None = None  # when its result was committed; None: there is none, or it is gone
    digest: str | None = None  # content digest of its files
    metrics: Mapping[str, float] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)  # label -> URL of what people look for
    rows: Mapping[str, int] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the record of the key; empty where it is gone

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of its key."""
        return self.record.get("fields") or {}

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON, without the record of the key."""
        plain = asdict(self)
        plain.pop("record")
        return plain


@dataclass(frozen=True)
class RunDetails:
    """One run."""

    run: PastRun
    stages: tuple[StageDetails, ...]
    spec: Mapping[str, Any]  # the spec as it was recorded, overrides included; empty where it is gone
    arguments: Mapping[str, Mapping[str, Any]]  # stage -> every training argument, as they were worked out then
    tags: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    places: Mapping[str, str]  # label -> URL: model, predictions, report, MLflow run, publication

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of its stages, by name."""
        found = dict(self.run.metrics)
        for stage in self.stages:
            found |= stage.metrics
        return found

    @property
    def versions(self) -> dict[str, str]:
        """The versions that change numerics, as the stages' keys hold them."""
        found: dict[str, str] = {}
        for stage in self.stages:
            versions = stage.fields.get("versions")
            found |= versions if isinstance(versions, dict) else {}
        return found

    def stage(self, name: str) -> StageDetails | None:
        """One stage by its name; None where the run has none of this name."""
        return next((stage for stage in self.stages if stage.stage == name), None)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        run = self.run
        named = ("id", "name", "run_name", "status", "started", "failed", "only", "start", "from_run")
        return {
            **{name: getattr(run, name) for name in named},
            "ended": run.record.get("ended"),
            "tags": list(self.tags),
            "force": list(run.force),
            "stages": [stage.to_dict() for stage in self.stages],
            "attempts": [vars(attempt) for attempt in self.attempts],
            "metrics": self.metrics,
            "places": dict(self.places),
            "spec": dict(self.spec),
            "code": dict(run.sources),
            "versions": self.versions,
            "arguments": {stage: dict(found) for stage, found in self.arguments.items()},
        }


def read_details(storage: str, run: PastRun, *, is_at_work: bool = False) -> RunDetails:
    """Everything that is recorded about a run; while it `is_at_work`, a stage without an end is running."""
    folder = run_folder(storage, run.id)
    record = run.record
    named = {*run.stages, *run.worked_in, *(record.get("planned") or ()), *(record.get("outcomes") or ())}
    names = [name for name in stage_names() if name in named]
    stages = tuple(_read_stage(storage, run, name, is_at_work) for name in names)
    places: dict[str, str] = {}
    spec: dict[str, Any] = {}
    for stage in stages:
        places |= stage.places
    with suppress(ConfigError):  # it is gone or torn
        spec = read_spec_record(storage, run)
    if folder.exists(_REPORT):
        places["report"] = f"{folder.url}/{_REPORT}"
    if run.mlflow_run_id:
        uri = run.record.get("tracking_uri") or "its tracking server"
        places["MLflow run"] = str(run.record.get("run_url") or f"{run.mlflow_run_id} in {uri}")
    return RunDetails(
        run=run,
        stages=stages,
        spec=spec,
        arguments={name: told for name, told in _read_json(folder, ARGUMENTS_FILE).items() if isinstance(told, dict)},
        tags=tuple(read_tags(storage, run)),
        attempts=tuple(read_attempts(storage, run)),
        places=places,
    )


def _read_stage(storage: str, run: PastRun, name: str, is_at_work: bool) -> StageDetails:
    outcome = (run.record.get("outcomes") or {}).get(name) or {}
    key = run.stages.get(name) or run.worked_in.get(name)
    state = str(outcome.get("status") or ("waiting" if is_at_work else "not reached"))
    if name in run.stages and not outcome:
        state = "committed"
    elif name in run.worked_in and name not in run.stages and not outcome:
        state = "running" if is_at_work else "interrupted"
    seconds, reason = outcome.get("seconds"), str(outcome.get("reason") or "")
    if key is None:
        return StageDetails(name, state, seconds, reason)
    store = stage_folder(Store.open(storage), name, key)
    manifest, row = look_up_in(storage, name, key), find_stage(name)
    facts = None if manifest is None else manifest.facts
    splits = facts.splits if isinstance(facts, PrepareFacts) else {}
    return StageDetails(
        stage=name,
        state=state,
        seconds=seconds,
        reason=reason,
        key=key,
        url=store.url,
        committed=None if manifest is None else manifest.created,
        digest=None if manifest is None else manifest.content_digest,
        metrics={} if manifest is None else flat_metrics(manifest.metrics),
        places={} if manifest is None or row is None else dict(row.places(manifest)),
        rows={split: counts.rows for split, counts in splits.items()},
        record=_read_json(store, KEY_FILE),
    )


def _read_json(folder: Store, name: str) -> dict[str, Any]:
    return parse_record(folder.read_if_exists(name, limit=_LIMIT))


# -- differences ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunComparison:
    """The differences of the second of two runs from the first, and every metric that one of them has."""

    old: RunDetails
    new: RunDetails
    spec: list[Difference]
    # code, data: sentences about functions, statements and files; about sources, prepared data and its splits.
    code: list[str]
    data: list[str]
    versions: list[Difference]
    arguments: list[Difference]  # training arguments that differ although no setting of the spec says so
    # `name`, the numbers `old` and `new` (None where a run does not have it), and their difference `delta`.
    metrics: list[dict[str, Any]]

    @property
    def is_equal(self) -> bool:
        """Whether both were made from the same."""
        return not any((self.spec, self.code, self.data, self.versions, self.arguments))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        parts = {name: getattr(self, name) for name in ("spec", "code", "data", "versions", "arguments", "metrics")}
        for name in ("spec", "versions", "arguments"):
            parts[name] = [{"field": change.field, "old": change.old, "new": change.new} for change in parts[name]]
        sides = [{"id": side.run.id, "run_name": side.run.run_name} for side in (self.old, self.new)]
        return {"runs": sides, "equal": self.is_equal, **parts}


def compare_runs(old: RunDetails, new: RunDetails) -> RunComparison:
    """Compare two runs."""
    spec = differences(flat_settings(old.spec), flat_settings(new.spec))
    metrics = []
    for name in {**new.metrics, **old.metrics}:
        before, after = old.metrics.get(name), new.metrics.get(name)
        delta = None if before is None or after is None else after - before
        metrics.append({"name": name, "old": before, "new": after, "delta": delta})
    return RunComparison(
        old=old,
        new=new,
        spec=spec,
        code=_compare_code(old, new),
        data=list(_compare_data(old.stage("prepare-data"), new.stage("prepare-data"))),
        versions=differences(old.versions, new.versions),
        arguments=_compare_arguments(old, new, {change.field for change in spec}),
        metrics=metrics,
    )


def _compare_code(old: RunDetails, new: RunDetails) -> list[str]:
    """Differences in code that the stages reach; differing files if the stages' keys are gone."""
    sentences: dict[str, None] = {}
    is_known = False
    for stage in old.stages:
        other = new.stage(stage.stage)
        if other is None or not stage.record or not other.record:
            continue
        is_known = True
        code = [change for change in differences(stage.fields, other.fields) if change.field.startswith("recipe.")]
        sentences |= {str(change): None for change in describe_code(code, stage.record, read_places(other.record))}
    if is_known:
        return list(sentences)
    return [str(change) for change in differences(old.run.sources, new.run.sources)]


def _compare_data(old: StageDetails | None, new: StageDetails | None) -> Iterator[str]:
    if old is None or new is None:
        return
    sources = ({"sources": side.fields.get("sources")} for side in (old, new))
    yield from map(str, differences(*sources))
    if old.digest and new.digest and old.digest != new.digest:
        yield f"the prepared data differs: {old.digest[:12]} -> {new.digest[:12]}"
    rows = ({f"rows of {split}": count for split, count in side.rows.items()} for side in (old, new))
    yield from map(str, differences(*rows))


def _compare_arguments(old: RunDetails, new: RunDetails, named: set[str]) -> list[Difference]:
    """Arguments that differ beyond the settings; those that evaluate and predict take over from train come once."""
    found: dict[str, Difference] = {}
    for stage in stage_names():
        before, after = old.arguments.get(stage), new.arguments.get(stage)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            for change in differences(before, after):
                if not any(name.endswith(f".args.{change.field}") for name in named):
                    found.setdefault(change.field, change)
    return list(found.values())
