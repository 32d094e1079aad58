"""One slot of a sweep: a process that claims trials and runs them, one after the other.

    python -m trainflow.flows.sweeps.trial_slot      orders: one line of JSON on stdin; events: lines of JSON on stdout

Its owner keeps stdin open: when that ends, however the owner ended, the slot ends at once, and the guards of its
workers end those. What it was working on is claimed again by the next slot, and continues from its checkpoints.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from trainer_lib import errors
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import number_words
from trainer_lib.launch.settings.gpu_selection import SHARED_BY
from trainer_lib.storage import Store
from trainflow.flows.records.ending import StopRequest
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult, flat_metrics, read_training_history
from trainflow.flows.server.api import prefect_api, quiet_environment
from trainflow.flows.spec.spec import parse_spec
from trainflow.flows.spec.sweep_settings import OBJECTIVE, SWEEP, TRIAL
from trainflow.flows.sweeps.ledger import Claim, Ledger
from trainflow.flows.sweeps.trial_specs import PARENT, missing_metric, pruning_metric, sweep_of, trial_spec
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.progress import Event, subscribe
from trainflow.tasks.tracking import mlflow_run as tracking

_PARENT_S = 20.0
"""Seconds that the first trial waits for the id of the sweep's own MLflow run."""
_MISTAKES = (errors.ConfigError, errors.CodeError, errors.DataError)
_OF_THE_TRIAL = (errors.NonFiniteError, errors.OutOfMemoryError, *_MISTAKES)
_OUT = threading.Lock()
_log = logging.getLogger(__name__)


def _emit(event: Mapping[str, Any]) -> None:
    """Tell the owner."""
    with _OUT, contextlib.suppress(OSError):
        sys.stdout.write(f"{json.dumps(event, default=str)}\n")
        sys.stdout.flush()


class Slot:
    """The inputs of a process that runs trials: `orders`, which the owner has written to stdin."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._spec = parse_spec(orders["spec"])
        self._settings = sweep_of(self._spec)
        self._metric = pruning_metric(self._spec)
        self._token = orders.get("token")
        self._debug = bool(orders.get("debug"))
        self._parent: str | None = None
        self._has_waited = False
        self.ledger = Ledger(Path(orders["folder"]), self._settings)

    def work(self) -> None:
        """Run trials until none is left to claim. Raises a TrainflowError that is not one trial's own."""
        while (claim := self.ledger.claim()) is not None:
            try:
                self._run(claim)
            finally:
                claim.release()

    def _run(self, claim: Claim) -> None:
        _emit({"event": "began", "trial": claim.number, "values": claim.values, "resumed": claim.is_resumed})
        began = time.monotonic()
        tags = {SWEEP: self._settings.name, TRIAL: str(claim.number), OBJECTIVE: " ".join(self._settings.objective)}
        tags |= self._parent_tag()
        watch = _Watch(claim, self._metric)
        try:
            spec = trial_spec(self._spec, claim.values, tags)
            from trainflow.flows.pipeline import run_pipeline

            with subscribe(watch):
                result = run_pipeline(spec, debug=self._debug, stop=watch.stop, delivers_later=True)
        except errors.TrainflowError as error:  # refused before the flow began
            result = PipelineResult(self._spec.name, "", self._spec.storage, error=error)
        claim.note(
            run=result.pipeline_key[:RUN_ID_CHARS] or None,
            run_name=result.run_name,
            mlflow_run_id=result.mlflow_run_id,
            report=result.report_url,
            seconds=round(claim.seconds_before + time.monotonic() - began, 3),
            steps=watch.step or _steps(result),
            max_steps=watch.max_steps or _steps(result),
        )
        self._conclude(claim, result)

    def _conclude(self, claim: Claim, result: PipelineResult) -> None:
        error, ended = result.error, {"event": "ended", "trial": claim.number}
        if error is None:
            there, wanted = reported_metrics(result), self._settings.objective
            if absent := [name for name in wanted if name not in there]:
                raise missing_metric(absent[0], list(there))
            objective = [there[name] for name in wanted]
            claim.complete(objective)
            _emit({**ended, "state": "complete", "objective": objective})
        elif isinstance(error, errors.Pruned):
            claim.end("pruned", error.message)
            _emit({**ended, "state": "pruned", "reason": error.message})
        elif not isinstance(error, _OF_THE_TRIAL):
            raise error
        elif isinstance(error, _MISTAKES) and not any(trial.state == "complete" for trial in self.ledger.trials()):
            raise error  # one of the spec or the recipe, and not of the trial's values: none went through yet
        else:
            claim.end("failed", str(error))
            _emit({**ended, "state": "failed", "reason": str(error)})

    def _parent_tag(self) -> dict[str, str]:
        """The tag that makes a trial's MLflow run a child; empty while the sweep's run has no id yet."""
        storage = Store.open(self._spec.storage)
        deadline = time.monotonic() + (0.0 if self._has_waited else _PARENT_S)
        while self._token and self._parent is None:
            self._parent = tracking.find_run_id(storage, self._token)
            if self._parent is None and time.monotonic() >= deadline:
                break
            if self._parent is None:
                time.sleep(0.1)
        self._has_waited = True
        return {} if self._parent is None else {PARENT: self._parent}


class _Watch:
    """Follows one trial: its steps for the owner, its evaluations for the ledger, and its early end."""

    def __init__(self, claim: Claim, metric: str | None) -> None:
        self.stop = StopRequest()
        self.step = self.max_steps = 0
        self._claim = claim
        self._metric = metric
        self._is_warned = False

    def __call__(self, event: Event) -> None:
        if event.get("event") == "warning":
            _emit({"event": "warning", "trial": self._claim.number, "message": event.get("message")})
        if event.get("stage") != "train" or event.get("event") == "stage":
            return
        self.step = int(event.get("step") or self.step)
        self.max_steps = int(event.get("max_steps") or self.max_steps)
        if event.get("event") == "log" and isinstance(logs := event.get("logs"), Mapping):
            self._report(logs)
        position = {"step": self.step, "max_steps": self.max_steps, "eta_s": event.get("eta_s")}
        _emit({"event": "progress", "trial": self._claim.number, **position})

    def _report(self, logs: Mapping[str, Any]) -> None:
        measured = any(name.startswith("eval_") for name in logs)
        if self._metric is None or not measured or self.stop.is_set():
            return
        value = logs.get(self._metric)
        if not isinstance(value, int | float):
            if not self._is_warned:
                self._is_warned = True
                there = ", ".join(name for name in logs if name.startswith("eval_"))
                text = f"No trial is ended early: evaluations report no {self._metric}, only {there}."
                _emit({"event": "warning", "trial": self._claim.number, "message": text})
            return
        try:
            if self._claim.report(self.step, float(value)):
                reached = f"{self._metric} {number_words(value)}"
                self.stop.ask(f"Others were better than {reached} after as many evaluations.")
        except Exception as error:  # the training is worth more than its early end
            _log.warning("Trial %d: an evaluation is missing from the ledger: %s", self._claim.number, error)


def reported_metrics(result: PipelineResult) -> dict[str, float]:
    """Every number that a trial's stages report, by name; of evaluations while training the last ones."""
    found: dict[str, float] = {}
    for stage, manifest in result.manifests().items():
        found |= flat_metrics(manifest.metrics, timings=True)
        if stage == "train":
            with contextlib.suppress(ValueError, errors.TrainflowError):
                for entry in read_training_history(manifest.store()):
                    numbers = {name: value for name, value in entry.items() if isinstance(value, int | float)}
                    found |= {name: float(value) for name, value in numbers.items() if name.startswith("eval_")}
    return found


def _steps(result: PipelineResult) -> int | None:
    """The steps of a training that was committed already."""
    trained = result.manifests().get("train")
    facts = None if trained is None else trained.facts
    return facts.global_step if isinstance(facts, TrainFacts) else None


def main() -> int:
    """Work as the orders on stdin say; returns the exit code."""
    orders = parse_json(_read_line())
    os.environ[SHARED_BY] = str(orders["slots"])  # without it, the trials would compete for the same cores
    quiet_environment()
    threading.Thread(target=_end_with_owner, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    slot: Slot | None = None
    try:
        with prefect_api(meanwhile=lambda: importlib.import_module("trainflow.flows.pipeline")):
            slot = Slot(orders)
            slot.work()
    except (KeyboardInterrupt, errors.Interrupted, errors.Preempted):
        return errors.Interrupted.exit_code
    except Exception as error:
        failure = errors.from_exception(error)
        _emit({"event": "failed", "error": failure.to_record()})
        return failure.exit_code
    finally:
        if slot is not None:
            slot.ledger.close()
    return 0


def _read_line() -> bytes:
    """The first line of stdin, and not a byte of what follows it."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        return stdin.readline()


def _end_with_owner() -> None:
    """End this process with its owner."""
    # Not by `sys.stdin`, whose lock a thread must not hold when the interpreter ends.
    while os.read(0, 1024):
        pass
    os._exit(errors.Interrupted.exit_code)


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(*([] if number == signal.SIGINT else [signal.Signals(number).name]))


if __name__ == "__main__":
    sys.exit(main())
