"""The bookkeeping of one pipeline run: which stages to call, the MLflow run, the run's folder and its report.

<storage>/runs/<pipeline key[:16]>/
    run.json       the MLflow run: unfinished -> re-attached by the next command; finished -> linked to
    spec.yaml      the spec as it was resolved
    source/        the recipe's source closure
    report.html    what ran, how long, the curve, the metrics
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from flows.report import render_report
from flows.results import STAGES, PipelineResult, StageOutcome, Status, stage_name
from flows.spec import checks as _checks
from flows.spec.spec import PipelineSpec
from flows.why import INPUTS, StageReason, explain, is_enabled, pipeline_key
from tasks import tracking as _mlflow
from tasks.stage import progress as _progress
from tasks.stage.closure import closure, find_root
from tasks.stage.context import StageContext
from tasks.stage.facts import PrepareFacts, PublishFacts, TrainFacts
from tasks.stage.manifest import StageManifest
from trainer_lib.errors import ConfigError, Interrupted, StorageError, TrainflowError
from trainer_lib.storage import Store
from trainer_lib.yaml_text import dump_yaml

if TYPE_CHECKING:
    from prefect import Task

_RUN_FILE = "run.json"
_REPORT = "report.html"
_RUN_FILE_BYTES = 1 << 20
_HISTORY_BYTES = 256 << 20
_ARTIFACT_BYTES = 64 << 20

_log = logging.getLogger(__name__)


@dataclass
class Collected:
    """Where the run's result is found by who called the flow, also when the flow fails."""

    result: PipelineResult


_collecting: ContextVar[Collected | None] = ContextVar("_collecting", default=None)


@contextlib.contextmanager
def collect_result(spec: PipelineSpec) -> Iterator[Collected]:
    """Inside the block the result of the run that this thread starts is put into the yielded object."""
    collected = Collected(PipelineResult(spec.name, "", spec.storage))
    token = _collecting.set(collected)
    try:
        yield collected
    finally:
        _collecting.reset(token)


class Run:
    """One pipeline run as a context: entered when the plan is made, left with the report written, however it ends."""

    def __init__(
        self, spec: PipelineSpec, *, only: str | None, start: str | None, force: Sequence[str], debug: bool
    ) -> None:
        self.spec = spec if spec.root else spec.model_copy(update={"root": str(find_root(spec.recipe))})
        self.debug = debug
        self.only = _stage("--only", only)
        self.start = _stage("--from", start)
        self.force = {name for name in (_stage("--force", name) for name in force) if name}
        self.storage = Store.open(spec.storage)
        self.result = PipelineResult(spec.name, "", spec.storage)
        self.handle: _mlflow.RunHandle | None = None
        self._begun = time.monotonic()
        self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._manifests: dict[str, StageManifest] = {}
        self._record: dict[str, Any] = {}
        self._stands = False
        collected = _collecting.get()
        if collected is not None:
            collected.result = self.result

    # -- opening ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.spec.check()
        self.storage.ensure_writable(field="storage")
        self.result.pipeline_key = pipeline_key(self.spec)
        self.folder = self.storage.child("runs", self.result.pipeline_key[:16])
        self._plan = {reason.stage: reason for reason in explain(self.spec)}
        self._require_committed()
        self._record = self._read_record()
        self._keep_sources()
        try:
            self._open_tracking()
        except BaseException:
            _mlflow.finish(self.handle, "FAILED")
            raise
        return self

    def _require_committed(self) -> None:
        """What lies before `only` or `start` is taken as committed: say at once when it is not."""
        first = self.only or self.start
        if first is None:
            return
        for stage in INPUTS[first]:
            reason = self._plan.get(stage)
            if reason is not None and not reason.hit:
                raise ConfigError(
                    f"{stage} comes before it and has no committed result: {reason.reason}.",
                    field="--only" if self.only else "--from",
                    value=first,
                    remedy="Run without it once, or begin earlier.",
                )

    def _open_tracking(self) -> None:
        wanted = [reason for stage, reason in self._plan.items() if self._is_wanted(stage)]
        shown = self._record.get("mlflow_run_id") is not None or not self.spec.tracking.enabled
        finished = self._record.get("status") == "FINISHED"
        self.result.mlflow_run_id = self._record.get("mlflow_run_id")
        self.result.tracking_uri = self._record.get("tracking_uri")
        self.result.run_url = self._record.get("run_url")
        if finished and shown and not self.force and all(reason.hit for reason in wanted):
            self._stands = True  # nothing new happens: the finished run, and its report, stand for it
            return
        self.handle = _mlflow.open_run(
            self.spec.tracking,
            self.storage,
            name=self.spec.name,
            pipeline_key=self.result.pipeline_key,
            params=_params(self.spec),
            resume=not finished,
            tags={**self.spec.tracking.tags, **self._origin(wanted)},
            project=Path(self.spec.root or "."),
        )
        if self.handle is not None:
            self.result.mlflow_run_id = self.handle.run_id
            self.result.tracking_uri = self.handle.server
            self.result.run_url = self.handle.ui_url()
        self._write_record("RUNNING")

    def _origin(self, wanted: list[StageReason]) -> dict[str, str]:
        """The run that trained the model we find committed."""
        for reason in wanted:
            if reason.stage == "train" and reason.manifest is not None:
                origin = reason.manifest.facts.mlflow_run_id
                return {"trainflow.origin_run": str(origin)} if origin else {}
        return {}

    @property
    def context(self) -> StageContext:
        """What the stages of this run share."""
        return StageContext(
            name=self.spec.name,
            recipe=self.spec.recipe,
            storage=self.spec.storage,
            root=self.spec.root,
            tracking=self.handle,
            force=frozenset(self.force),
            debug=self.debug,
        )

    # -- stages -------------------------------------------------------------------------------------------------------

    def stage(self, task: Task[..., Any], config: Any, **inputs: Any) -> StageManifest | None:
        """Call a stage's task, or say why not; its manifest, or None when it was left out."""
        name = task.name
        if not self._is_wanted(name):
            return self._left_out(name)
        begun = time.monotonic()
        try:
            state = task(config, self.context, **inputs, return_state=True)
            manifest: StageManifest = state.result()
        except BaseException as error:
            why = error.message if isinstance(error, TrainflowError) else str(error) or type(error).__name__
            self._note(name, "failed", why, time.monotonic() - begun)
            self._skip_rest(name, f"{name} failed")
            raise
        cached = state.name == "Cached"
        reason = f"committed {manifest.created}" if cached else manifest.reason
        self._note(name, "cached" if cached else "ran", reason, time.monotonic() - begun, manifest)
        self._manifests[name] = manifest
        self._track(name, manifest, ran=not cached)
        return manifest

    def _is_wanted(self, stage: str) -> bool:
        if not is_enabled(self.spec, stage):
            return False
        if self.only is not None:
            return stage == self.only
        return self.start is None or STAGES.index(stage) >= STAGES.index(self.start)

    def _left_out(self, stage: str) -> StageManifest | None:
        reason = self._plan.get(stage)
        if reason is None:
            self._note(stage, "skipped", "switched off in the spec")
            return None
        if reason.manifest is None:
            self._note(stage, "skipped", f"only {self.only}" if self.only else f"begun with {self.start}")
            return None
        manifest = reason.manifest
        self._note(stage, "cached", reason.reason, manifest=manifest)
        self._manifests[stage] = manifest
        self._track(stage, manifest, ran=False)
        return manifest

    def check_splits(self, data: StageManifest | None) -> None:
        """Refuse a split that the data does not have now, not after the training that comes before its use."""
        if data is None:
            return
        try:
            _checks.check_splits(self.spec, data.facts.splits)
        except ConfigError:
            self._skip_rest("prepare-data", "the spec names a split that was not prepared")
            raise

    def _skip_rest(self, after: str, why: str) -> None:
        for stage in STAGES[STAGES.index(after) + 1 :]:
            self._note(stage, "skipped", why)

    def _note(
        self, stage: str, status: Status, reason: str, seconds: float = 0.0, manifest: StageManifest | None = None
    ) -> None:
        record = None if manifest is None else manifest.to_dict()
        self.result.stages.append(StageOutcome(stage, status, reason, round(seconds, 3), record))
        if status == "skipped":
            _progress.publish({"event": "stage", "stage": stage, "status": status, "reason": reason})

    # -- MLflow -------------------------------------------------------------------------------------------------------

    def _track(self, stage: str, manifest: StageManifest, *, ran: bool) -> None:
        """What a stage gave, in the run: also of a cached one, so that every run is whole.

        Only the model is not copied again where an earlier run, which this one links to, has it.
        """
        if self.handle is None:
            return
        tags = {f"trainflow.{stage}": manifest.key[:16]}
        if manifest.batch_halvings:
            tags[f"trainflow.{stage}.rung"] = f"memory ran out: batch halved {manifest.batch_halvings} times"
        _mlflow.set_tags(self.handle, tags)
        train = self._manifests.get("train")
        step = int(train.facts.global_step or 0) if train is not None else 0
        _mlflow.log_metrics(self.handle, flat_metrics(stage, manifest.metrics), step)
        store, facts = manifest.store(), manifest.facts
        if isinstance(facts, PrepareFacts):
            for name, split in facts.splits.items():
                _mlflow.log_dataset(
                    self.handle,
                    name=name,
                    url=store.url,
                    digest=manifest.content_digest,
                    context=name,
                    schema=split.columns,
                    profile={"rows": split.rows},
                )
        elif isinstance(facts, TrainFacts) and (ran or not facts.mlflow_run_id):
            _mlflow.log_folder(self.handle, store.child("model"), "model")
        elif stage == "evaluate":
            for entry in manifest.files:
                if entry.size <= _ARTIFACT_BYTES:
                    _mlflow.log_file(self.handle, store.read_bytes(entry.path), f"evaluate/{entry.path}")
        elif isinstance(facts, PublishFacts):
            tags = {"url": facts.published_url, "digest": facts.published_digest}
            _mlflow.set_tags(self.handle, {f"trainflow.published_{name}": value for name, value in tags.items()})

    # -- closing ------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TrainflowError):
            self.result.error = error
        status = "FINISHED" if error is None else "FAILED"
        if error is not None and (isinstance(error, Interrupted) or not isinstance(error, Exception)):
            status = "KILLED"
        self.result.seconds = round(time.monotonic() - self._begun, 3)
        try:
            self._report()
            if self.handle is not None or self._record.get("status") == "RUNNING":
                self._write_record(status)
        except StorageError as unwritten:
            _log.warning("The run's report could not be written: %s", unwritten)
        finally:
            _mlflow.finish(self.handle, status)

    def _report(self) -> None:
        url = f"{self.folder.url}/{_REPORT}"  # its links are relative to where it lies
        self.result.report_url = url
        if self._stands and self.result.ok and self.folder.exists(_REPORT):
            return
        result = {**self.result.to_dict(), "started": self._started}
        text = render_report(result, self._history())
        self.folder.write_bytes(_REPORT, text.encode())
        _mlflow.log_file(self.handle, text, _REPORT)

    def _history(self) -> list[dict[str, Any]]:
        train = self._manifests.get("train")
        if train is None:
            return []
        try:
            data = train.store().read_if_exists("history.json", limit=_HISTORY_BYTES)
            return list(json.loads(data)) if data else []
        except (ValueError, StorageError):
            return []

    def _read_record(self) -> dict[str, Any]:
        data = self.folder.read_if_exists(_RUN_FILE, limit=_RUN_FILE_BYTES)
        try:
            record = json.loads(data) if data else {}
        except ValueError:
            return {}  # torn by a crash: as if there had been no run
        return record if isinstance(record, dict) else {}

    def _write_record(self, status: str) -> None:
        self._record = {
            "format": 1,
            "name": self.spec.name,
            "pipeline_key": self.result.pipeline_key,
            "status": status,
            "mlflow_run_id": self.result.mlflow_run_id,
            "tracking_uri": self.result.tracking_uri,
            "run_url": self.result.run_url,
            "started": self._started,
        }
        self.folder.write_bytes(_RUN_FILE, json.dumps(self._record, indent=1).encode())

    def _keep_sources(self) -> None:
        """The spec and the recipe's files as they were, so that another machine can do the same."""
        spec = self.spec.model_dump(mode="json")
        self.folder.write_bytes("spec.yaml", dump_yaml(spec).encode())
        recipes = {self.spec.recipe, *(c.recipe for c in _configs(self.spec) if c.recipe)}
        root = Path(self.spec.root or ".")
        for recipe in sorted(recipes):
            for name in closure(recipe, root).files:
                if (root / name).is_file():
                    self.folder.write_bytes(f"source/{name}", (root / name).read_bytes())


def flat_metrics(stage: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as MLflow and tables want them: evaluate's are named ``<split>_<name>``."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{inner}": value for inner, value in flat_metrics(stage, value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat


def _configs(spec: PipelineSpec) -> tuple[Any, ...]:
    return (spec.prepare, spec.train, spec.evaluate, spec.predict)


def _params(spec: PipelineSpec) -> dict[str, Any]:
    """What MLflow shows as parameters: the settings, without this machine's paths."""
    plain = spec.model_dump(mode="json", exclude={"root", "storage", "tracking"})
    return {**plain, "recipe": Path(spec.recipe).name}


def _stage(field: str, name: str | None) -> str | None:
    if name is None:
        return None
    found = stage_name(name)
    if found is None:
        raise ConfigError("There is no such stage.", field=field, value=name, remedy=f"One of {', '.join(STAGES)}.")
    return found
