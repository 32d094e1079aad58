"""The MLflow run of a pipeline run: opened with its settings, sampled while it lasts, described at its end; its model.

Parameters are what decides the numbers, as the stages take it. How processes are started and what is published are in
the file of the whole spec.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from trainer_lib.arguments.configs.parallelism_config import data_size
from trainer_lib.arguments.numeric import numeric_fields
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import from_record
from trainer_lib.base.suggestions import to_markdown
from trainer_lib.errors import CodeError, ConfigError, DataError, Pruned, StorageError, StorageGoneError, TrainflowError
from trainer_lib.hub.pictures import as_file
from trainer_lib.model_folder.description import FILE as MODEL_FILE
from trainer_lib.secrets import mask
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow.mlflow_client import DISCARDED, FAILURE_TAG
from trainer_lib.trackers.mlflow.mlflow_registry import OUTCOME_FILE, Flavor, Registered
from trainer_lib.trackers.names import flatten_params, slice_tables
from trainflow.flows.planning.plan import Plan, StagePlan
from trainflow.flows.records.ending import expected_ending
from trainflow.flows.records.prefect_runs import configured_api, current_flow_run_id
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.reports.report import render_summary
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.flows.spec.sweep_settings import TRIAL
from trainflow.tasks.configs import RegisterConfig
from trainflow.tasks.model import logged_models
from trainflow.tasks.model.outcome_tables import Outcome, read_answers, read_outcomes
from trainflow.tasks.model.portable_model import write_description
from trainflow.tasks.stage.facts import EvaluateFacts, PrepareFacts, TrainFacts
from trainflow.tasks.stage.gates import judge
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.progress import Event, subscribe
from trainflow.tasks.stage.retry import now
from trainflow.tasks.tracking import mlflow_run as tracking
from trainflow.tasks.tracking.mlflow_run import TrackedRun

NOTE = "mlflow.note.content"
FAILED_STAGE = "trainflow.failed_stage"
PRUNED_TAG = "trainflow.pruned"
FLOW_RUN, FLOW_RUN_URL = "trainflow.prefect_flow_run", "trainflow.prefect_url"
SPEC_FILE, ARGUMENTS_FILE = "settings/spec.yaml", "settings/arguments.json"
NOTE_CHARS = 5000
# Of a stage: what changes no number, or stands in the file of the whole spec.
_ASIDE = {"launch", "retries", "enabled", "recipe", "require", "preemption", "rows_per_file", "shard_rows"}
EVERY_S = 10.0
_GPU_S = 5.0
_GPU_FIELDS = {
    "index": "",
    "utilization.gpu": "utilization_percentage",
    "memory.used": "memory_usage_megabytes",
    "power.draw": "power_usage_watts",
}
_MB = 1e6
_log = logging.getLogger(__name__)
_TABLES = "mlflow.loggedArtifacts"  # the tag by which MLflow's page finds tables
_OUTCOME_BYTES = 1 << 20


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
    return {SPEC_FILE: mask(plan.spec_text), ARGUMENTS_FILE: json.dumps(arguments, indent=2)}


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
    """The run, and the thread that samples this machine for it; `since`: when its first command began, as ISO time."""

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
        """Open the run, or take up the one of an earlier command, by its record `known`; None where tracking is off."""
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


class SystemLoad:
    """Calls `log` with a sample every ten seconds, until it is closed; the step is in seconds since the run began.

    Names are those of MLflow's own system metrics. A thread of the flow's process reads counters of the system, and
    nvidia-smi the GPUs; workers are not asked. Of several machines the leading one is sampled.

    Args:
        log: takes values by name and the step. What it raises ends the sampling.
        since_s: when the run began, in seconds since 1970.
        folder: its file system's use is sampled; None: of none.
    """

    def __init__(
        self,
        log: Callable[[Mapping[str, float], int], None],
        *,
        since_s: float,
        folder: Path | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._log = log
        self._since_s = since_s
        self._folder = folder
        self._every_s = every_s
        self._gpu_program = shutil.which("nvidia-smi")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainflow-system-load", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sampling. Safe to repeat."""
        self._ended.set()
        self._thread.join(_GPU_S)

    def _run(self) -> None:
        try:
            psutil.cpu_percent()  # the next call says what was used since this one
            while not self._ended.wait(self._every_s):
                self._log(self.sample(), max(0, round(time.time() - self._since_s)))
        except Exception as error:  # a sample is never worth a run
            _log.debug("The system's load is not sampled any more: %s", error)

    def sample(self) -> dict[str, float]:
        """The load now; the CPU's since the last sample."""
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / _MB,
            "system/system_memory_usage_percentage": memory.percent,
            "system/process_memory_megabytes": _memory_of_descendants() / _MB,
        }
        with contextlib.suppress(OSError):
            if self._folder is not None:
                values["system/disk_usage_percentage"] = psutil.disk_usage(str(self._folder)).percent
        return values | self._sample_gpus()

    def _sample_gpus(self) -> dict[str, float]:
        if self._gpu_program is None:
            return {}
        query = [self._gpu_program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_S, check=True)
        except (OSError, subprocess.SubprocessError):  # a driver without GPUs, or one that hangs
            self._gpu_program = None
            return {}
        return parse_gpus(done.stdout)


def parse_gpus(text: str) -> dict[str, float]:
    """The values in nvidia-smi's lines `index, percent, MiB, W`; those that a GPU does not report are left out."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        index, *cells = [cell.strip() for cell in line.split(",")]
        for name, cell in zip([name for name in _GPU_FIELDS.values() if name], cells, strict=False):
            with contextlib.suppress(ValueError):
                factor = 2**20 / _MB if name.startswith("memory") else 1.0
                values[f"system/gpu_{index}_{name}"] = float(cell) * factor
    return values


def _memory_of_descendants() -> int:
    """Bytes in memory of this process and all that it started; what they share is counted once, where Linux says so."""
    total = 0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    return total


def log_charts(spec: PipelineSpec, run: TrackedRun, charts: Mapping[str, str]) -> None:
    """Log the curves of a training as pictures (`plots/loss.svg`), but of a trial: its sweep's report has them."""
    for title, drawing in charts.items() if TRIAL not in spec.tracking.tags else ():
        run.log_file(as_file(drawing), f"plots/{title.lower().replace(' ', '-')}.svg")


def log_outcomes(spec: PipelineSpec, run: TrackedRun, evaluation: StageManifest, info: Mapping[str, Any]) -> None:
    """Log a confusion matrix and the calibration, or the residuals, of evaluated splits, and tables.

    The tables are of samples, of the rows that the model gets most wrong, and of the metrics of slices. A trial of a
    sweep has only tables.

    Args:
        info: what the recipe noted about the data; names of the classes are in `classes`.
    """
    tables = []
    for outcome in read_outcomes(evaluation, info):
        try:
            if TRIAL not in spec.tracking.tags:
                for name, drawing in outcome.drawings().items():
                    run.log_file(as_file(drawing), f"plots/{name}-{outcome.split}.svg")
            tables += _log_outcome(run, outcome)
        except (TrainflowError, ValueError, KeyError, TypeError) as error:  # a picture is never worth a run
            _log.warning("The outcomes of %s are not drawn: %s", outcome.split, error)
    tables += [_log_table(run, "answers", *table) for table in read_answers(evaluation)]
    for split, metrics in evaluation.metrics.items():
        for column, rows in slice_tables(metrics).items() if isinstance(metrics, Mapping) else ():
            tables.append(_log_table(run, f"slices-{split}-{column}", [column, *rows.columns], rows.cells))
    if tables:
        run.set_tags({_TABLES: json.dumps([{"path": path, "type": "table"} for path in tables])})


def _log_outcome(run: TrackedRun, outcome: Outcome) -> list[str]:
    """Log the tables of a split, and return their paths."""
    split, (columns, samples) = outcome.split, outcome.samples()
    residual = outcome.is_numbers
    rows = [[row, label, guess, guess - label if residual else label == guess] for row, label, guess in samples]
    columns = [*columns, "residual" if residual else "right"]
    tables = {split: (columns, rows), f"hardest-{split}": outcome.hardest(), f"confused-{split}": outcome.confusions()}
    shown = {name: outcome.with_inputs(table) for name, table in tables.items()}
    shown |= {f"importance-{split}": outcome.importance(), f"weak-{split}": outcome.weak_groups()}
    return [_log_table(run, name, *table) for name, table in shown.items() if table[1]]


def _log_table(run: TrackedRun, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    path = f"samples/{name}.json"
    run.log_file(json.dumps({"columns": list(columns), "data": [list(row) for row in rows]}), path)
    return path


class ModelTracking:
    """Follows the stages of a run, and describes the model once data and training are there.

    Args:
        run: the MLflow run; None without MLflow, and for a run that changes nothing.
        keeps_description: whether a description in the run's `folder` stays as it is.
    """

    def __init__(self, plan: Plan, folder: Store, run: tracking.TrackedRun | None, *, keeps_description: bool) -> None:
        # The name, with the flavor, under which the model was registered by this run.
        self.registered: str | None = None
        self._plan, self._folder, self._run = plan, folder, run
        self._keeps_description = keeps_description
        self._data: StageManifest[PrepareFacts] | None = None
        self._exported: logged_models.LoggedModel | None = None
        self._flavor: Flavor | None = None

    def note_stage(self, manifest: StageManifest) -> None:
        """Take note of a stage's committed result."""
        self._describe(manifest)
        run, exported = self._run, self._exported
        if run is None or exported is None:
            return
        if isinstance(manifest.facts, EvaluateFacts):
            logged_models.link_evaluation(run, exported, manifest)
            info = {} if self._data is None else self._data.facts.info
            write_or_warn("pictures of the evaluation", partial(log_outcomes, self._plan.spec, run, manifest, info))
            is_whole = self._flavor is not None or self._plan.context.flavor is None
            if is_whole and judge(self._plan.spec.evaluate, manifest).passed:
                config, kept_in = self._plan.spec.register, self._folder.url
                self._folder.delete(OUTCOME_FILE)  # of an earlier command, perhaps about another name
                logged_models.register_model(run, exported, manifest, config, self._flavor, kept_in=kept_in)
                self.registered = registered_as(config)

    def read_outcome(self, *, waits: bool) -> Registered | None:
        """The outcome of this run's registration, for which it `waits` some seconds; None: it is not known."""
        run, folder = self._run, self._folder
        if run is None or self.registered is None:
            return None
        if waits:
            run.wait_for(lambda: folder.exists(OUTCOME_FILE))
        found = folder.read_if_exists(OUTCOME_FILE, limit=_OUTCOME_BYTES)
        return None if found is None else from_record(Registered, parse_json(found), ignore_unknown=True)

    def _describe(self, manifest: StageManifest) -> None:
        """Once data and model are there, describe the model, so that `load_model` finds all of it from the folder."""
        if isinstance(manifest.facts, PrepareFacts):
            self._data = manifest
        if not isinstance(manifest.facts, TrainFacts) or self._data is None:
            return
        try:
            if self._keeps_description and self._folder.exists(MODEL_FILE):
                return
            config, context = self._plan.spec.publish_config(), self._plan.context
            trained = write_description(config, context, self._data, manifest, self._folder)
            self._exported = logged_models.describe_exported(trained, self._data, manifest)
            if self._run is not None:
                logged_models.log_models(self._run, trained, self._data, manifest)
            if context.flavor is not None:
                self._flavor = logged_models.describe_flavor(trained.description, self._data, manifest)
        except (StorageError, CodeError) as unwritten:  # the model is committed all the same
            _log.warning("The model could not be described: %s", unwritten)


def registered_as(config: RegisterConfig) -> str | None:
    """The name of the registered model, with the flavor that it has: what a run has done for the registry."""
    return config.name if config.name is None or config.flavor is None else f"{config.name} ({config.flavor})"


def write_or_warn(what: str, write: Callable[[], object]) -> None:
    """Write a part of what a run keeps; where that fails, the run continues with a warning."""
    try:
        write()
    except StorageGoneError as gone:  # the run fails for that reason, which is said once
        _log.debug("The run's %s was not written: %s", what, gone)
    except Exception as unwritten:  # how the run ends must not depend on it
        _log.warning("The run's %s could not be written: %s", what, unwritten)
        _log.debug("The %s", what, exc_info=True)
