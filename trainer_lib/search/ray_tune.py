"""Searching with Ray Tune: trials are processes of Ray, several at the same time, on one machine or a cluster.

Tune proposes values, ends trials early, starts them again after their process died, and has them continue others. Of a
trial it keeps a pointer to one of our checkpoints, which stays in the trial's own folder. What makes the Trainer in a
trial's process travels through Ray's own transport, which pickles it; no file of trainflow holds it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune

from trainer_lib.base.json_text import parse_json, read_json
from trainer_lib.base.outputs import BestRun
from trainer_lib.base.restore_process import signals_kept, variables_kept
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError, InfrastructureError, Interrupted, TrainflowError, first_line, from_record
from trainer_lib.search.base import SearchSettings, json_values, require_end
from trainer_lib.search.trial_process import (
    ENDED,
    FAILURE,
    FOLDER,
    OBJECTIVE,
    STEP,
    TrialProcess,
    absolute_output,
    put_together,
    report_failure,
    sent_as_reference,
    take_apart,
)

if TYPE_CHECKING:
    from trainer_lib.search.trials import TrialRunner


def best_run(trials: list[Any], direction: str) -> BestRun:
    """The best of Tune's trials, by what they reported last.

    Raises:
        Interrupted: some are still under way.
        ConfigError, InfrastructureError: none was completed.
    """
    summary = [_summary(trial) for trial in trials]
    unfinished = [run["run_id"] for run in summary if run["state"] == "running"]
    if unfinished:
        what = f"The search was stopped with {len(unfinished)} of {len(summary)} trials under way."
        raise Interrupted(what, remedy="What they saved is in their folders.")
    good = [run for run in summary if run["state"] != "fail"]
    what, died = f"None of {len(trials)} trials was completed", [trial for trial in trials if trial.status == "ERROR"]
    if not good and died:
        remedy = "Look at Ray's own logs; give each trial more memory (resources_per_trial)."
        details = "\n".join(str(trial.get_error() or "") for trial in died)
        raise InfrastructureError(f"{what}: the processes of {len(died)} died.", remedy=remedy, details=details)
    if not good:
        remedy = "Narrow the ranges; every failure was logged as a warning."
        raise ConfigError(f"{what}: all failed.", field="hp_space", remedy=remedy)
    pick = min if direction == "minimize" else max
    best = pick(good, key=lambda run: float(run["objective"]))
    return BestRun(best["run_id"], best["objective"], best["hyperparameters"], summary)


def _summary(trial: Any) -> dict[str, Any]:
    last = trial.last_result or {}
    objective = last.get(OBJECTIVE)
    known = isinstance(objective, int | float) and abs(objective) < float("inf")
    state = "complete" if last.get(ENDED) else "pruned"
    if trial.status not in ("TERMINATED", "ERROR"):
        state = "running"
    elif trial.status == "ERROR" or FAILURE in last or not known:
        state = "fail"
    return {
        "run_id": str(trial.trial_id),
        "state": state,
        "objective": float(objective) if objective is not None and known else None,
        "hyperparameters": json_values(trial.config, ""),
        "folder": last.get(FOLDER),
        "step": last.get(STEP),
    }


_log = logging.getLogger(__name__)
_PASSED = ("callbacks", "name", "progress_reporter", "time_budget_s", "verbose")
_OPTIONS = (
    *("scheduler", "search_alg", "resources_per_trial", "max_concurrent_trials", "max_failures", "stop"),
    *("storage_path", *_PASSED),
)
_OURS = {
    "keep_checkpoints_num": "Trials keep as many as save_total_limit says.",
    "checkpoint_score_attr": "load_best_model_at_end and metric_for_best_model say which checkpoint is kept.",
    "local_dir": "Trials are in output_dir; storage_path is where Tune keeps its own files.",
    "metric": 'Schedulers find what compute_objective returns as "objective".',
    "mode": "The direction says it.",
    "resume": "A trial whose process died resumes by itself; a search that was stopped begins again.",
}
_NEEDS_SAVES = ("PopulationBasedTraining", "HyperBandScheduler")
_RETRIES = 3
_POINTER = "checkpoint.json"
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # it prints, also where nothing is to be printed
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths of a script stay what they are
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
}
_SET_BY_RAY = ("RAY_AUTH_MODE", "RAY_CLIENT_MODE", "PYTHONBREAKPOINT")
_REMEDY = 'Return for example {"learning_rate": tune.loguniform(1e-6, 1e-4)}, with `from ray import tune`.'


def default_space(trial: object) -> dict[str, Any]:
    """Learning rate, epochs, seed and micro-batch, in the ranges of transformers' `default_hp_space_ray`."""
    return {
        "learning_rate": tune.loguniform(1e-6, 1e-4),
        "num_train_epochs": tune.choice(list(range(1, 6))),
        "seed": tune.randint(1, 41),
        "per_device_train_batch_size": tune.choice([4, 8, 16, 32, 64]),
    }


def train_trial(config: dict[str, Any], sent: Any = None) -> None:
    """The function that Tune calls in a trial's process: make the Trainer, and train."""
    logging.getLogger("ray.train").setLevel(logging.WARNING)  # a line for every pointer
    try:
        parts = sent["parts"]
        trainer = put_together(
            ray.get(parts["class"]), lambda: dict(zip(parts, ray.get(list(parts.values())), strict=True))
        )
        given = {name: ray.get(ref) for name, ref in sent["functions"].items()}
        settings = SearchSettings(hp_space=None, n_trials=None, directions=sent["directions"], **given)
        process = TrialProcess(trainer, settings, tune.get_context().get_trial_id(), _report)
    except Exception as error:
        report_failure(error, _report)
        return
    checkpoint, pointer = tune.get_checkpoint(), None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            pointer = read_json(Path(folder) / _POINTER, dict)
    process.run("ray", config, pointer)


def _report(values: dict[str, Any], pointer: Mapping[str, Any] | None) -> None:
    if pointer is None:
        tune.report(values)
        return
    with tempfile.TemporaryDirectory(prefix="trainflow-trial-") as folder:
        (Path(folder) / _POINTER).write_text(json.dumps(dict(pointer)), encoding="utf-8")
        tune.report(values, checkpoint=tune.Checkpoint.from_directory(folder))


class _Stops(tune.Stopper):  # type: ignore[misc]  # Ray is not there for every type check
    """Ends a trial as the user's own rule says, and the whole search after an error that no other values help."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self.failure: TrainflowError | None = None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        if FAILURE in result:
            record = parse_json(result[FAILURE])
            failure = from_record(record)
            if record["alone"]:
                _log.warning("Trial %s failed; the search continues: %s", trial_id, failure)
            else:
                self.failure = failure
            return True
        if isinstance(self._rule, Mapping):
            return any(result.get(name, float("-inf")) >= limit for name, limit in self._rule.items())
        return bool(self._rule is not None and self._rule(trial_id, result))

    def stop_all(self) -> bool:
        rule = getattr(self._rule, "stop_all", None)
        return self.failure is not None or bool(rule is not None and rule())


class RaySearch:
    """One call of `hyperparameter_search`."""

    name = "ray"

    def __init__(self, runner: TrialRunner, settings: SearchSettings) -> None:
        self._runner = runner
        self._settings = settings
        self._options = dict(settings.options)
        settings.hp_space = settings.hp_space or default_space
        self._check_options()
        self._space = self._read_space()
        self._scheduler = self._read_scheduler()

    # -- what is refused before anything starts -----------------------------------------------------------------------

    def _check_options(self) -> None:
        for name in self._options:
            if name not in _OPTIONS:
                remedy = _OURS.get(name) or suggestion(name, _OPTIONS)
                raise ConfigError("This option does not exist.", field=name, remedy=remedy)
        if self._runner.comm.world_size > 1:
            remedy = "Start the script as one process; resources_per_trial says what each trial gets."
            raise ConfigError("Ray starts the trials' processes itself.", field="backend", value="ray", remedy=remedy)
        if len(self._settings.directions) > 1:
            what = "Ray Tune compares trials by one number."
            remedy = 'Give one direction, or use backend="optuna".'
            raise ConfigError(what, field="direction", value=self._settings.directions, remedy=remedy)
        require_end(self._settings, "time_budget_s")

    def _read_space(self) -> dict[str, Any]:
        assert self._settings.hp_space is not None  # noqa: S101
        try:
            space: Any = self._settings.hp_space(None)
        except AttributeError as error:
            if "suggest_" not in str(error):
                raise
            what = "Ray Tune gives no trial to suggest values with."
            raise ConfigError(what, field="hp_space", value=first_line(error), remedy=_REMEDY) from None
        if not isinstance(space, Mapping):
            json_values(space, _REMEDY)  # refuses it
        for name, value in space.items():
            self._runner.check_names({str(name): value if _is_json(value) else type(value).__name__})
            if not _is_space(value):
                what = "The value is neither a space of ray.tune nor JSON."
                raise ConfigError(what, field=f"hp_space.{name}", value=type(value).__name__, remedy=_REMEDY)
        return dict(space)

    def _read_scheduler(self) -> Any:
        given, args = self._options.get("scheduler"), self._runner.trainer.args
        scheduler = tune.schedulers.create_scheduler(given) if isinstance(given, str) else given
        if scheduler is None or type(scheduler) is tune.schedulers.FIFOScheduler:
            return scheduler
        name = type(scheduler).__name__
        if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
            what = f"{name} compares trials while they train, and none evaluates before its end."
            remedy = 'Set it to "steps" or "epoch", or give no scheduler.'
            raise ConfigError(what, field="eval_strategy", value="no", remedy=remedy)
        kinds = tuple(getattr(tune.schedulers, kind) for kind in _NEEDS_SAVES)
        if isinstance(scheduler, kinds) and str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
            what = f"{name} has trials continue from checkpoints, and none is saved."
            raise ConfigError(what, field="save_strategy", value="no", remedy="Save as often as trials are evaluated.")
        return scheduler

    def _check_resources(self) -> Any:
        """Resources of a trial. Raises ConfigError when no machine of the cluster has it."""
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        asked = self._options.get("resources_per_trial")
        if asked is None:
            gpus = any(machine.get("GPU") for machine in machines) and not self._runner.trainer.args.use_cpu
            asked = {"cpu": 1, "gpu": 1} if gpus else {"cpu": 1}
        read = tune.execution.placement_groups.resource_dict_to_pg_factory
        factory = read(asked) if isinstance(asked, dict) else asked
        for bundle in factory.bundles:
            if not any(all(machine.get(name, 0) >= amount for name, amount in bundle.items()) for machine in machines):
                names = [name for name, amount in bundle.items() if amount]
                offers = "; ".join(sorted(_amounts(machine, names) for machine in machines))
                raise ConfigError(
                    f"The cluster offers {offers}, by machine; each trial asks {_amounts(bundle, names)}.",
                    field="resources_per_trial",
                    value=json.dumps(asked) if isinstance(asked, dict) else type(asked).__name__,
                    remedy="Ask for less, or add machines to the cluster.",
                )
        return factory

    # -- the search ---------------------------------------------------------------------------------------------------

    def run(self) -> BestRun:
        """Run all trials; return the best."""
        # Ray sets variables and installs handlers of its own, and does not put back what was there.
        handled = signals_kept(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        with variables_kept(_VARIABLES, *_SET_BY_RAY), handled, _cluster():
            resources, stops = self._check_resources(), _Stops(self._options.get("stop"))
            sent = {"directions": self._settings.directions, **self._send()}
            with warnings.catch_warnings(), contextlib.ExitStack() as stack:
                warnings.simplefilter("ignore")  # what Ray says of itself
                # It misses the files of Tune's loggers, which are off: trials report to what report_to says.
                analysis_log = logging.getLogger("ray.tune.analysis.experiment_analysis")
                stack.callback(analysis_log.setLevel, analysis_log.level)
                analysis_log.setLevel(logging.ERROR)
                analysis = tune.run(
                    tune.with_parameters(train_trial, sent=sent),
                    config=self._space,
                    num_samples=-1 if self._settings.n_trials is None else self._settings.n_trials,
                    resources_per_trial=resources,
                    raise_on_failed_trial=False,
                    stop=stops,
                    **self._tune_options(),
                )
            if stops.failure is not None:
                raise stops.failure
            return best_run(analysis.trials, self._settings.directions[0])

    def _tune_options(self) -> dict[str, Any]:
        given = {name: self._options[name] for name in _PASSED if name in self._options}
        mode = "min" if self._settings.directions[0] == "minimize" else "max"
        search = self._options.get("search_alg")
        search = tune.search.create_searcher(search) if isinstance(search, str) else search
        limit = self._options.get("max_concurrent_trials")
        if search is None:
            seed = self._runner.trainer.args.seed
            search = tune.search.BasicVariantGenerator(max_concurrent=limit or 0, random_state=seed)
            limit = None
        for field, thing in (("scheduler", self._scheduler), ("search_alg", search)):
            _give_objective(field, thing, mode)
        output = absolute_output(self._runner.trainer.args.output_dir)
        return {
            "name": f"search-{uuid.uuid4().hex[:8]}",
            "storage_path": self._options.get("storage_path") or f"{output}/ray-tune",
            "scheduler": self._scheduler,
            "search_alg": search,
            "max_concurrent_trials": limit,
            "max_failures": self._options.get("max_failures", _RETRIES),
            "verbose": 0,
            **given,
        }

    def _send(self) -> dict[str, Any]:
        """Hand the Trainer's parts to Ray, one by one: what cannot travel is named."""
        trainer, functions = self._runner.trainer, {"compute_objective": self._settings.compute_objective}
        with sent_as_reference(trainer):
            parts = {name: _sent(name, part) for name, part in take_apart(trainer).items()}
            functions["hp_name"] = self._settings.hp_name  # type: ignore[assignment]
            return {"parts": parts, "functions": {name: _sent(name, function) for name, function in functions.items()}}


def _sent(name: str, part: Any) -> Any:
    try:
        return ray.put(part)
    except Exception as error:
        raise ConfigError(
            f"It cannot be sent to the processes of the trials: {first_line(error)}.",
            field=name,
            value=type(part).__name__,
            remedy="Define it at the top of a module, and open files, locks and connections where they are used; "
            'or use backend="optuna", which trains in this process.',
        ) from error


def _give_objective(field: str, thing: Any, mode: str) -> None:
    """Have a scheduler or a search algorithm optimize the objective, unless it has a metric of its own."""
    for part in (thing, getattr(thing, "searcher", None)):
        if part is None or not (hasattr(part, "_metric") and hasattr(part, "_mode")):
            continue
        metric, direction = part._metric or OBJECTIVE, part._mode or mode
        if metric == OBJECTIVE and direction != mode:
            what = f"It looks for the other end of the objective than the search, whose direction makes it {mode}."
            remedy = 'Give direction="minimize" for min, "maximize" for max.'
            raise ConfigError(what, field=field, value=f"mode={direction}", remedy=remedy)
        if field == "scheduler":
            part.set_search_properties(None if part._metric else metric, None if part._mode else direction)
        else:
            part._metric, part._mode = metric, direction


def _is_space(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_space(inner) for inner in value.values())
    return isinstance(value, tune.search.sample.Domain) or _is_json(value)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _amounts(resources: Mapping[str, float], names: list[str]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names)


@contextlib.contextmanager
def _cluster() -> Iterator[None]:
    """Use the cluster that the program has connected to, or that of RAY_ADDRESS, or one of this machine alone."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    own = {"include_dashboard": False} if address == "local" else {}
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself waits for minutes where nothing listens
            socket.create_connection((host, int(port)), timeout=10.0).close()
        ray.init(address, configure_logging=False, **own)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        what = f"The Ray cluster cannot be used from this machine: {first_line(error).rstrip('.')}."
        remedy = "Run the script on a machine of the cluster, with its token; or unset it for one of this machine."
        raise ConfigError(what, field="RAY_ADDRESS", value=address, remedy=remedy) from error
    try:
        yield
    finally:
        ray.shutdown()
