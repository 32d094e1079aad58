"""A run's records of its trained model: the description that `load_model` reads, and the model in MLflow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import from_record
from trainer_lib.errors import CodeError, StorageError, StorageGoneError
from trainer_lib.model_folder.description import FILE as MODEL_FILE
from trainer_lib.storage import Store
from trainer_lib.trackers.mlflow.mlflow_registry import OUTCOME_FILE, Registered
from trainer_lib.trackers.mlflow.model_record import Flavor
from trainflow.flows.planning.plan import Plan
from trainflow.flows.reports.charts import load_matplotlib
from trainflow.flows.reports.run_images import log_outcomes
from trainflow.tasks.configs import RegisterConfig
from trainflow.tasks.model.logged_models import (
    LoggedModel,
    describe_exported,
    link_evaluation,
    log_models,
    log_outputs,
    register_model,
)
from trainflow.tasks.model.model_flavor import describe_flavor
from trainflow.tasks.model.portable_model import write_description
from trainflow.tasks.stage.facts import EvaluateFacts, PredictFacts, PrepareFacts, TrainFacts
from trainflow.tasks.stage.gates import judge
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.tracking import mlflow_run as tracking

_OUTCOME_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class ModelTracking:
    """Follows the stages of a run, and describes the model once data and training are there.

    Pictures are drawn in a thread, because the next stage need not wait for them.

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
        self._drawing = ThreadPoolExecutor(1, "trainflow-drawing")

    def note_begin(self, stage: str) -> None:
        """Take note of a stage that begins."""
        if stage == "train":
            self._drawing.submit(load_matplotlib)  # the report takes it, too

    def note_stage(self, manifest: StageManifest) -> None:
        """Take note of a stage's committed result."""
        self._describe(manifest)
        run, exported = self._run, self._exported
        if run is None or exported is None:
            return
        if isinstance(manifest.facts, EvaluateFacts):
            link_evaluation(run, exported, manifest)
            info = {} if self._data is None else self._data.facts.info
            log = partial(log_outcomes, self._plan.spec, run, manifest, info)
            self._drawing.submit(write_or_warn, "pictures of the evaluation", log)
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

    def close(self) -> None:
        """Wait for the pictures. Safe to repeat."""
        self._drawing.shutdown()

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
