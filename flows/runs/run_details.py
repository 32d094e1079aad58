"""Everything that is recorded about one run: its stages, settings, code, data, versions, metrics, places, attempts.

Read from the run's folder and the commit files of its stages; no result is opened or verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer_lib.base.json_text import parse_record
from trainer_lib.errors import DamagedError
from trainer_lib.storage import Store
from trainer_lib.storage.commit import read_commit
from trainflow.flows.records.past_runs import ARGUMENTS_FILE, SPEC_FILE, PastRun, read_tags, run_folder
from trainflow.flows.records.plan_record import Comparison, compare, read_plan_record
from trainflow.flows.records.results import flat_metrics
from trainflow.flows.records.run_logs import Attempt, read_attempts
from trainflow.flows.stages import find_stage, stage_names
from trainflow.tasks.stage.facts import PrepareFacts
from trainflow.tasks.stage.manifest import KEY_FILE, StageManifest, stage_folder

_REPORT = "report.html"
_LIMIT = 64 << 20


@dataclass(frozen=True)
class StageDetails:
    """One stage of a run.

    Attributes:
        state: ran, cached, failed, skipped, running, interrupted, or waiting.
        seconds: how long it took; None: not known.
        reason: why it ran, was cached, failed or was skipped.
        key: its content key; None: it was not reached.
        url: its folder.
        committed: when its result was committed; None: there is none, or it is gone.
        digest: content digest of its files.
        metrics: name -> number.
        places: label -> URL of what people look for.
        fields: every field of the key, and where the code stands; empty where the record of the key is gone.
    """

    stage: str
    state: str
    seconds: float | None = None
    reason: str = ""
    key: str | None = None
    url: str | None = None
    committed: str | None = None
    digest: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON, without the fields of the key."""
        plain = asdict(self)
        plain.pop("fields")
        return plain


@dataclass(frozen=True)
class RunDetails:
    """One run.

    Attributes:
        spec: the spec as it was recorded, overrides included; empty where it is gone.
        arguments: stage -> every training argument, as they were worked out then.
        tags: names that people gave it.
        attempts: every attempt at its stages.
        places: label -> URL: model, predictions, report, MLflow run, publication.
        compared: what was planned beside what came of it; empty for a run that was not planned.
    """

    run: PastRun
    stages: tuple[StageDetails, ...]
    spec: Mapping[str, Any]
    arguments: Mapping[str, Mapping[str, Any]]
    tags: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    places: Mapping[str, str]
    compared: tuple[Comparison, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """What its stages measured, by name."""
        found = dict(self.run.metrics)
        for stage in self.stages:
            found |= stage.metrics
        return found

    @property
    def versions(self) -> dict[str, str]:
        """The versions that change numerics, as the stages' keys hold them."""
        found: dict[str, str] = {}
        for stage in self.stages:
            versions = (stage.fields.get("fields") or {}).get("versions")
            found |= versions if isinstance(versions, dict) else {}
        return found

    def stage(self, name: str) -> StageDetails | None:
        """One stage by its name; None where the run has none of this name."""
        return next((stage for stage in self.stages if stage.stage == name), None)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        run = self.run
        return {
            "id": run.id,
            "name": run.name,
            "run_name": run.run_name,
            "status": run.status,
            "started": run.started,
            "ended": run.record.get("ended"),
            "failed": run.failed,
            "tags": list(self.tags),
            "only": run.only,
            "start": run.start,
            "from_run": run.from_run,
            "force": list(run.force),
            "stages": [stage.to_dict() for stage in self.stages],
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "metrics": self.metrics,
            "places": dict(self.places),
            "compared": [each.to_dict() for each in self.compared],
            "spec": dict(self.spec),
            "code": dict(run.sources),
            "versions": self.versions,
            "arguments": {stage: dict(found) for stage, found in self.arguments.items()},
        }


def read_details(storage: str, run: PastRun, *, is_at_work: bool = False) -> RunDetails:
    """Everything that is recorded about a run.

    Args:
        is_at_work: whether a process works on it now: a stage without an end is then running.

    Raises:
        StorageError: the storage cannot be read.
    """
    folder = run_folder(storage, run.id)
    names = [name for name in stage_names() if name in _named(run)]
    stages = tuple(_read_stage(storage, run, name, is_at_work) for name in names)
    places: dict[str, str] = {}
    for stage in stages:
        places |= stage.places
    if folder.exists(_REPORT):
        places["report"] = f"{folder.url}/{_REPORT}"
    if run.mlflow_run_id:
        uri = run.record.get("tracking_uri") or "its tracking server"
        places["MLflow run"] = str(run.record.get("run_url") or f"{run.mlflow_run_id} in {uri}")
    return RunDetails(
        run=run,
        stages=stages,
        spec=_read_spec(folder),
        arguments=_read_json(folder, ARGUMENTS_FILE),
        tags=tuple(read_tags(storage, run)),
        attempts=tuple(read_attempts(storage, run)),
        places=places,
        compared=tuple(compare(read_plan_record(folder))),
    )


def _named(run: PastRun) -> set[str]:
    """The stages that a run's record names in any way."""
    record = run.record
    return {*run.stages, *run.worked_in, *(record.get("planned") or ()), *(record.get("outcomes") or ())}


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
    manifest, row = _read_manifest(store), find_stage(name)
    found = StageDetails(
        stage=name,
        state=state,
        seconds=seconds,
        reason=reason,
        key=key,
        url=store.url,
        fields=_read_json(store, KEY_FILE),
    )
    if manifest is None:
        return found
    facts = manifest.facts
    splits = facts.splits if isinstance(facts, PrepareFacts) else {}
    return StageDetails(
        **{
            **vars(found),
            "committed": manifest.created,
            "digest": manifest.content_digest,
            "metrics": flat_metrics(manifest.metrics),
            "places": {} if row is None else dict(row.places(manifest)),
            "rows": {split: each.rows for split, each in splits.items()},
        }
    )


def _read_manifest(store: Store) -> StageManifest | None:
    try:
        commit = read_commit(store, kind="stage")
        return None if commit is None else StageManifest.from_commit(store.url, commit)
    except DamagedError:
        return None


def _read_spec(folder: Store) -> dict[str, Any]:
    from trainer_lib.base.yaml_text import YamlProblem, parse_yaml

    data = folder.read_if_exists(SPEC_FILE, limit=_LIMIT)
    try:
        spec = parse_yaml(data.decode()) if data else {}
    except (YamlProblem, UnicodeDecodeError):
        return {}
    return spec if isinstance(spec, dict) else {}


def _read_json(folder: Store, name: str) -> dict[str, Any]:
    return parse_record(folder.read_if_exists(name, limit=_LIMIT))
