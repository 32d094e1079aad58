"""The record that a pipeline run keeps in a folder of its storage, and its MLflow run.

<storage>/runs/<pipeline key[:16]>/
    run.json       the stages that are committed, for runs that resume from this one (`flows.records.past_runs`);
                   the MLflow run: unfinished -> taken up by the next command; finished -> linked to
    spec.yaml      the spec as it was resolved
    keys.json      what the spec and the recipe decide of the stages' keys: what has changed since
    arguments.json every training argument of the stages, as this machine worked them out
    source/        the recipe's source closure
    trainflow_model.json   where the trained model's files lie, for `load_model`
    lineage.json   what was made from what, with digests; written when the run ends, removed when it continues
    report.html    what ran, how long, the curve, the metrics
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from trainer_lib.base.json_text import parse_json
from trainer_lib.errors import Interrupted, Preempted, Pruned, StorageError, TrainflowError
from trainer_lib.hub.pictures import as_file
from trainer_lib.model_folder.lineage import FILE as LINEAGE_FILE
from trainer_lib.model_folder.locate import trust_storage
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records import past_runs, results
from trainflow.flows.records.ending import expected_ending
from trainflow.flows.records.prefect_runs import current_flow_run_id
from trainflow.flows.records.recorded_spec import write_lineage
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult
from trainflow.flows.records.run_names import name_run
from trainflow.flows.reports.report import LOSS, REPORT, collect_sections, draw_charts, render_report, render_summary
from trainflow.flows.reports.run_tracking import ModelTracking, RunTracking, log_charts, registered_as, write_or_warn
from trainflow.flows.stages import all_stages
from trainflow.tasks.prefect.prefect_client import quick_client
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.progress import Event, subscribe
from trainflow.tasks.stage.retry import now
from trainflow.tasks.tracking import mlflow_run as tracking

LIMIT_S = 3.0
_MOST_ENTRIES = 20_000
_log = logging.getLogger(__name__)


def has_nothing_to_do(plan: Plan, record: Mapping[str, Any]) -> bool:
    """Whether all results of a plan are committed, and its record finished, tracked and registered as asked."""
    spec = plan.spec
    if record.get("status") != "FINISHED" or plan.context.force:
        return False
    if not all(reason.hit for name, reason in plan.reasons.items() if plan.is_wanted(name)):
        return False
    if not spec.tracking.enabled:
        return True
    # A finished run that was not recorded in MLflow then gets its MLflow run now.
    is_tracked = record.get("mlflow_run_id") or tracking.is_known(Store.open(spec.storage), record.get("tracked_run"))
    registers = spec.register.name is not None and "evaluate" in plan.stages and plan.is_wanted("evaluate")
    return bool(is_tracked) and (not registers or record.get("registered") == registered_as(spec.register))


class RunRecord:
    """The record of one run as a context: entered before the first stage, left with the report written.

    The report is also written when a stage has ended.

    Args:
        plan: what the run does.
        result: filled by the flow while the stages run; this adds key, MLflow run, report and duration.
    """

    def __init__(self, plan: Plan, result: PipelineResult) -> None:
        self.plan = plan
        self.result = result
        self.tracked: tracking.TrackedRun | None = None
        self.folder = past_runs.run_folder(plan.spec.storage, self.id)
        self._start_s = time.monotonic()
        self._started = now()
        self._record: dict[str, Any] = {}
        self._stages: dict[str, str] = {}
        self._worked_in: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self._tracking: RunTracking | None = None
        self._is_unchanged = False
        self._is_reported = False
        self._waits = True
        self._leftovers: tracking.Background | None = None
        self._model: ModelTracking | None = None
        self.charts: dict[str, str] = {}  # title -> SVG of the curves, once the report was written
        # Returns what the events of this command's training had for the log.
        self.logged: Callable[[], list[dict[str, Any]]] = list

    @property
    def id(self) -> str:
        """The run's id: the name of its folder."""
        return self.plan.pipeline_key[:RUN_ID_CHARS]

    def __enter__(self) -> Self:
        self.result.pipeline_key = self.plan.pipeline_key
        self._record = past_runs.read_record(self.folder)
        try:
            self._open_tracking()
            self._model = ModelTracking(self.plan, self.folder, self.tracked, keeps_description=self._is_unchanged)
        except BaseException:
            # Python calls no `__exit__` after an `__enter__` that raised.
            self._finish_tracking("FAILED", stages=0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TrainflowError):
            self.result.error = error
        status = "FINISHED" if error is None else "FAILED"
        if error is not None and (isinstance(error, Interrupted | Preempted) or not isinstance(error, Exception)):
            status = "PRUNED" if isinstance(error, Pruned) else "KILLED"
        self.result.seconds = round(time.monotonic() - self._start_s, 3)
        stages = 0 if expected_ending().delivers_later else len(self.plan.stages)
        for _ in range(3):
            try:
                self._close(status, stages=stages)
                return
            except BaseException as stop:
                if isinstance(stop, Exception):
                    raise
                # A signal: closing is safe to repeat, and half a closing is worse than none. It waits for nothing now.
                stages = 0

    def _close(self, status: str, *, stages: int) -> None:
        """Write the record and the report, and end the MLflow run; what MLflow cannot take now waits on the disk."""
        try:
            write_or_warn("report", self._write_report)
            if self._tracking is not None:
                write_or_warn("description", self._tracking.describe_end)
                # Before the record: a run that is recorded as finished is not taken up again to end it in MLflow.
                self._tracking.end(status)
                if self._tracking.is_discarded():
                    self.result.mlflow_run_id = self.result.run_url = self.result.tracking_uri = None
            # A run that changed nothing leaves the finished record alone; one without MLflow is RUNNING and must end.
            is_over = self.tracked is None and self._record.get("status") != "RUNNING"
            if not is_over or not self.folder.exists(past_runs.RUN_FILE):
                write_or_warn("record", lambda: self._write_record(status))
        finally:
            self._finish_tracking(status, stages=stages)
        # After the MLflow run has got its id.
        if not self._is_unchanged or not self.folder.exists(LINEAGE_FILE):
            write_or_warn("lineage", lambda: write_lineage(self.plan.spec.storage, self.folder, self._record))

    # -- the MLflow run -----------------------------------------------------------------------------------------------

    def _open_tracking(self) -> None:
        plan, spec = self.plan, self.plan.spec
        known = self._record
        storage = Store.open(spec.storage)
        finished = known.get("status") == "FINISHED"
        self.result.mlflow_run_id = known.get("mlflow_run_id")
        self.result.tracking_uri = known.get("tracking_uri")
        self.result.run_url = known.get("run_url")
        self.result.run_name = known.get("run_name")
        if has_nothing_to_do(plan, known):
            self._is_unchanged = True  # the finished run, and its report, stand for it
            self._leftovers = tracking.deliver_waiting(spec.tracking, storage)
            return
        self._keep_sources()
        trust_storage(spec.storage)
        # A run that continues keeps its name; what a finished run does again is another one.
        self.result.run_name = None if finished else known.get("run_name")
        self.result.run_name = self.result.run_name or name_run(spec, self.id)
        self._worked_in = dict(known.get("worked_in") or {})
        hits = {name: reason.manifest for name, reason in plan.reasons.items() if name not in plan.context.force}
        self._stages = {name: manifest.key for name, manifest in hits.items() if manifest is not None}
        self._tracking = RunTracking.open(plan, self.result, self.id, known=known)
        if self._tracking is not None:
            self.tracked = self._tracking.run
            handle = self.tracked.handle
            self.result.mlflow_run_id, self.result.run_url = handle.run_id, handle.ui_url()
            self.result.tracking_uri = handle.server
        self._write_record("RUNNING")

    def _finish_tracking(self, status: str, *, stages: int) -> None:
        spec = self.plan.spec
        if self._tracking is not None:
            self._tracking.finish(status, stages=stages)
        elif self._leftovers is not None and stages:
            # Delivering is all that is left to do for a command whose stages are cached.
            self._leftovers.complete()
        elif self._leftovers is not None:
            self._leftovers.close(stages=0)
        if not spec.tracking.enabled:
            return
        storage = Store.open(spec.storage)
        try:
            waiting = tracking.find_waiting(storage)
            self.result.mlflow_waiting = None if waiting is None else f"{waiting} in {waiting.root}"
            if self._tracking is None and not self._is_unchanged:
                place = tracking.spool_dir(storage)
                self.result.mlflow_waiting = f"what this run logged, which could not be kept in {place}"
        except OSError as error:  # the run has ended: what waits is a line of its summary
            _log.warning("What waits for MLflow cannot be counted: %s", error)
        self._note_run_id(storage)

    def _note_run_id(self, storage: Store) -> None:
        """Complete the record with the MLflow run's id, once the server has given it one."""
        token = self._record.get("tracked_run")
        if token is None:
            return
        uri = tracking.tracking_uri(self.plan.spec.tracking, storage)
        handle = tracking.RunHandle(str(token), "", uri, str(tracking.spool_dir(storage)))
        # A run that was deleted in MLflow has got another one under the same token.
        if handle.run_id not in (None, self._record.get("mlflow_run_id")):
            found = {"mlflow_run_id": handle.run_id, "run_url": handle.ui_url()}
            self.result.mlflow_run_id, self.result.run_url = found["mlflow_run_id"], found["run_url"]
            with contextlib.suppress(StorageError):
                self._save({**self._record, **found})

    # -- the folder ---------------------------------------------------------------------------------------------------

    def _write_report(self) -> None:
        self.result.report_url = f"{self.folder.url}/{REPORT}"  # its links are relative to where it lies
        if self._is_reported:
            return
        # The report there shows when the stages ran; a new one would show only cached stages.
        if self._is_unchanged and self.result.ok and self.folder.exists(REPORT):
            return
        # Only the first call waits for the registry: a signal may interrupt that.
        waits, self._waits = self._waits and self.result.ok, False
        more: dict[str, Any] = {}
        if self._model is not None and self._model.registered is not None:
            more = {"registered": self._model.read_outcome(waits=waits), "registers": self._model.registered}
        text = self._replace_report(more)
        if self.tracked is not None:
            self.tracked.log_file(text, REPORT)
            log_charts(self.plan.spec, self.tracked, self.charts)
        self._is_reported = True

    def _replace_report(self, more: Mapping[str, Any], *, is_over: bool = True) -> str:
        result = {**self.result.to_dict(), "started": self._started, **more}
        self.charts = draw_charts(self._read_history())
        sections = collect_sections(self.plan, self.result)
        text = render_report(result, self.charts, sections=sections, spec=mask(self.plan.spec_text), is_over=is_over)
        self.folder.replace(REPORT, text.encode())
        return text

    def _read_history(self) -> list[dict[str, Any]]:
        """The trainer's log, from the stage that left one; of a training that failed, what it had logged until then."""
        for manifest in self.result.manifests().values():
            with contextlib.suppress(ValueError, StorageError):
                if history := results.read_training_history(manifest.store()):
                    return history
        return self.logged()

    def note_begin(self, stage: str, key: str) -> None:
        """Record the folder that a stage is about to look into, so that nothing in it is cleaned up from now on."""
        if key in (self._record.get("stages", {}).get(stage), self._worked_in.get(stage)):
            return
        self._worked_in[stage] = key
        self._try_to_save(worked_in=dict(self._worked_in))

    def note_stage(self, manifest: StageManifest) -> None:
        """Record that a stage's result is committed: of a run that dies later, this is what is known."""
        self._stages[manifest.stage] = manifest.key
        if self._model is not None:
            self._model.note_stage(manifest)
        # A finished run that changes nothing stays as it is recorded, unless an older version recorded it.
        if self._record.get("stages", {}).get(manifest.stage) == manifest.key:
            return
        self._try_to_save(stages={**self._record.get("stages", {}), manifest.stage: manifest.key})
        self.result.seconds = round(time.monotonic() - self._start_s, 3)
        write_or_warn("report", lambda: self._replace_report({}, is_over=False))

    def _try_to_save(self, **changes: Any) -> None:
        try:
            self._save({**self._record, **changes})
        except StorageError as unwritten:  # what is committed stays committed
            _log.warning("The run's record could not be written: %s", unwritten)

    def _write_record(self, status: str) -> None:
        failed = [outcome.stage for outcome in self.result.stages if outcome.status == "failed"]
        plan, known = self.plan, self._record.get("tracked_run")
        if self._tracking is not None:
            known = None if self._tracking.is_discarded() else self._tracking.run.handle.token
        as_of = plan.context.resolver.as_of
        self._save(
            {
                "format": 1,
                "name": plan.spec.name,
                "pipeline_key": self.result.pipeline_key,
                "status": status,
                # A run has this before its server was reached.
                "tracked_run": known,
                "tracked_since": self._record.get("tracked_since") if self._tracking is None else self._tracking.since,
                "mlflow_run_id": self.result.mlflow_run_id,
                "tracking_uri": self.result.tracking_uri,
                "run_url": self.result.run_url,
                "registered": (self._model and self._model.registered) or self._record.get("registered"),
                "run_name": self.result.run_name,
                "started": self._started,
                "as_of": as_of.isoformat() if as_of is not None else self._started,
                "ended": None if status == "RUNNING" else now(),
                "stages": self._stages,
                "worked_in": self._worked_in,
                "planned": [name for name in plan.stages if plan.is_wanted(name)],
                "outcomes": results.describe_outcomes(self.result.stages, self._record.get("outcomes")),
                "metrics": results.collect_metrics(self.result.stages) or self._record.get("metrics", {}),
                "failed": failed[0] if failed else None,
                "only": plan.only,
                "start": plan.start,
                "force": sorted(plan.context.force),
                "from_run": None if plan.past is None else plan.past.id,
                "limit": plan.spec.limit,
                "sources": self._sources,
                **{name: plan.spec.tracking.tags.get(f"trainflow.{name}") for name in ("sweep", "trial")},
            }
        )

    def _save(self, record: dict[str, Any]) -> None:
        self._record = record
        past_runs.write_record(self.folder, record)

    def _keep_sources(self) -> None:
        """Write the spec and the recipe's files as they are now, so that another machine can do the same."""
        spec, resolver = self.plan.spec, self.plan.context.resolver
        # It has the digests of the files that are written now.
        self.folder.delete(LINEAGE_FILE)
        self.folder.write_bytes(past_runs.SPEC_FILE, self.plan.spec_text.encode())
        keys = {name: parse_json(key.to_json()) for name, key in self.plan.early_keys.items()}
        self.folder.write_bytes(past_runs.KEYS_FILE, json.dumps(keys).encode())
        arguments = {name: stage.arguments.to_dict() for name, stage in self.plan.stages.items() if stage.arguments}
        self.folder.write_bytes(past_runs.ARGUMENTS_FILE, json.dumps(arguments).encode())
        own = {getattr(stage.config(spec), "recipe", None) for stage in all_stages()}
        for recipe in sorted({spec.recipe, *(name for name in own if name)}):
            for name, path in resolver.closure(recipe, spec.root).paths.items():
                content = path.read_bytes()
                self.folder.write_bytes(f"source/{name}", content)
                self._sources[name] = hashlib.sha256(content).hexdigest()


# -- while it lasts, and in Prefect's UI ------------------------------------------------------------------------------


def collect_history(record: RunRecord) -> contextlib.AbstractContextManager[None]:
    """Collect the log of the training inside the block: the curve of one that fails."""
    history: list[dict[str, Any]] = []
    record.logged = lambda: list(history)

    def listen(event: Event) -> None:
        kind = event.get("event")
        if kind == "resume" and isinstance(event.get("history"), list):
            history[:] = [dict(entry) for entry in event["history"]]
        if kind == "log" and event.get("stage") == "train" and isinstance(event.get("logs"), dict):
            history.append({**event["logs"], "step": event.get("step")})
            # The curve is too dense to read: keep every other point.
            if len(history) > _MOST_ENTRIES:
                history[:] = history[::2]

    return subscribe(listen)


@contextlib.contextmanager
def run_artifacts(record: RunRecord) -> Iterator[None]:
    """After the block, give the Prefect run that this code runs in its artifacts: a summary, and the loss curve.

    A server that is gone or hangs costs the run `LIMIT_S` seconds and fails nothing.
    """
    try:
        yield
    finally:
        if (flow_run_id := current_flow_run_id()) is not None and record.result.stages:
            arguments = flow_run_id, record.result, record.charts
            thread = threading.Thread(target=_post, args=arguments, name="trainflow-artifacts", daemon=True)
            thread.start()
            thread.join(LIMIT_S)


def make_artifacts(result: PipelineResult, charts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The artifacts as Prefect's API takes them: key, type, data, description."""
    description = "What ran, with which results, and where it is"
    found = [{"key": "summary", "type": "markdown", "data": render_summary(result), "description": description}]
    if (drawing := charts.get(LOSS)) is not None:
        data = f"data:image/svg+xml;base64,{base64.b64encode(as_file(drawing)).decode()}"
        found.append({"key": "loss", "type": "image", "data": data, "description": "Loss by optimizer step"})
    return found


def _post(flow_run_id: Any, result: PipelineResult, charts: Mapping[str, str]) -> None:
    from prefect.client.schemas.actions import ArtifactCreate

    try:
        with quick_client(LIMIT_S) as client:
            for artifact in make_artifacts(result, charts):
                client.create_artifact(ArtifactCreate(**artifact, flow_run_id=flow_run_id))
    except Exception as error:  # the server is away: the run is not
        _log.debug("Prefect's server did not take the artifacts: %s", error)
