"""The training that `trainflow follow` follows: where it is, whether it goes on, and which MLflow run it has.

It is found by its content key, so a spec in which only later stages were changed since finds the same training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from flows.heartbeat import PAUSE_S
from flows.past_runs import PastRun, list_runs, read_run
from flows.plan import Plan
from flows.run_status import RunStatus, read_status
from flows.spec.prepared_checks import check_splits
from flows.spec.spec import PipelineSpec
from tasks import tracking
from tasks.run_handle import RunHandle
from tasks.stage.facts import PrepareFacts, TrainFacts
from tasks.stage.keys import StageKey
from tasks.stage.manifest import StageManifest, look_up, stage_store
from trainer_lib.commit import read_commit
from trainer_lib.storage import Store

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
    """How a training ended.

    Attributes:
        state: committed, failed, stopped, pruned, died, silent or finished.
        sentence: the same in words.
    """

    state: str
    sentence: str


@dataclass(frozen=True)
class Training:
    """A training that has started.

    Attributes:
        run: the newest run that trains under this key.
        key: the content key of its train stage.
        data: what prepare-data has committed.
    """

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
    """The training of a spec, or a sentence that says what there is to wait for.

    Raises:
        ConfigError: the prepared data lack a split that the spec names.
        StorageError: the storage cannot be read.
    """
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


class Watch:
    """Looks whether a training goes on.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, training: Training, clock: Callable[[], float] = time.monotonic) -> None:
        self._training = training
        self._clock = clock
        self._beat: bytes | None = None
        self._since = clock()
        self.is_settling = False
        """Whether the process has died, and its workers may still save the step they are at."""

    def look(self) -> Ending | None:
        """How the training has ended; None while it goes on.

        Raises:
            StorageError: the storage cannot be read.
        """
        training = self._training
        run = read_run(training.storage, training.run.id)
        if run is None:
            return Ending("finished", "The record of the training was removed")
        # The status before the commit: a run that commits and ends between two looks has committed.
        status = read_status(training.storage, run)
        if read_commit(training.stage, kind="stage") is not None:
            return Ending("committed", "The training is committed")
        self.is_settling = status.state == "died" and _may_still_save(status)
        if self.is_settling:
            return None
        if not status.is_at_work:
            return Ending(status.state, f"{_ENDS[status.state]}{_words(status)}")
        return Ending("silent", _ENDS["silent"]) if self._is_silent(status) else None

    def _is_silent(self, status: RunStatus) -> bool:
        """Whether a process of another machine, which cannot be seen from here, has not written its beat for long."""
        if status.sign is None or status.sign.life() != "unknown":
            return False
        if status.sign.beat != self._beat:
            self._beat, self._since = status.sign.beat, self._clock()
        return self._clock() - self._since > PAUSE_S


def _may_still_save(status: RunStatus) -> bool:
    try:
        beat = datetime.fromisoformat((status.sign.at if status.sign is not None else None) or "")
        return 0 <= (datetime.now(UTC) - beat).total_seconds() < SETTLE_S
    except (ValueError, TypeError):
        return False


def _words(status: RunStatus) -> str:
    return f" ({status.where})" if status.where else ""
