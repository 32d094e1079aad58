"""A run's records of its trained model: its description, the model in MLflow, pictures and samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import from_record
from trainer_lib.errors import CodeError, StorageError, StorageGoneError, TrainflowError
from trainer_lib.hub.pictures import as_file
from trainer_lib.model_folder.description import FILE as MODEL_FILE
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow.mlflow_registry import OUTCOME_FILE, Registered
from trainer_lib.trackers.mlflow.model_record import Flavor
from trainer_lib.trackers.names import slice_tables
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.flows.spec.sweep_settings import TRIAL
from trainflow.tasks.configs import RegisterConfig
from trainflow.tasks.model.logged_models import (
    LoggedModel,
    describe_exported,
    describe_flavor,
    link_evaluation,
    log_models,
    log_outputs,
    register_model,
)
from trainflow.tasks.model.outcome_tables import Outcome, read_answers, read_outcomes
from trainflow.tasks.model.portable_model import write_description
from trainflow.tasks.stage.facts import EvaluateFacts, PredictFacts, PrepareFacts, TrainFacts
from trainflow.tasks.stage.gates import judge
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.tracking import mlflow_run as tracking
from trainflow.tasks.tracking.mlflow_run import TrackedRun

_TABLES = "mlflow.loggedArtifacts"  # the tag by which MLflow's page finds tables
_log = logging.getLogger(__name__)


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


_OUTCOME_BYTES = 1 << 20


class ModelTracking:
    """Follows the stages of a run, and describes the model once data and training are there.

    Args:
        folder: the run's folder.
        run: the MLflow run; None without MLflow, and for a run that changes nothing.
        keeps_description: whether a description in the folder stays as it is.

    Attributes:
        registered: the name, with the flavor, under which the model was registered by this run.
    """

    def __init__(self, plan: Plan, folder: Store, run: tracking.TrackedRun | None, *, keeps_description: bool) -> None:
        self.registered: str | None = None
        self._plan, self._folder, self._run = plan, folder, run
        self._keeps_description = keeps_description
        self._data: StageManifest[PrepareFacts] | None = None
        self._exported: LoggedModel | None = None
        self._flavor: Flavor | None = None

    def note_stage(self, manifest: StageManifest) -> None:
        """Take note of a stage's committed result."""
        self._describe(manifest)
        run, exported = self._run, self._exported
        if run is None or exported is None:
            return
        if isinstance(manifest.facts, EvaluateFacts):
            link_evaluation(run, exported, manifest)
            info = {} if self._data is None else self._data.facts.info
            write_or_warn("pictures of the evaluation", partial(log_outcomes, self._plan.spec, run, manifest, info))
            self._register(run, exported, manifest)
        if isinstance(manifest.facts, PredictFacts):
            write_or_warn("predicted columns", partial(log_outputs, run, exported, manifest))

    def read_outcome(self, *, waits: bool) -> Registered | None:
        """The outcome of this run's registration; None if it asked for none, or if it is not known.

        Args:
            waits: give the server some seconds to decide it.
        """
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
            self._exported = describe_exported(trained, self._data, manifest)
            if self._run is not None:
                log_models(self._run, trained, self._data, manifest)
            if context.flavor is not None:
                self._flavor = describe_flavor(trained.description, self._data, manifest)
        except (StorageError, CodeError) as unwritten:  # the model is committed all the same
            _log.warning("The model could not be described: %s", unwritten)

    def _register(self, run: tracking.TrackedRun, exported: LoggedModel, manifest: StageManifest) -> None:
        is_whole = self._flavor is not None or self._plan.context.flavor is None
        if is_whole and judge(self._plan.spec.evaluate, manifest).passed:
            self._folder.delete(OUTCOME_FILE)  # of an earlier command, perhaps about another name
            register_model(run, exported, manifest, self._plan.spec.register, self._flavor, kept_in=self._folder.url)
            self.registered = registered_as(self._plan.spec.register)


def registered_as(config: RegisterConfig) -> str | None:
    """The name of the registered model, with the flavor that it has: what a run has done for the registry."""
    return config.name if config.name is None or config.flavor is None else f"{config.name} ({config.flavor})"


def write_or_warn(what: str, write: Callable[[], object]) -> None:
    """Write a part of what a run keeps; where that fails, the run goes on with a warning."""
    try:
        write()
    except StorageGoneError as gone:  # the run fails for that reason, which is said once
        _log.debug("The run's %s was not written: %s", what, gone)
    except Exception as unwritten:  # how the run ends must not depend on it
        _log.warning("The run's %s could not be written: %s", what, unwritten)
        _log.debug("The %s", what, exc_info=True)
