"""`trainflow follow`: wait for a training, evaluate its checkpoints, and end after it.

It is found by its content key, so a spec in which only later stages were changed since finds the same training.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_lib.base.durations import seconds_since
from trainer_lib.base.suggestions import counted
from trainer_lib.data.rows.mixture import FIELD, merge_weights
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.protocol.requests import MIXTURE_CHANGE
from trainer_lib.storage import Store
from trainer_lib.storage.commit import read_commit
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import PastRun, list_runs, read_run
from trainflow.flows.runs.run_status import PAUSE_S, read_status
from trainflow.flows.spec.checks import check_splits
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.follow import Evaluation, Follower, Job, Listener, RunPoints, check_settings
from trainflow.tasks.keys.keys import StageKey
from trainflow.tasks.stage.facts import PrepareFacts, TrainFacts
from trainflow.tasks.stage.manifest import StageManifest, look_up, stage_store
from trainflow.tasks.tracking import mlflow_run as tracking
from trainflow.tasks.tracking.mlflow_run import RunHandle, find_waiting

SETTLE_S = 30.0
"""Seconds after the last beat of a process that died, in which its workers may still save the step they are at."""
_DATA, _TRAIN = "prepare-data", "train"
_ENDS = {
    "failed": "The training failed",
    "stopped": "The training was stopped",
    "pruned": "The sweep ended this trial early",
    "died": "The process of the training died",
    "silent": f"The process of the training has given no sign of life for {PAUSE_S / 60:.0f} minutes",
    "finished": "The run of the training has ended",
}


@dataclass(frozen=True)
class Ending:
    """The end of a training: committed, failed, stopped, pruned, died, silent or finished; and the same in words."""

    state: str
    sentence: str


@dataclass(frozen=True)
class Training:
    """A training that has started: the newest run under its key, the key, and what prepare-data has committed."""

    run: PastRun
    key: StageKey
    data: StageManifest[PrepareFacts]
    storage: str

    @property
    def stage(self) -> Store:
        """The folder of the train stage."""
        return stage_store(self.storage, self.key)

    def handle(self, spec: PipelineSpec) -> RunHandle | None:
        """The MLflow run that has the training curve; None where nothing is tracked."""
        if not spec.tracking.enabled:
            return None
        token = self.run.record.get("tracked_run")
        commit = read_commit(self.stage, kind="stage")
        if commit is not None:
            facts = StageManifest.from_commit(self.stage.url, commit).facts
            # The run that trained: a later one found the result committed.
            token = facts.tracked_run or token if isinstance(facts, TrainFacts) else token
        if not token:
            return None
        storage = Store.open(self.storage)
        uri, spool = tracking.tracking_uri(spec.tracking, storage), tracking.spool_dir(storage)
        return RunHandle(str(token), spec.tracking.experiment or spec.name, uri, str(spool))


def find_training(plan: Plan) -> Training | str:
    """The training of a spec, or a sentence that says what there is to wait for. Raises ConfigError, StorageError."""
    spec = plan.spec
    data, _ = look_up(spec.storage, plan.key_of(_DATA, {}))
    if data is None:
        return "No data is prepared for this spec yet"
    data = data.with_facts(PrepareFacts)
    check_splits(spec, data.facts.splits)
    key = plan.key_of(_TRAIN, {_DATA: data})
    for run in list_runs(spec.storage):
        # The newest first.
        if run.name == spec.name and key.digest in (run.worked_in.get(_TRAIN), run.stages.get(_TRAIN)):
            return Training(run, key, data, spec.storage)
    return "No training of this spec has started yet"


def change_mixture(spec: PipelineSpec, weights: Mapping[str, float]) -> dict[str, float]:
    """Have the training of a spec take other weights of its mixture at its next checkpoint; return those it is sent."""
    if spec.prepare.mixture is None:
        raise ConfigError("The spec mixes no sources.", field=FIELD, remedy="Set prepare.mixture before the training.")
    training = find_training(Plan.of(spec))
    if isinstance(training, str):
        raise ConfigError(f"{training}.", field="SPEC", value=spec.name, remedy="Set the weights in the spec.")
    if read_commit(training.stage, kind="stage") is not None:
        remedy = "Change prepare.mixture in the spec, and run it: that is another training."
        raise ConfigError("The training has ended.", field="SPEC", value=spec.name, remedy=remedy)
    # Those that it has now are known to the training alone: weights that are not named stay.
    merge_weights(dict.fromkeys(spec.prepare.mixture.names, 0.0), weights, field="--weight")
    change = {"id": uuid.uuid4().hex, "weights": dict(weights)}
    training.stage.write_bytes(MIXTURE_CHANGE, json.dumps(change).encode())
    return dict(weights)


class Watch:
    """Looks whether a training continues, on a clock whose seconds only grow."""

    def __init__(self, training: Training, clock: Callable[[], float] = time.monotonic) -> None:
        self._training = training
        self._clock = clock
        self._beat: bytes | None = None
        self._since = clock()
        self.is_settling = False
        """Whether the process has died, and its workers may still save the step they are at."""

    def look(self) -> Ending | None:
        """The end of the training; None while it runs. Raises StorageError if the storage cannot be read."""
        training = self._training
        run = read_run(training.storage, training.run.id)
        if run is None:
            return Ending("finished", "The record of the training was removed")
        # The status before the commit: a run that commits and ends between two looks has committed.
        status = read_status(training.storage, run)
        if read_commit(training.stage, kind="stage") is not None:
            return Ending("committed", "The training is committed")
        age_s = None if status.sign is None else seconds_since(status.sign.at)
        self.is_settling = status.state == "died" and age_s is not None and 0 <= age_s < SETTLE_S
        if self.is_settling:
            return None
        if not status.is_at_work:
            where = f" ({status.where})" if status.where else ""
            return Ending(status.state, f"{_ENDS[status.state]}{where}")
        # A process of another machine, which cannot be seen from here.
        if status.sign is not None and status.sign.life() == "unknown":
            if status.sign.beat != self._beat:
                self._beat, self._since = status.sign.beat, self._clock()
            if self._clock() - self._since > PAUSE_S:
                return Ending("silent", _ENDS["silent"])
        return None


OUTAGES = 30
"""Looks in a row that may fail because the storage does not answer."""


@dataclass(frozen=True)
class Followed:
    """The result of a follower."""

    training: str  # how the training ended (`Ending.state`); running or waiting, where only one look was asked for
    sentence: str
    run_id: str | None = None  # the run; None: none has started
    count: int = 0  # checkpoints that this process has evaluated; `evaluations` are all, in the order of the steps
    evaluations: tuple[Evaluation, ...] = ()
    best: Evaluation | None = None
    waiting: str | None = None  # what MLflow does not have yet; None: nothing

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        best = None if self.best is None else self.best.to_dict()
        return {**vars(self), "evaluations": [evaluation.to_dict() for evaluation in self.evaluations], "best": best}


def follow_training(
    spec: PipelineSpec, listener: Listener, *, once: bool, every_s: float, use_cpu: bool, debug: bool
) -> Followed:
    """Evaluate the checkpoints of the training of a spec, until it has ended, or `once`. Raises TrainflowError.

    A damaged checkpoint is raised as DamagedError after the others were evaluated; the storage is looked at `every_s`.
    """
    plan = Plan.of(spec, debug=debug)
    standard = check_settings(spec.train, plan.context)
    said = ""
    while isinstance(training := find_training(plan), str):
        if once:
            return Followed("waiting", f"{training}.")
        if training != said:
            listener.say(f"{training}. Waiting for it.")
            said = training
        time.sleep(every_s)
    training.stage.ensure_writable(field="storage")
    listener.say(f"Following run {training.run.id} ({training.run.run_name or training.run.name}).")
    handle = training.handle(spec)
    points = None if handle is None else RunPoints(handle)  # None where nothing is tracked
    with contextlib.nullcontext() if points is None else contextlib.closing(points):
        job = Job(
            config=spec.train.with_launchers_arguments(),
            launch=spec.evaluate_config().launch or spec.train.launch.on_one_machine(),
            use_cpu=use_cpu,
            context=plan.context,
            stage=training.stage,
            data=training.data,
            poll_s=every_s,
        )
        follower = Follower(job, standard, points, listener)
        if done := follower.begin():
            listener.say(f"{describe_number(len(done))} already, the newest at step {done[-1].step}.")
        greater = "greatest" if standard.is_greater_better else "smallest"
        listener.say(f"The checkpoint with the {greater} {standard.metric} is kept.")
        ending, count = _follow(follower, Watch(training), listener, once=once, every_s=every_s)
        done = follower.begin()
    if follower.damaged:
        raise follower.damaged[0]
    waiting = find_waiting(Store.open(spec.storage)) if points is not None else None
    return Followed(
        training=ending.state,
        sentence=f"{ending.sentence}.",
        run_id=training.run.id,
        count=count,
        evaluations=tuple(done),
        best=follower.best,
        waiting=None if waiting is None else f"{waiting} in {waiting.root}",
    )


def describe_number(count: int) -> str:
    """``1 checkpoint is evaluated``, ``2 checkpoints are evaluated``."""
    return f"{counted(count, 'checkpoint')} {'is' if count == 1 else 'are'} evaluated"


def _follow(follower: Follower, watch: Watch, listener: Listener, *, once: bool, every_s: float) -> tuple[Ending, int]:
    """Evaluate what comes until the training has ended, or once; how it ended, and how many were evaluated."""
    count = outages = 0
    while True:
        try:
            # Before the checkpoints are listed: a training that has ended commits no more of them.
            ending = watch.look()
            count += follower.work(wait=ending is not None and not once)
            outages = 0
        except StorageError as error:
            outages += 1
            if not error.retryable or once or outages > OUTAGES:
                raise
            listener.say(f"The storage does not answer, the next look is in {every_s:g} s: {error.message}")
            ending = None
        if ending is not None:
            return ending, count
        if once and watch.is_settling:
            return Ending("died", "The process of the training has died, and its workers may still save"), count
        if once:
            return Ending("running", "The training continues"), count
        time.sleep(every_s)
