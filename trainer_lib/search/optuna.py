"""Searching with Optuna: rank 0 holds the study, and all ranks train the same trials.

A study in a storage (`storage="sqlite:///search.db", study_name=…, load_if_exists=True`) outlives its process. A trial
that was preempted, or whose process on this machine died, is recorded as failed. Its parameters are tried again before
any others, from the trial's last checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.base.outputs import BestRun
from trainer_lib.base.suggestions import suggestion
from trainer_lib.distributed.communicator import run_on_all_ranks
from trainer_lib.errors import (
    ConfigError,
    MissingExtraError,
    NonFiniteError,
    OutOfMemoryError,
    Preempted,
    from_exception,
    from_record,
)
from trainer_lib.guard import start_time
from trainer_lib.search.base import (
    SearchSettings,
    SharedTrial,
    TrialPruned,
    TrialRun,
    default_hp_space_optuna,
    json_values,
    parse_objective,
    require_end,
)

if TYPE_CHECKING:
    from trainer_lib.search.trials import TrialRunner
_log = logging.getLogger(__name__)
_STUDY = ("storage", "sampler", "pruner", "study_name", "load_if_exists")
_RUNNING = ("timeout", "n_jobs", "gc_after_trial", "catch")
_PROCESS, _CONTINUES, _FOLDER = "trainflow:process", "trainflow:continues", "trainflow:folder"
_NAME = re.compile(r"[^/\\\0]{1,200}")
_REMEDY = 'Return for example {"learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True)}.'


class _TrialFailed(Exception):
    """This trial counts as failed; the search continues."""


class OptunaSearch:
    """One call of `hyperparameter_search`."""

    name = "optuna"

    def __init__(self, runner: TrialRunner, settings: SearchSettings) -> None:
        try:
            import optuna
        except ImportError:
            what = "A hyperparameter search needs the package optuna."
            raise MissingExtraError(what, field="backend", value="optuna", extra="search") from None
        self._optuna: Any = optuna
        self._runner = runner
        self._comm = runner.comm
        self._settings = settings
        self._space = settings.hp_space = settings.hp_space or default_hp_space_optuna
        self._options = dict(settings.options)
        self._check_options()
        self._study: Any = None
        self._storage: Any = None
        self._trial: Any = None  # rank 0: the trial that runs
        self._failure: Exception | None = None  # the error of the newest failed trial
        self._known: BaseException | None = None  # an error that every rank has raised already

    def _check_options(self) -> None:
        for name in self._options:
            if name not in (*_STUDY, *_RUNNING):
                what = "This option does not exist."
                raise ConfigError(what, field=name, remedy=suggestion(name, (*_STUDY, *_RUNNING)))
        if self._options.get("n_jobs", 1) != 1:
            what = "One Trainer trains one trial at a time."
            remedy = "Start the search several times on one storage, with load_if_exists=True."
            raise ConfigError(what, field="n_jobs", value=self._options["n_jobs"], remedy=remedy)
        if self._options.get("catch") and self._comm.world_size > 1:
            what = "An error of one process cannot be caught while the others train on."
            remedy = "Remove it; trials whose loss is not finite are recorded as failed anyway."
            raise ConfigError(what, field="catch", remedy=remedy)
        require_end(self._settings, "timeout")

    def run(self) -> BestRun | list[BestRun]:
        """Run all trials, one after the other; return the best. Collective."""
        try:
            run_on_all_ranks(self._comm, self._open_study)
            if self._comm.rank == 0:
                self._lead()
            else:
                self._follow()
            found = self._comm.broadcast_json(run_on_all_ranks(self._comm, self._summary))
            best, trials = found["best"], found["trials"]
            runs = [BestRun(run["run_id"], run["objective"], run["hyperparameters"], trials) for run in best]
            return runs[0] if len(self._settings.directions) == 1 else runs
        finally:
            # Open sessions and pooled connections would keep the database locked for the next search.
            if self._storage is not None:
                self._storage.remove_session()
                self._storage.engine.dispose()

    def _lead(self) -> None:
        """Rank 0: Optuna's own loop. Every trial, the end and an error are broadcast to the other ranks."""
        options = {name: self._options[name] for name in ("timeout", "gc_after_trial") if name in self._options}
        catch = self._options.get("catch") or ()
        catch = (_TrialFailed, *(catch if isinstance(catch, tuple | list) else [catch]))
        try:
            self._study.optimize(self._objective, n_trials=self._settings.n_trials, catch=catch, **options)
        except BaseException as error:
            if error is not self._known:  # the storage failed, for example: the other ranks wait for the next trial
                self._comm.broadcast_json({"error": from_exception(error).to_record()})
            raise
        self._comm.broadcast_json({"end": True})

    def _follow(self) -> None:
        """Other ranks: train the trials that rank 0 broadcasts."""
        while "end" not in (plan := self._comm.broadcast_json(None)):
            if "error" in plan:
                raise from_record(plan["error"])
            # Rank 0 has recorded it; the next trial follows.
            with contextlib.suppress(_TrialFailed, TrialPruned):
                self._train(plan, None)

    def _open_study(self) -> None:
        if self._comm.rank != 0:
            return
        from sqlalchemy.exc import SQLAlchemyError

        optuna, options = self._optuna, {name: self._options[name] for name in _STUDY if name in self._options}
        try:
            if isinstance(options.get("storage"), str):
                options["storage"] = self._storage = optuna.storages.RDBStorage(options["storage"])
            self._study = optuna.create_study(directions=self._settings.directions, **options)
        except optuna.exceptions.DuplicatedStudyError:
            what = "A study of this name is in the storage already."
            remedy = "Give load_if_exists=True to continue it, or another name."
            raise ConfigError(what, field="study_name", value=options.get("study_name"), remedy=remedy) from None
        except (ImportError, OSError, ValueError, optuna.exceptions.OptunaError, SQLAlchemyError) as error:
            what = f"The study cannot be opened: {' '.join(str(error).split())}"
            remedy = 'Give a database URL such as "sqlite:///search.db".'
            raise ConfigError(what, field="storage", value=type(error).__name__, remedy=remedy) from error
        if options.get("sampler") is None:
            # Optuna's own default, with a seed. Counting the trials keeps a continued study from drawing values again.
            seed = self._runner.trainer.args.seed + len(self._study.trials)
            several = len(self._settings.directions) > 1
            self._study.sampler = (optuna.samplers.NSGAIISampler if several else optuna.samplers.TPESampler)(seed=seed)
        if options.get("load_if_exists"):
            self._retry_dead_trials()

    def _retry_dead_trials(self) -> None:
        """Record running trials whose process on this machine is gone as failed, and try their parameters again."""
        running = self._optuna.trial.TrialState.RUNNING
        for trial in self._study.get_trials(deepcopy=False, states=(running,)):
            host, _, pid = str(trial.user_attrs.get(_PROCESS, "")).rpartition(":")
            # From here only processes of this machine can be seen.
            if host == socket.gethostname() and pid.isdigit() and start_time(int(pid)) is None:
                _log.warning("Trial %d was interrupted: its parameters are tried again.", trial.number)
                self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
                self._enqueue_again(trial)

    def _enqueue_again(self, trial: Any) -> None:
        self._study.enqueue_trial(dict(trial.params), user_attrs={_CONTINUES: trial.user_attrs.get(_FOLDER)})

    def _objective(self, trial: Any) -> float | list[float]:
        try:
            values = self._train(self._plan(trial), trial)
        except TrialPruned as pruned:
            raise self._optuna.TrialPruned(str(pruned)) from None  # Optuna records only its own exception as pruned
        except BaseException as error:
            if isinstance(error, Preempted):
                self._enqueue_again(self._study.trials[trial.number])
            # Every rank raises it by itself, so `_lead` must not broadcast it as well.
            self._known = error
            raise
        return values[0] if len(values) == 1 else values

    def _plan(self, trial: Any) -> dict[str, Any]:
        """Call `hp_space`; broadcast the trial, or the error, to all ranks."""
        try:
            trial.set_user_attr(_PROCESS, f"{socket.gethostname()}:{os.getpid()}")
            values = json_values(self._space(trial), _REMEDY)
            folder = trial.user_attrs.get(_CONTINUES)
            name = folder or self._name(trial)
            trial.set_user_attr(_FOLDER, name)
            plan = {"name": name, "values": values, "resumed": bool(folder), "number": trial.number}
            plan["params"] = json_values(trial.params, _REMEDY)
        except Exception as error:
            self._comm.broadcast_json({"error": from_exception(error).to_record()})
            raise
        _log.info("Trial %d (%s): %s", trial.number, name, values)
        shared: dict[str, Any] = self._comm.broadcast_json(plan)
        return shared

    def _name(self, trial: Any) -> str:
        """The trial's folder: from `hp_name`, or ``run-<number>``. Raises ConfigError for an unusable name."""
        name = f"run-{trial.number}" if self._settings.hp_name is None else str(self._settings.hp_name(trial))
        if not _NAME.fullmatch(name) or name in (".", ".."):
            remedy = "Return a short text without slashes."
            raise ConfigError("The name cannot be used for a folder.", field="hp_name", value=name, remedy=remedy)
        # A name that an earlier trial used gets the number: checkpoints of two trials never mix.
        taken = {earlier.user_attrs.get(_FOLDER) for earlier in self._study.get_trials(deepcopy=False)}
        return f"{name}-{trial.number}" if name in taken else name

    def _train(self, plan: Mapping[str, Any], trial: Any) -> list[float]:
        """Train one trial; `trial` is Optuna's own on rank 0. Raises TrialPruned or _TrialFailed, on all ranks."""
        self._trial = trial
        given = trial
        if self._comm.world_size > 1:
            given = SharedTrial(trial, self._comm, plan["number"], plan["params"])
        run = TrialRun(plan["name"], dict(plan["values"]), given, plan["resumed"], self._judge)
        try:
            objective = self._runner.run_trial(run)
        except Exception as error:
            # One of several ranks may run out of memory alone, and the others would wait for it in a collective.
            alone = self._comm.world_size == 1
            if not isinstance(from_exception(error), (NonFiniteError, OutOfMemoryError) if alone else NonFiniteError):
                raise
            self._failure = error
            _log.warning("Trial %s failed; the search continues: %s", plan["name"], error)
            raise _TrialFailed(str(error)) from error
        if not all(map(math.isfinite, objective)):
            _log.warning("Trial %s has no finite objective (%s): it counts as failed.", plan["name"], objective)
            raise _TrialFailed(f"no finite objective: {objective}")
        return objective

    def _judge(self, metrics: Mapping[str, float], step: int | None) -> tuple[list[float], bool]:
        def judge() -> tuple[list[float], bool] | None:
            if self._comm.rank != 0:
                return None
            given = self._settings.compute_objective(dict(metrics))
            values = parse_objective(given, len(self._settings.directions))
            if step is None or len(values) > 1:  # Optuna prunes studies of one objective only
                return values, False
            self._trial.report(values[0], step)
            return values, bool(self._trial.should_prune())

        values, prune = self._comm.broadcast_json(run_on_all_ranks(self._comm, judge))
        return values, prune

    def _summary(self) -> dict[str, Any] | None:
        if self._comm.rank != 0:
            return None
        trials, complete = self._study.get_trials(), self._optuna.trial.TrialState.COMPLETE
        if not any(trial.state == complete for trial in trials):
            what = f"None of {len(trials)} trials was completed: all failed or were pruned."
            remedy = "Narrow the ranges; every failure was logged as a warning."
            raise ConfigError(what, field="hp_space", remedy=remedy) from self._failure
        several = len(self._settings.directions) > 1

        def describe(trial: Any) -> dict[str, Any]:
            return {
                "run_id": str(trial.number),
                "state": trial.state.name.lower(),
                "objective": None if not trial.values else trial.values if several else trial.value,
                "hyperparameters": json_values(trial.params, _REMEDY),
            }

        best = self._study.best_trials if several else [self._study.best_trial]
        return {"best": [describe(trial) for trial in best], "trials": [describe(trial) for trial in trials]}
