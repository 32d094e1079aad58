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
import json
import logging
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.yaml_text import dump_yaml
from trainer_lib.errors import InfrastructureError, StorageError, TrainflowError, first_line, from_record
from trainer_lib.storage import Store
from trainflow.flows.records.past_runs import read_record, run_folder, write_record
from trainflow.flows.records.prefect_runs import SWEEP_FLOW, created_by_this_process, own_flow_run
from trainflow.flows.records.results import describe_error, state_of
from trainflow.flows.server.api import prefect_api, quiet_environment
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.flows.spec.sweep_settings import SWEEP, SweepSettings
from trainflow.flows.sweeps import trial_specs
from trainflow.flows.sweeps.ledger import Ledger, TrialState
from trainflow.flows.sweeps.sweep_result import (
    SWEEP_REPORT,
    SweepResult,
    count_words,
    draw_study,
    reached_text,
    render_sweep,
)
from trainflow.tasks.prefect.prefect_internals import console_handlers
from trainflow.tasks.stage.progress import masked_api_logs
from trainflow.tasks.tracking import mlflow_run as tracking
from trainflow.tasks.tracking.notifying import Message

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

_log = logging.getLogger(__name__)
_IDENTITY, _TRACKED = "identity", "tracked_run"
SWEEPS = "sweeps"
_DEATHS = 3
"""Slots that may die without a word before the sweep gives up."""
_POLL_S = 0.2
_KEPT_S = 60.0
"""Seconds that slots get to save running trials when the sweep is stopped."""

_LAST_LINES_S = 5.0
"""Seconds in which the last lines of a slot that has ended are read."""

Listener = Callable[[Mapping[str, Any]], object]
Events = queue.SimpleQueue[tuple["SlotProcess", dict[str, Any]]]
Trials = Callable[["SlotProcess", Mapping[str, Any]], object]
"""Called with what slots report of trials, and with `lost` for a slot that has ended."""


def run_sweep(spec: PipelineSpec, *, listener: Listener = lambda _: None, debug: bool = False) -> SweepResult:
    """Run the trials that are missing, and say what all of them came to. A failure is held in the result's `error`.

    A sweep that cannot work, or whose ledger is of another one, is refused with a ConfigError.

    Args:
        listener: called with events: "began", "progress", "ended" and "warning", with their `trial`.
    """
    settings, storage = trial_specs.sweep_of(spec), Store.open(spec.storage)
    trial_specs.check_sweep(spec)
    storage.ensure_writable(field="storage")
    quiet_environment()
    # Where MLflow's database is: next to it on the storage, or in this user's data.
    folder = tracking.spool_dir(storage).parents[1] / SWEEPS / f"{spec.name}-{settings.name}"
    ledger = Ledger(folder, settings)
    try:
        _take_up(spec, ledger)
        return _Sweep(spec, ledger, listener, debug=debug).run()
    finally:
        ledger.close()


def _take_up(spec: PipelineSpec, ledger: Ledger) -> None:
    """Make sure that the ledger's trials are those of this spec."""
    known = ledger.read_note(_IDENTITY)
    if known and any(trial.state in ("complete", "pruned", "failed") for trial in ledger.trials()):
        trial_specs.require_same(spec, known)
        return
    now = trial_specs.identify(spec)
    if known and known != now:
        ledger.start_again()  # nothing has come of it
    ledger.write_note(_IDENTITY, now)


class _Sweep:
    """One command on a sweep."""

    def __init__(self, spec: PipelineSpec, ledger: Ledger, listener: Listener, *, debug: bool) -> None:
        self._spec, self._settings = spec, ledger.settings
        self._ledger = ledger
        self._listener = listener
        self._debug = debug
        self._name = f"{spec.name}-{ledger.settings.name}"
        self._storage = Store.open(spec.storage)
        self._folder = self._storage.child(SWEEPS, self._name)
        self._run: tracking.TrackedRun | None = None
        self._failure: TrainflowError | None = None
        self._deaths = 0
        self._events: Events = queue.SimpleQueue()
        self._shown: Trials = lambda slot, event: None
        self._slots = 1

    def run(self) -> SweepResult:
        began, was_done = time.monotonic(), self._ledger.is_done()
        status = "KILLED"
        try:
            if not was_done and self._settings.runner == "processes":
                self._keep_slots(self._shown)
            elif not was_done:
                run_as_flow(self._spec, self._settings, self._keep_slots, debug=self._debug)
            try:
                result = self._conclude(time.monotonic() - began)
            except StorageError as error:
                raise self._failure or error from error
            status = "FINISHED" if result.ok else "FAILED"
        finally:
            if self._run is not None:
                # Everything that slots leave to this process, which may have ended a moment ago.
                self._run.finish(status, stages=1 + self._slots)
        result.mlflow_run_id = tracking.find_run_id(self._storage, self._token())
        result.trials = [self._with_run_id(trial) for trial in result.trials]
        if not was_done:
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

    def _keep_slots(self, trials: Trials) -> str:
        """Keep slots running until every trial has ended, or one of them fails; the failure in one line, or nothing."""
        self._shown = trials
        self._open_run()
        missing = self._ledger.num_trials - sum(
            trial.state in ("complete", "pruned", "failed") for trial in self._ledger.trials()
        )
        self._listener({"event": "planned", "missing": missing})
        self._slots = max(1, min(self._settings.parallel, missing))
        slots = [self._start(number) for number in range(self._slots)]
        try:
            while any(slot.is_alive for slot in slots) and self._failure is None:
                self._take(_POLL_S)
                self._look_after(slots)
        finally:
            for slot in slots:
                slot.stop()
            deadline = time.monotonic() + _KEPT_S
            for slot in slots:
                slot.wait(max(deadline - time.monotonic(), 0.0))
            self._take()
        return "" if self._failure is None else first_line(self._failure)

    def _take(self, wait_s: float = 0.0) -> None:
        """Pass on what slots wrote, after a wait for the first of it."""
        with contextlib.suppress(queue.Empty):
            while True:
                slot, event = self._events.get(timeout=wait_s)
                wait_s = 0.0
                if event.get("event") == "failed":
                    self._failure = self._failure or from_record(event["error"])
                    event = {"event": "lost", "reason": first_line(self._failure)}
                else:
                    self._listener(event)
                self._shown(slot, event)

    def _look_after(self, slots: list[SlotProcess]) -> None:
        """Start another slot for one that died without a word; its trial is claimed again."""
        for index, slot in enumerate(slots):
            if slot.process.poll() in (0, None):
                continue
            slot.wait(0.0)
            self._take()
            if self._failure is not None:
                return
            code = slot.process.poll()
            self._shown(slot, {"event": "lost", "reason": f"Its process ended without a word (code {code})."})
            self._deaths += 1
            if self._deaths > _DEATHS:
                self._failure = InfrastructureError(
                    f"Processes that run trials ended without a word {self._deaths} times.",
                    field=str(slot.log),
                    remedy="Read the end of that file; the same command resumes.",
                )
                return
            self._listener({"event": "warning", "message": f"A slot ended (code {code}); another takes its place."})
            slots[index] = self._start(slot.number)

    def _start(self, number: int) -> SlotProcess:
        orders = {
            "spec": self._spec.to_record(),
            "folder": str(self._ledger.folder),
            "token": None if self._run is None else self._run.handle.token,
            "debug": self._debug,
            "slots": self._slots,
        }
        return SlotProcess(number, orders, self._ledger.folder, self._events)

    # -- the MLflow run -----------------------------------------------------------------------------------------------

    def _token(self) -> str | None:
        found = self._ledger.read_note(_TRACKED)
        return None if found is None else str(found)

    def _open_run(self) -> None:
        """The parent of the trials' runs; a repeated command continues with the same one."""
        settings, name = self._settings, self._name
        chosen = settings.model_dump(mode="json", exclude={"name", "parallel", "runner"}, exclude_none=True)
        chosen["space"] = {key: json.dumps(values) for key, values in chosen["space"].items()}
        self._run = tracking.open_run(
            self._spec.tracking,
            self._storage,
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
        run_id = tracking.find_run_id(self._storage, record.get("tracked_run"))
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
        pictures = draw_study(ledger.study, settings.objective, trial_specs.pruning_metric(self._spec))
        page = render_sweep(result, pictures)
        self._folder.replace(SWEEP_REPORT, page.encode())
        if self._run is not None:
            self._log(self._run, result, page)
        return result

    def _write_best(self, result: SweepResult) -> None:
        for number in result.best:
            name = "best.yaml" if len(result.best) == 1 else f"best-{number}.yaml"
            best = result.trial(number)
            reached = reached_text(result.objective, best.objective or ())
            # What the sweep's spec says otherwise, with the trial's values, and ready to run.
            spec = trial_specs.with_values(self._spec, best.values)
            ready = dump_yaml(spec.model_dump(mode="json", exclude_defaults=True))
            text = f"# Trial {number} of the sweep {result.name}: {reached}. What it made is not made again.\n{ready}"
            self._folder.write_bytes(name, text.encode())
            result.best_specs[number] = f"{self._folder.url}/{name}"
            if self._run is not None:
                self._run.log_file(text, name)

    def _log(self, run: tracking.TrackedRun, result: SweepResult, page: str) -> None:
        run.log_file(page, SWEEP_REPORT)
        tags: dict[str, str | None] = {"trainflow.sweep.trials": count_words(result)}
        if len(result.best) == 1:
            best = self._with_run_id(result.trial(result.best[0]))
            tags["trainflow.sweep.best_trial"] = str(best.number)
            tags["trainflow.sweep.best_run"] = str(best.notes.get("run_name") or best.notes.get("run"))
            tags["trainflow.sweep.best_run_id"] = best.notes.get("mlflow_run_id")
            tags |= {f"trainflow.sweep.best.{name}": str(value) for name, value in best.values.items()}
            values = dict(zip(result.objective, best.objective or (), strict=False))
            run.log_metrics({f"best/{name}": value for name, value in values.items()}, len(result.trials))
        elif result.best:
            tags["trainflow.sweep.best_trials"] = ", ".join(map(str, result.best))
        run.set_tags(tags)


# -- slots -------------------------------------------------------------------------------------------------------------


class SlotProcess:
    """One slot's process, in a separate session: Ctrl-C reaches us, and we stop it; `log` has what it prints."""

    def __init__(self, number: int, orders: Mapping[str, Any], folder: Path, events: Events) -> None:
        self.number = number
        self.log = folder / f"slot-{number + 1}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainflow.flows.sweeps.trial_slot"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{json.dumps(orders)}\n".encode())
            self.process.stdin.flush()
        self._reader = threading.Thread(target=self._read, args=(events,), name="trainflow-slot", daemon=True)
        self._reader.start()

    def _read(self, events: Events) -> None:
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        with self.process.stdout as output:
            for line in output:
                with contextlib.suppress(ValueError):
                    events.put((self, parse_json(line)))

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Ask it to save the running trial, and to end."""
        if self.is_alive:
            self.process.send_signal(signal.SIGINT)

    def wait(self, seconds: float) -> None:
        """Wait for its end and its last events; end it at once after that time, or at another interruption."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        finally:
            if self.process.stdin is not None:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
            self.process.wait()
            self._reader.join(_LAST_LINES_S)


def run_as_flow(spec: PipelineSpec, settings: SweepSettings, work: Callable[[Trials], str], *, debug: bool) -> None:
    """Do the `work` of a sweep, which tells its argument of trials and returns what failed, in a flow of Prefect."""
    import httpx

    with prefect_api(), contextlib.ExitStack() as shown:
        from prefect import Flow
        from prefect.states import Cancelled, Completed, Failed
        from prefect.task_runners import ThreadPoolTaskRunner

        trials, raised, is_over = TrialTasks(settings), list[BaseException](), threading.Event()

        def run(sweep: dict[str, Any]) -> State[Any]:
            """Do the work. Prefect shows the argument."""
            with own_flow_run():
                try:
                    failed = work(trials)
                except KeyboardInterrupt as interrupt:
                    raised.append(interrupt)
                    return Cancelled(message="Interrupted. The same command resumes it.")
                except Exception as error:
                    raised.append(error)
                    return Failed(message=first_line(error))
                finally:
                    is_over.set()
                    trials.stop()
            return Failed(message=failed) if failed else Completed()

        runner: Any = ThreadPoolTaskRunner(max_workers=settings.parallel)
        flow = Flow(
            run,
            name=SWEEP_FLOW,
            flow_run_name=f"{spec.name}-{settings.name}",
            task_runner=runner,
            persist_result=False,
            result_serializer="json",
            validate_parameters=False,
        )
        for handler in () if debug else console_handlers():  # Prefect's log goes to its API alone
            logging.getLogger().removeHandler(handler)
            shown.callback(logging.getLogger().addHandler, handler)
        with masked_api_logs(), created_by_this_process():
            try:
                flow(settings.model_dump(mode="json", exclude_none=True), return_state=True)
            except httpx.HTTPError as error:
                if not is_over.is_set():
                    raise
                _log.warning("Prefect's server did not learn how the sweep ended: %s", first_line(error))
    if raised:
        raise raised[0]  # Prefect would wrap it


class TrialTasks:
    """Shows trials as tasks of Prefect, in threads of the command that watch: what trains is a slot.

    A task runner that carries tasks elsewhere (Dask, Ray) could not do better. Whether a trial is running is a lock
    that this machine's kernel gives back, and a slot ends with its owner by a pipe; neither reaches another machine.
    Trainings do: `launch.engine`.
    """

    def __init__(self, settings: SweepSettings) -> None:
        self._settings = settings
        self._open: dict[int, Future[State[Any]]] = {}
        self._tasks: list[Any] = []

    def __call__(self, slot: SlotProcess, event: Mapping[str, Any]) -> None:
        """Take an event of a slot: a trial began or ended, or the slot is lost, with the trial that it has."""
        from prefect.states import Completed, Crashed, Failed

        kind, reason = event.get("event"), str(event.get("reason") or "")
        if kind == "began":
            self._begin(slot.number, event)
        elif kind == "lost":
            self._finish(slot.number, Crashed(message=reason))
        elif kind == "ended" and event["state"] == "complete":
            self._finish(slot.number, Completed(message=reached_text(self._settings.objective, event["objective"])))
        elif kind == "ended" and event["state"] == "pruned":
            self._finish(slot.number, Completed(name="Pruned", message=reason))
        elif kind == "ended":
            self._finish(slot.number, Failed(message=reason))

    def stop(self) -> None:
        """End the tasks of what is still running, and wait until Prefect knows the ends of all."""
        from prefect.states import Cancelled

        for number in list(self._open):
            self._finish(number, Cancelled(message="The sweep was stopped. The same command resumes it."))
        while self._tasks:
            self._tasks.pop().wait()

    def _begin(self, slot: int, event: Mapping[str, Any]) -> None:
        from prefect import Task
        from prefect.cache_policies import NO_CACHE
        from prefect.logging import get_run_logger

        end: Future[State[Any]] = Future()
        values = ", ".join(f"{name} = {value}" for name, value in event["values"].items())

        def follow() -> State[Any]:
            get_run_logger().info("%s", values)
            state = end.result()
            # The server ignores states older than the last one, and a trial may end before its task runs.
            state.timestamp = datetime.now(UTC)
            return state

        name = f"trial-{event['trial']}"
        task = Task(follow, name="trial", task_run_name=name, persist_result=False, cache_policy=NO_CACHE)
        self._open[slot] = end
        self._tasks.append(task.submit())

    def _finish(self, slot: int, state: State[Any]) -> None:
        if (end := self._open.pop(slot, None)) is not None:
            end.set_result(state)
