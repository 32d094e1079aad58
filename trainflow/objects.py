"""A pipeline's spec and its recorded runs as objects: what a run would do, how it goes, and what came of it."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import Store
from trainflow.flows.records.past_runs import RUNS, PastRun, find_run, list_runs, run_folder, take_result
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult, read_training_history
from trainflow.flows.run_stages import result_if_unchanged
from trainflow.flows.runs.run_details import RunDetails, read_details
from trainflow.flows.runs.run_status import prepare_resumption, read_status, require_unfinished
from trainflow.flows.server.api import prefect_api, quiet_environment
from trainflow.flows.spec.spec import PipelineSpec, load_spec, parse_spec, storage_here
from trainflow.flows.stages import require_stage

if TYPE_CHECKING:
    import pandas as pd

    from trainer_lib.model_folder.loaded import LoadedModel
    from trainflow.flows.lineage.lineage_chain import Chain
    from trainflow.flows.sweeps.sweep_result import SweepResult

    Place: TypeAlias = "str | os.PathLike[str] | Spec"

_REPORT = "report.html"
_REPORT_BYTES = 64 << 20
_FRAME_PX = 700


class Spec:
    """A checked spec.

    Attributes:
        settings: every field, as `trainflow.flows.spec.spec.PipelineSpec` describes it.
    """

    def __init__(self, settings: PipelineSpec) -> None:
        self.settings = settings

    @classmethod
    def load(cls, path: str | Path, *overrides: str) -> Spec:
        """Read a spec from a YAML or JSON file.

        Args:
            overrides: fields to set, as on the command line: ``"train.args.learning_rate=1e-3"``.

        Raises:
            ConfigError: the file cannot be read, or a field is unknown or has a wrong value.
        """
        return cls(load_spec(path, overrides))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Spec:
        """Make a spec from its fields; paths among them are absolute, or start from the working directory.

        Raises:
            ConfigError: a field is unknown or has a wrong value.
        """
        settings = parse_spec(fields)
        settings.check()
        return cls(settings)

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return self.settings.name

    @property
    def storage(self) -> str:
        """The folder or URL below which everything is kept."""
        return self.settings.storage

    def run(
        self,
        *,
        only: str | None = None,
        start: str | None = None,
        force: Sequence[str] = (),
        from_run: str | None = None,
        progress: bool = True,
    ) -> Run:
        """Run the pipeline in this process, and return the run. What is committed already is not run again.

        Workers train in separate processes, so this works in a notebook and inside of a running event loop, which
        it blocks: there, ``await asyncio.to_thread(spec.run)``.

        Args:
            only: run this stage alone.
            start: run from this stage on.
            force: stages that run again even if they are committed.
            from_run: id of an earlier run that gives the stages before the first.
            progress: show how it goes; False: show nothing.

        Raises:
            TrainflowError: a stage failed. What it had committed stays, and the same call continues.
        """
        only, start = require_stage(only, "only"), require_stage(start, "start")
        forced = [stage for name in force if (stage := require_stage(name, "force"))]
        choice = {"only": only, "start": start, "force": forced, "from_run": from_run}
        return Run.of(run_here(self.settings, progress=progress, **choice))

    def sweep(self, *, progress: bool = True) -> SweepResult:
        """Run the trials that its section `sweep` describes, in separate processes, and return what they came to.

        The same call continues with a sweep that was interrupted; no trial runs twice.

        Args:
            progress: show a line for each trial; False: show nothing.

        Raises:
            ConfigError: the spec has no sweep, or one that cannot work.
            TrainflowError: it ended before its last trial. What had ended stays, and the same call continues.
        """
        from trainflow.flows.cli import terminal
        from trainflow.flows.cli.commands import sweep as shown
        from trainflow.flows.sweeps.sweeping import run_sweep
        from trainflow.flows.sweeps.trial_specs import sweep_of

        display = shown.SweepDisplay(terminal.console(), sweep_of(self.settings), quiet=not progress)
        with display.status():
            result = run_sweep(self.settings, listener=display)
        result.raise_for_error()
        return result

    def why(self) -> pd.DataFrame:
        """Whether each stage is committed, and if not, what differs: columns hit, certain and reason. Runs nothing.

        Raises:
            ConfigError: the recipe or a source cannot be read. StorageError: the storage cannot be read.
        """
        import pandas as pd

        from trainflow.flows.planning.plan import Plan

        reasons = Plan.of(self.settings).reasons.values()
        rows = [(reason.stage, reason.hit, reason.certain, reason.reason) for reason in reasons]
        return pd.DataFrame(rows, columns=["stage", "hit", "certain", "reason"]).set_index("stage")

    def plan(self, *, probe: bool = False) -> Mapping[str, Any]:
        """The actions and costs of a run: stages, steps, memory under each strategy, room, time, and what cannot work.

        Args:
            probe: prepare the data if it is not, train a few real steps, and measure time and memory.

        Returns:
            What ``trainflow plan --json`` prints.
        """
        from trainflow.flows.planning.full_plan import plan_in_full
        from trainflow.flows.planning.plan import Plan

        return plan_in_full(Plan.of(self.settings), probe=probe).to_dict()

    def __repr__(self) -> str:
        return f"Spec({self.name!r}, storage={self.storage!r})"


@dataclass(init=False, repr=False, unsafe_hash=True)
class Run:
    """One recorded run. What it says is read from the storage when it is asked for, and of a run at work changes.

    Args:
        name: its id or the beginning of it, its name, a tag, the id of its MLflow run, ``last``, or its folder:
            ``<storage>/runs/<id>``.
        storage: the folder or URL below which it was recorded, or the `Spec` that was run; None: that of the spec in
            the working directory (``pipeline.yaml``, else the only one), else ``.trainflow`` there.

    Raises:
        ConfigError: no such run, or several; or no storage was named and the working directory has none.
        StorageError: the storage cannot be read.
    """

    storage: str
    id: str

    def __init__(self, name: str, *, storage: Place | None = None) -> None:
        if storage is None and f"/{RUNS}/" in name:
            storage, _, name = name.rstrip("/").rpartition(f"/{RUNS}/")
        self.storage = _storage_of(storage)
        self.id = find_run(self.storage, name, field="run").id

    @classmethod
    def of(cls, result: PipelineResult) -> Run:
        """The run that a result belongs to."""
        return cls(result.pipeline_key[:RUN_ID_CHARS], storage=result.storage)

    @classmethod
    def _listed(cls, storage: str, run_id: str) -> Run:
        """A run that is known to be recorded, so that it is not looked for."""
        run = cls.__new__(cls)
        run.storage, run.id = storage, run_id
        return run

    # -- how it is ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name in Prefect and MLflow: the pipeline's, short settings, a counter."""
        recorded = self._recorded
        return recorded.run_name or recorded.name

    @property
    def status(self) -> str:
        """The state: running, suspended, silent, finished, failed, stopped or died."""
        return read_status(self.storage, self._recorded).state

    @property
    def url(self) -> str:
        """Its folder."""
        return run_folder(self.storage, self.id).url

    @property
    def mlflow_run_id(self) -> str | None:
        """The id of its MLflow run; None: it has none, or its server has not given it one yet."""
        return self._recorded.mlflow_run_id

    @property
    def stages(self) -> pd.DataFrame:
        """Its stages by name: columns state, seconds, reason, committed, rows, url."""
        import pandas as pd

        names = ["stage", "state", "seconds", "reason", "committed", "rows", "url"]
        rows = [[getattr(stage, name) for name in names] for stage in self.details().stages]
        return pd.DataFrame(rows, columns=names).set_index("stage")

    def details(self) -> RunDetails:
        """Everything that is recorded: spec, arguments, code, versions, places, attempts (`trainflow show --json`)."""
        status = read_status(self.storage, self._recorded)
        return read_details(self.storage, status.run, is_at_work=status.is_at_work)

    # -- what came of it ----------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> pd.DataFrame:
        """The metrics of its stages: by metric, the column value."""
        import pandas as pd

        found = pd.Series(self.details().metrics, dtype="float64", name="value").rename_axis("metric")
        return found.to_frame()

    @property
    def history(self) -> pd.DataFrame:
        """The training's log: a row for each optimizer step with a log, a column for each name.

        Raises:
            DamagedError: the log is torn. StorageError: the storage cannot be read.
        """
        import pandas as pd

        stage = self.details().stage("train")
        if stage is None or stage.url is None:
            return pd.DataFrame(index=pd.Index([], name="step", dtype="int64"))
        try:
            entries = read_training_history(Store.open(stage.url))
        except ValueError as error:
            raise DamagedError("The log of the training is torn.", field="history", value=stage.url) from error
        table = pd.DataFrame(entries)
        # Several entries may have one step: its loss, and its evaluation.
        return table.groupby("step").first() if len(table) else table

    def predictions(self) -> pd.DataFrame:
        """The predictions, a row for each row of the split, with its id.

        Raises:
            ConfigError: it has no committed predictions. StorageError: they cannot be read.
        """
        from trainer_lib.data.rows.predictions import read_predictions

        found, why = take_result(self.storage, self._recorded, "predict")
        if found is None:
            remedy = "Run its pipeline again, which makes what is missing."
            raise ConfigError(f"There is no result of predict: {why}.", field="run", value=self.id, remedy=remedy)
        paths = sorted(entry.path for entry in found.files if entry.path.endswith(".parquet"))
        table: pd.DataFrame = read_predictions(found.store(), paths).to_pandas()
        return table

    def load_model(self) -> LoadedModel:
        """Its trained model, ready to predict new rows. The recipe's code is executed.

        Raises:
            ConfigError: it has no trained model. DamagedError: a file was altered.
        """
        from trainer_lib.model_folder.loaded import load_model

        return load_model(self.url)

    @property
    def lineage(self) -> Chain:
        """The lineage of its model: sources, stages, checkpoints, MLflow run, publication.

        Raises:
            ConfigError: nothing is recorded of it. DamagedError: the record was altered.
        """
        from trainflow.flows.lineage.lineage_chain import find_chain

        return find_chain(self.url)

    # -- going on -----------------------------------------------------------------------------------------------------

    def resume(self, from_stage: str | None = None, *, progress: bool = True) -> Run:
        """Go on with it, with its own spec and overrides; what is committed is not run again.

        Args:
            from_stage: take the stages before this one from the run, whatever changed since, and begin there; None:
                go on where it stopped.
            progress: show how it goes.

        Returns:
            The run that went on: this one, or another one where the recipe was changed.

        Raises:
            ConfigError: it has finished, is running, or lacks something that is not on this machine.
            TrainflowError: a stage failed.
        """
        past = self._recorded
        status = read_status(self.storage, past)
        at_work = status if status.is_at_work else None
        first = require_stage(from_stage, "from_stage")
        if first is None or at_work is not None:
            require_unfinished(past, at_work, named=self.id)
        spec, choice = prepare_resumption(self.storage, past, print if progress else lambda _: None)
        if first is not None:
            choice = {"start": first, "from_run": self.id}
        return Run.of(run_here(spec, progress=progress, **choice))

    # -- in a notebook ------------------------------------------------------------------------------------------------

    def report(self) -> str:
        """Its report, a whole page of HTML.

        Raises:
            ConfigError: it has none yet.
        """
        data = run_folder(self.storage, self.id).read_if_exists(_REPORT, limit=_REPORT_BYTES)
        if data is None:
            raise ConfigError("This run has no report yet.", field="run", value=self.id, remedy="Wait for its end.")
        return data.decode()

    def _repr_html_(self) -> str | None:
        """The report, as a notebook shows it: in a frame of its own, which runs no scripts."""
        try:
            text = html.escape(self.report(), quote=True)
        except ConfigError:
            return None
        return f'<iframe srcdoc="{text}" sandbox width="100%" height="{_FRAME_PX}" style="border:0"></iframe>'

    def __repr__(self) -> str:
        return f"Run({self.id!r}, name={self.name!r}, status={self.status!r})"

    @property
    def _recorded(self) -> PastRun:
        return find_run(self.storage, self.id, field="run")


def runs(storage: Place | None = None) -> list[Run]:
    """Every run that is recorded below a storage, the newest first.

    Args:
        storage: a folder, a URL or a `Spec`; None: as for `Run`.

    Raises:
        ConfigError: no storage was named, and the working directory has none. StorageError: it cannot be read.
    """
    place = _storage_of(storage)
    return [Run._listed(place, past.id) for past in list_runs(place)]


def run_here(spec: PipelineSpec, *, progress: bool, **choice: Any) -> PipelineResult:
    """Run a pipeline.

    Args:
        progress: show how it goes: drawn on a terminal, lines elsewhere, also in a notebook.
        choice: which stages, as `trainflow.flows.pipeline.run_pipeline` takes them.

    Raises:
        TrainflowError: a stage failed; the run so far is recorded, and the same call continues with it.
    """
    Store.open(spec.storage).ensure_writable()  # before an engine starts, which takes seconds
    quiet_environment()
    with _shown(progress):
        if (unchanged := result_if_unchanged(spec, **choice)) is not None:
            return unchanged
    with prefect_api():
        from trainflow.flows.pipeline import run_pipeline

        with _shown(progress):
            result = run_pipeline(spec, **choice)
    result.raise_for_error()
    return result


def _shown(progress: bool) -> AbstractContextManager[None]:
    from trainflow.flows.cli import terminal

    return terminal.followed(terminal.console(quiet=not progress), debug=False)


def _storage_of(place: Place | None) -> str:
    """The storage that a caller names, else that of the working directory."""
    settings = getattr(place, "settings", None)
    if isinstance(settings, PipelineSpec):
        return settings.storage
    if isinstance(place, str | os.PathLike) and os.fspath(place):
        return os.fspath(place)
    if place:
        why = "This is neither a folder nor a URL nor a Spec."
        raise ConfigError(why, field="storage", value=repr(place), remedy='Name it: storage="…".')
    if (found := storage_here()) is not None:
        return found
    what = "No storage was named, and the working directory has neither a single spec nor .trainflow."
    raise ConfigError(what, field="storage", remedy='Name it: storage="…", a folder or a URL.')
