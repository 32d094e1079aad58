"""A sweep: its ledger, its slots, its MLflow run, and what came of it.

    <storage>/sweeps/<pipeline>-<name>/
        study.db        the ledger (`sweeps.ledger`); of a storage that is not a disk in a folder of this
                        user's own, where MLflow's database is, too
        slot-<n>.log    what the processes that train printed outside of their runs
        report.html     trials, history, importance, values
        best.yaml       the spec of the best trial; best-<n>.yaml where no trial is best in everything

Trials are pipeline runs like any other. They share whatever has an equal key, so data is prepared once, and a training
that was made already is not made again.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import queue
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_lib.base.yaml_text import dump_yaml
from trainer_lib.errors import InfrastructureError, StorageError, TrainflowError, first_line, from_record
from trainer_lib.storage import Store
from trainflow.flows.records.past_runs import read_record, run_folder, write_record
from trainflow.flows.records.results import describe_error, state_of
from trainflow.flows.server.api import quiet_environment
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.flows.spec.sweep_settings import SWEEP
from trainflow.flows.sweeps.ledger import Ledger, TrialState
from trainflow.flows.sweeps.sweep_result import SWEEP_REPORT, SweepResult, count_words, reached_text, render_sweep
from trainflow.flows.sweeps.trial_specs import (
    check_sweep,
    identify,
    pruning_metric,
    require_same,
    sweep_of,
    with_values,
)
from trainflow.flows.sweeps.trial_tasks import Events, SlotProcess, UnseenTrials
from trainflow.tasks.tracking import mlflow_run as tracking
from trainflow.tasks.tracking.notifying import Message

_log = logging.getLogger(__name__)
_IDENTITY, _TRACKED = "identity", "tracked_run"
_LEAST = 2
"""Complete trials that a picture needs."""


def draw_study(study: Any, objectives: Sequence[str], pruned_by: str | None) -> list[tuple[str, bytes]]:
    """Titles and SVG files of the pictures that the trials of Optuna's study allow; `pruned_by`: a metric, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these functions are experimental by Optuna's word
        from optuna.visualization import matplotlib as plots

        complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
        wanted: list[tuple[str, Callable[[], Any]]] = []
        if len(complete) >= _LEAST:
            for index, name in enumerate(objectives):
                wanted += _of_objective(plots, study, index, name, several=len(objectives) > 1)
            if len(objectives) in (2, 3):
                names = list(objectives)
                wanted.append(("Best compromises", lambda: plots.plot_pareto_front(study, target_names=names)))
        if pruned_by is not None and any(trial.intermediate_values for trial in study.trials):
            wanted.append((f"{pruned_by} by evaluation", lambda: plots.plot_intermediate_values(study)))
        return [(title, image) for title, draw in wanted if (image := _draw(title, draw)) is not None]


def _of_objective(
    plots: Any, study: Any, index: int, name: str, *, several: bool
) -> list[tuple[str, Callable[[], Any]]]:
    from optuna.importance import FanovaImportanceEvaluator

    options: dict[str, Any] = {"target_name": name}
    if several:
        options["target"] = lambda trial: trial.values[index]
    evaluator = FanovaImportanceEvaluator(seed=0)
    return [
        (f"History of {name}", lambda: plots.plot_optimization_history(study, **options)),
        (f"Importance for {name}", lambda: plots.plot_param_importances(study, evaluator=evaluator, **options)),
        (f"Values and {name}", lambda: plots.plot_parallel_coordinate(study, **options)),
    ]


def _draw(title: str, draw: Callable[[], Any]) -> bytes | None:
    import matplotlib as mpl
    from matplotlib import pyplot

    try:
        with mpl.rc_context({"svg.fonttype": "none", "figure.figsize": (8, 4.5), "font.size": 9}):
            axes = draw()
            figure = (axes if not hasattr(axes, "flat") else axes.flat[0]).figure
            axes.set_title("")  # the page has it
            drawn = io.BytesIO()
            figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
            return drawn.getvalue()
    except (ValueError, RuntimeError, ZeroDivisionError) as error:  # all trials reached the same, for example
        _log.debug("No picture %s: %s", title, first_line(error))
        return None
    finally:
        pyplot.close("all")


SWEEPS = "sweeps"
_DEATHS = 3
"""Slots that may die without a word before the sweep gives up."""
_POLL_S = 0.2
_KEPT_S = 60.0
"""Seconds that slots get to save running trials when the sweep is stopped."""

Listener = Callable[[Mapping[str, Any]], object]


def ledger_folder(spec: PipelineSpec) -> Path:
    """The folder of its ledger on this machine."""
    storage = Store.open(spec.storage)
    return tracking.spool_dir(storage).parents[1] / SWEEPS / f"{spec.name}-{sweep_of(spec).name}"


def run_sweep(spec: PipelineSpec, *, listener: Listener = lambda _: None, debug: bool = False) -> SweepResult:
    """Run the trials that are missing, and say what all of them came to. A failure is held in the result's `error`.

    A sweep that cannot work, or whose ledger is of another one, is refused with a ConfigError.

    Args:
        listener: called with events: "began", "progress", "ended" and "warning", with their `trial`.
    """
    settings = sweep_of(spec)
    check_sweep(spec)
    Store.open(spec.storage).ensure_writable(field="storage")
    quiet_environment()
    ledger = Ledger.open(ledger_folder(spec), settings)
    try:
        _take_up(spec, ledger)
        return _Sweep(spec, ledger, listener, debug=debug).run()
    finally:
        ledger.close()


def _take_up(spec: PipelineSpec, ledger: Ledger) -> None:
    """Make sure that the ledger's trials are those of this spec."""
    known = ledger.read_note(_IDENTITY)
    if known and any(trial.state in ("complete", "pruned", "failed") for trial in ledger.trials()):
        require_same(spec, known)
        return
    now = identify(spec)
    if known and known != now:
        ledger.start_again()  # nothing has come of it
    ledger.write_note(_IDENTITY, now)


class _Sweep:
    """One command on a sweep."""

    def __init__(self, spec: PipelineSpec, ledger: Ledger, listener: Listener, *, debug: bool) -> None:
        self._spec = spec
        self._settings = sweep_of(spec)
        self._ledger = ledger
        self._listener = listener
        self._debug = debug
        self._folder = Store.open(spec.storage).child(SWEEPS, f"{spec.name}-{sweep_of(spec).name}")
        self._run: tracking.TrackedRun | None = None
        self._failure: TrainflowError | None = None
        self._deaths = 0
        self._has_worked = False
        self._shown = UnseenTrials()
        self._slots = 1

    def run(self) -> SweepResult:
        began = time.monotonic()
        status = "KILLED"
        try:
            if not self._ledger.is_done():
                self._work()
            try:
                result = self._conclude(time.monotonic() - began)
            except StorageError as error:
                raise self._failure or error from error
            status = "FINISHED" if result.ok else "FAILED"
        finally:
            if self._run is not None:
                # Everything that slots leave to this process, which may have ended a moment ago.
                self._run.finish(status, stages=1 + self._slots)
        result.mlflow_run_id = tracking.find_run_id(self._storage(), self._token())
        result.trials = [self._with_run_id(trial) for trial in result.trials]
        if self._has_worked:
            self._tell(result)
        return result

    def _tell(self, result: SweepResult) -> None:
        if not self._spec.notify.to:
            return
        best = [result.trial(number) for number in result.best]
        lines = [
            count_words(result),
            *(f"best: trial {trial.number}, {reached_text(result.objective, trial.objective or ())}" for trial in best),
            *describe_error(result.error),
            f"Report: {result.report_url}",
        ]
        state = state_of(result.error)
        self._spec.notify.send(Message(state, f"{result.pipeline}-{result.name} {state}", lines))

    # -- slots --------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._settings.runner == "processes":
            self._keep_slots(UnseenTrials())
            return
        from trainflow.flows.sweeps.trial_tasks import run_as_flow

        run_as_flow(self._spec, self._settings, self._keep_slots, debug=self._debug)

    def _keep_slots(self, trials: UnseenTrials) -> str:
        """Keep slots running until every trial has ended, or one of them fails; the failure in one line, or nothing."""
        self._shown, self._has_worked = trials, True
        self._open_run()
        missing = self._ledger.num_trials - sum(
            trial.state in ("complete", "pruned", "failed") for trial in self._ledger.trials()
        )
        self._listener({"event": "planned", "missing": missing})
        wanted = max(1, min(self._settings.parallel, missing))
        self._slots = wanted
        events: Events = queue.SimpleQueue()
        slots = [SlotProcess(number, self._orders(), self._ledger.folder, events) for number in range(wanted)]
        try:
            while any(slot.is_alive for slot in slots) and self._failure is None:
                self._take(events, _POLL_S)
                self._look_after(slots, events)
        finally:
            for slot in slots:
                slot.stop()
            deadline = time.monotonic() + _KEPT_S
            for slot in slots:
                slot.wait(max(deadline - time.monotonic(), 0.0))
            self._take(events)
        return "" if self._failure is None else first_line(self._failure)

    def _take(self, events: Events, wait_s: float = 0.0) -> None:
        """Pass on what slots wrote, after a wait for the first of it."""
        with contextlib.suppress(queue.Empty):
            while True:
                slot, event = events.get(timeout=wait_s)
                wait_s = 0.0
                if event.get("event") == "failed":
                    self._failure = self._failure or from_record(event["error"])
                    self._shown.lose(slot, first_line(self._failure))
                    continue
                self._listener(event)
                if event.get("event") == "began":
                    self._shown.begin(slot, event)
                elif event.get("event") == "ended":
                    self._shown.end(slot, event)

    def _look_after(self, slots: list[SlotProcess], events: Events) -> None:
        """Start another slot for one that died without a word; its trial is claimed again."""
        for index, slot in enumerate(slots):
            if slot.process.poll() in (0, None):
                continue
            slot.wait(0.0)
            self._take(events)
            if self._failure is not None:
                return
            code = slot.process.poll()
            self._shown.lose(slot, f"Its process ended without a word (code {code}).")
            self._deaths += 1
            if self._deaths > _DEATHS:
                self._failure = InfrastructureError(
                    f"Processes that run trials ended without a word {self._deaths} times.",
                    field=str(slot.log),
                    remedy="Read the end of that file; the same command resumes.",
                )
                return
            self._listener({"event": "warning", "message": f"A slot ended (code {code}); another takes its place."})
            slots[index] = SlotProcess(slot.number, self._orders(), self._ledger.folder, events)

    def _orders(self) -> dict[str, Any]:
        return {
            "spec": self._spec.to_record(),
            "folder": str(self._ledger.folder),
            "token": None if self._run is None else self._run.handle.token,
            "debug": self._debug,
            "slots": self._slots,
        }

    # -- the MLflow run -----------------------------------------------------------------------------------------------

    def _storage(self) -> Store:
        return Store.open(self._spec.storage)

    def _token(self) -> str | None:
        found = self._ledger.read_note(_TRACKED)
        return None if found is None else str(found)

    def _open_run(self) -> None:
        """The parent of the trials' runs; a repeated command continues with the same one."""
        settings, name = self._settings, f"{self._spec.name}-{self._settings.name}"
        chosen = settings.model_dump(mode="json", exclude={"name", "parallel", "runner"}, exclude_none=True)
        chosen["space"] = {key: json.dumps(values) for key, values in chosen["space"].items()}
        self._run = tracking.open_run(
            self._spec.tracking,
            self._storage(),
            name=self._spec.name,
            run_name=name,
            pipeline_key=f"sweep-{name}",
            params={"sweep": chosen},
            resume=False,
            token=self._token(),
            tags={SWEEP: settings.name},
            project=Path(self._spec.root or "."),
        )
        if self._run is not None:
            self._ledger.write_note(_TRACKED, self._run.handle.token)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _with_run_id(self, trial: TrialState) -> TrialState:
        """The trial with the id of its MLflow run, which it did not wait for; its run's record gets it as well."""
        if trial.notes.get("mlflow_run_id") or not trial.notes.get("run"):
            return trial
        folder = run_folder(self._spec.storage, str(trial.notes["run"]))
        record = read_record(folder)
        run_id = tracking.find_run_id(self._storage(), record.get("tracked_run"))
        if run_id is None:
            return trial
        if record.get("mlflow_run_id") != run_id:
            write_record(folder, {**record, "mlflow_run_id": run_id})
        return replace(trial, notes={**trial.notes, "mlflow_run_id": run_id})

    def _conclude(self, seconds: float) -> SweepResult:
        """Write the best spec and the report, here and to MLflow."""
        settings, ledger = self._settings, self._ledger
        result = SweepResult(
            settings.name,
            self._spec.name,
            self._spec.storage,
            settings.objective,
            settings.direction,
            ledger.num_trials,
            trials=ledger.trials(),
            best=ledger.best(),
            report_url=f"{self._folder.url}/{SWEEP_REPORT}",
            seconds=round(seconds, 3),
            error=self._failure,
        )
        self._write_best(result)
        pictures = draw_study(ledger.study(), settings.objective, pruning_metric(self._spec))
        page = render_sweep(result, pictures)
        self._folder.replace(SWEEP_REPORT, page.encode())
        if self._run is not None:
            self._log(result, page)
        return result

    def _write_best(self, result: SweepResult) -> None:
        for number in result.best:
            name = "best.yaml" if len(result.best) == 1 else f"best-{number}.yaml"
            text = best_spec(self._spec, result, number)
            self._folder.write_bytes(name, text.encode())
            result.best_specs[number] = f"{self._folder.url}/{name}"
            if self._run is not None:
                self._run.log_file(text, name)

    def _log(self, result: SweepResult, page: str) -> None:
        assert self._run is not None  # noqa: S101 - the caller looked
        self._run.log_file(page, SWEEP_REPORT)
        tags: dict[str, str | None] = {"trainflow.sweep.trials": count_words(result)}
        if len(result.best) == 1:
            best = self._with_run_id(result.trial(result.best[0]))
            tags["trainflow.sweep.best_trial"] = str(best.number)
            tags["trainflow.sweep.best_run"] = str(best.notes.get("run_name") or best.notes.get("run"))
            tags["trainflow.sweep.best_run_id"] = best.notes.get("mlflow_run_id")
            tags |= {f"trainflow.sweep.best.{name}": str(value) for name, value in best.values.items()}
            values = dict(zip(result.objective, best.objective or (), strict=False))
            self._run.log_metrics({f"best/{name}": value for name, value in values.items()}, len(result.trials))
        elif result.best:
            tags["trainflow.sweep.best_trials"] = ", ".join(map(str, result.best))
        self._run.set_tags(tags)


def best_spec(spec: PipelineSpec, result: SweepResult, number: int) -> str:
    """The spec of a trial as YAML: what the sweep's spec says otherwise, with the trial's values, and ready to run."""
    best = result.trial(number)
    own = with_values(spec, best.values)
    reached = reached_text(result.objective, best.objective or ())
    head = f"# Trial {number} of the sweep {result.name}: {reached}. What it made is not made again.\n"
    return head + dump_yaml(own.model_dump(mode="json", exclude_defaults=True))
