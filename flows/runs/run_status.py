"""The state of recorded runs: signs of life, progress, the sweep of runs that died without a word, and resuming.

A command that works on a run keeps a sign of life on the storage.

    <storage>/runs/<id>/alive/<random>.json     which process works on it, and its Prefect flow run
    <storage>/runs/<id>/alive/<random>.beat     the stage it is at and how far, written every ten seconds

Both are removed when the command ends, whatever its end; a sign that stays belongs to a process that died, or lives on
another machine. On the same machine that is known at once. A process of another machine is silent once its beat has
stood still for `SILENT_S` seconds of the reader's own clock. It counts as dead once its last beat is `PAUSE_S` old as
well, by the two clocks: a storage is away for minutes, a laptop sleeps. A process that wakes up writes its sign again.

A run resumes with its own spec and its own choices, and nothing that is missing here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Literal

from trainer_lib.base.durations import seconds_since
from trainer_lib.base.json_text import parse_record
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.guard import process_table
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.removal import leave_mark
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records import past_runs
from trainflow.flows.records.past_runs import PastRun, list_runs, read_record, run_folder
from trainflow.flows.records.prefect_runs import configured_api, current_flow_run_id, end_runs_of, sweep_dead_runs
from trainflow.flows.records.recorded_spec import read_recorded_spec
from trainflow.flows.records.results import RUN_ID_CHARS
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.stage.manifest import summary
from trainflow.tasks.stage.progress import Event, describe, subscribe
from trainflow.tasks.stage.retry import now

_log = logging.getLogger(__name__)
ALIVE = "alive"
BEAT_S = 10.0
SILENT_S = 30.0
PAUSE_S = 300.0
_LIMIT = 16_384
_NUMBERS = ("step", "max_steps", "eta_s")

Life = Literal["running", "suspended", "unknown", "dead"]


@dataclass(frozen=True)
class Sign:
    """A process that works on a run, or did."""

    id: str  # the name of its files
    holder: Holder  # the process
    flow_run_id: str | None  # its Prefect flow run; None: none
    api: str | None  # the address of the Prefect server that knows it; None: an embedded server
    stage: str | None  # where it was at the last beat; None: before the first stage
    progress: str  # how far that stage was, for people
    at: str | None  # when the last beat was written, by the writer's clock
    beat: bytes  # the last beat as it stands there
    # step, max_steps: optimizer steps, or batches, of the stage; None: not known.
    step: float | None = None
    max_steps: float | None = None
    eta_s: float | None = None  # seconds until the stage ends, as it was estimated at the last beat
    since: str | None = None  # when the stage began, ISO-8601 in UTC

    @property
    def share(self) -> float | None:
        """The finished share of its stage, from 0 to 1; None: not known."""
        return min(self.step / self.max_steps, 1.0) if self.step is not None and self.max_steps else None

    @property
    def file(self) -> str:
        """Its path in the run's folder."""
        return f"{ALIVE}/{self.id}.json"

    def life(self) -> Life:
        """The state that is certain at one look; "unknown" of a process on another machine."""
        if self.holder.is_gone():
            return "dead"
        if not self.holder.is_alive():
            return "unknown"
        row = process_table().get(self.holder.pid)
        return "suspended" if row is not None and row[2] in "tT" else "running"


@contextlib.contextmanager
def beating(
    plan: Plan, *, in_flow: bool = True, at_end: Callable[[Callable[[], None]], object] = lambda stop: stop()
) -> Iterator[None]:
    """Keep a sign of life for the run of `plan` inside the block, from before its record is read to its end.

    Args:
        in_flow: whether a Prefect flow runs here, which the sign then names.
        at_end: called with what removes the sign, at the end of the block: Prefect may have to learn the end first.
    """
    folder = run_folder(plan.spec.storage, plan.pipeline_key[:RUN_ID_CHARS])
    heart = _Heart(folder.child(ALIVE), in_flow=in_flow)
    with Store.open(plan.spec.storage).pinned(), subscribe(heart.listen):
        # Also for a run that changes nothing: what it finds committed must not be cleaned up under it.
        leave_mark(folder, f"{ALIVE}/{heart.id}.json", heart.write)
        for place in (folder, folder.child(ALIVE)):
            _remove_drafts(place)
        heart.thread.start()
        try:
            yield
        finally:
            heart.stop()
            at_end(heart.remove)


def read_signs(folder: Store) -> list[Sign]:
    """The signs in a run's folder. Raises StorageError if the storage cannot be read."""
    alive = folder.child(ALIVE)
    names = (name.removesuffix(".json") for name in alive.children() if name.endswith(".json"))
    return [sign for name in names if (sign := _read(alive, name)) is not None]


def find_silent(suspects: Sequence[tuple[Store, Sign]]) -> set[str]:
    """The ids of those signs, in their runs' folders, whose beat stands still for `SILENT_S`. Waits."""
    if not suspects:
        return set()
    time.sleep(SILENT_S)
    beats = {
        sign.id: sign.beat
        for folder in {folder.url: folder for folder, _ in suspects}.values()
        for sign in read_signs(folder)
    }
    # A sign that is gone was removed by its own process at its end.
    return {sign.id for _, sign in suspects if beats.get(sign.id) == sign.beat}


def remove_sign(folder: Store, sign: Sign) -> None:
    """Remove the sign of a process that is dead."""
    for suffix in (".beat", ".json"):
        folder.child(ALIVE).delete(sign.id + suffix)
    _remove_drafts(folder.child(ALIVE))


def _remove_drafts(folder: Store) -> None:
    """Remove what killed processes left half written. A writer whose draft is removed writes it again."""
    with contextlib.suppress(StorageError):
        for name in folder.children():
            if name.startswith(".") and name.endswith(".tmp"):
                folder.delete(name)


class _Heart:
    """The writer of one sign."""

    def __init__(self, folder: Store, *, in_flow: bool = True) -> None:
        self._folder = folder
        self._in_flow = in_flow
        self.id = uuid.uuid4().hex
        self._about: dict[str, Any] = {
            "holder": asdict(Holder.this_process(SILENT_S)),
            "flow_run_id": str(run_id) if in_flow and (run_id := current_flow_run_id()) else None,
        }
        self._state: Event = {}
        self._wake, self._done = threading.Event(), False
        self.thread = threading.Thread(target=self._keep, name="trainflow-heartbeat", daemon=True)

    def listen(self, event: Event) -> None:
        """Remember where the run is; a stage that starts, or waits for a device, is written down at once."""
        kind = event.get("event")
        if kind == "stage":
            self._state = {"stage": event.get("stage"), "text": event.get("status"), "since": now()}
            self._wake.set()
        elif kind in ("progress", "log", "wait"):
            known = {**self._state, **{name: value for name, value in event.items() if value is not None}}
            self._state = {**known, "text": describe(known) or event.get("message") or known.get("text")}
            if kind == "wait":
                self._state["text"] = event.get("message")
                self._wake.set()

    def stop(self) -> None:
        """Write no further beat."""
        self._done = True
        self._wake.set()
        self.thread.join()

    def remove(self) -> None:
        """Remove the sign; one that cannot be removed is found to be a dead process's."""
        with contextlib.suppress(StorageError):
            for suffix in (".beat", ".json"):
                self._folder.delete(self.id + suffix)

    def _keep(self) -> None:
        while not self._done:
            self._wake.wait(BEAT_S)
            self._wake.clear()
            if not self._done:
                self.write()

    def write(self) -> None:
        """Write the sign, with the newest state."""
        state = self._state
        known = {name: state[name] for name in _NUMBERS if isinstance(state.get(name), int | float)}
        beat = {
            "beat": uuid.uuid4().hex,
            "at": now(),
            "stage": state.get("stage"),
            "progress": state.get("text"),
            "since": state.get("since"),
            **known,
        }
        try:
            # After a long pause of this machine another one may have removed it.
            if not self._folder.exists(f"{self.id}.json"):
                if self._in_flow:
                    self._about.setdefault("api", configured_api())
                self._folder.replace(f"{self.id}.json", json.dumps(self._about).encode())
            self._folder.replace(f"{self.id}.beat", json.dumps(beat).encode())
        except StorageError as error:  # the next beat may succeed; the work does not depend on it
            _log.debug("The sign of life was not written: %s", error)


def _read(alive: Store, name: str) -> Sign | None:
    about, beat = _parsed(alive, f"{name}.json"), _parsed(alive, f"{name}.beat")
    holder = Holder.from_bytes(json.dumps(about.get("holder")).encode())
    if holder is None:
        return None
    stage, flow_run_id = beat.get("stage"), about.get("flow_run_id")
    return Sign(
        id=name,
        holder=holder,
        flow_run_id=str(flow_run_id) if flow_run_id else None,
        api=str(about["api"]) if about.get("api") else None,
        stage=str(stage) if stage else None,
        progress=str(beat.get("progress") or ""),
        at=str(beat["at"]) if beat.get("at") else None,
        beat=str(beat.get("beat")).encode(),
        since=str(beat["since"]) if beat.get("since") else None,
        **{name: beat[name] for name in _NUMBERS if isinstance(beat.get(name), int | float)},
    )


def _parsed(alive: Store, name: str) -> dict[str, Any]:
    return parse_record(alive.read_if_exists(name, limit=_LIMIT))


# -- the state of runs -------------------------------------------------------------------------------------------------

State = Literal["running", "suspended", "silent", "finished", "failed", "stopped", "pruned", "died"]
_LIVING: dict[str, State] = {"running": "running", "suspended": "suspended"}
_ENDED: dict[str, State] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped", "PRUNED": "pruned"}


@dataclass(frozen=True)
class RunStatus:
    """The state of a run."""

    run: PastRun
    # running; suspended (its process is stopped by a signal); silent (its process, on another machine, gives no sign of
    # life, but not long enough to call it dead); finished, failed, stopped (by a signal or a cancel), pruned (by its
    # sweep); died (its process ended without a word).
    state: State
    # The process working on it, or the one that died; None: the run has ended, or died before it began.
    sign: Sign | None = None
    unswept: tuple[Sign, ...] = ()  # signs of dead processes, which `sweep` removes

    @property
    def is_at_work(self) -> bool:
        """Whether a process works on it, or may."""
        return self.state in ("running", "suspended", "silent")

    @property
    def is_swept(self) -> bool:
        """Whether everything that names this run says how it ended."""
        return not self.unswept and not (self.state == "died" and self.run.status == "RUNNING")

    @property
    def where(self) -> str:
        """Stage, progress and process, as far as they are known."""
        if self.sign is None:
            return str(self.run.record.get("died") or self.run.failed or "")
        stage = f"{self.sign.stage}: {self.sign.progress}" if self.sign.stage else ""
        return ", ".join(filter(None, (stage, str(self.sign.holder))))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        sign, run = self.sign, self.run
        return {
            "id": run.id,
            "name": run.name,
            "state": self.state,
            "stage": sign.stage if sign is not None else run.failed,
            "progress": sign.progress if sign is not None else "",
            "share": sign.share if sign is not None else None,
            "eta_s": sign.eta_s if sign is not None else None,
            "process": str(sign.holder) if sign is not None else None,
            "died": run.record.get("died"),
            "heartbeat": sign.at if sign is not None else None,
            "started": run.started,
            "ended": run.record.get("ended"),
            "stages": dict(run.stages),
            "mlflow_run_id": run.mlflow_run_id,
            "flow_run_id": sign.flow_run_id if sign is not None else None,
        }


def read_status(storage: str, run: PastRun) -> RunStatus:
    """The state of a run at one look: a process of another machine is not watched, and counts as running."""
    return _status(run, read_signs(run_folder(storage, run.id)))


def look(storage: str, closely: Collection[str] = ()) -> list[RunStatus]:
    """The states of all recorded runs at one look, the newest first; of runs that have ended only the record.

    Args:
        closely: ids of runs that are running until their processes have ended, also when the record says how.
    """
    found = []
    for run in list_runs(storage):
        signs = read_signs(run_folder(storage, run.id)) if run.status == "RUNNING" or run.id in closely else []
        # One of another machine may have died without a word: nothing waits for it.
        signs = [sign for sign in signs if run.status == "RUNNING" or sign.life() in _LIVING]
        found.append(_status(run, signs))
    return found


def find_statuses(storage: str, on_wait: Callable[[int], object] = lambda _: None) -> list[RunStatus]:
    """The states of all recorded runs, the newest first.

    Args:
        on_wait: called with the number of silent processes of other machines, before half a minute's watch of them.
    """
    found = _look(storage)
    # By its clock the last beat is long ago, or unknown.
    suspects = [
        (run_folder(storage, run.id), sign)
        for run, signs in found
        for sign in signs
        if sign.life() == "unknown" and not _is_within(sign, 3 * BEAT_S)
    ]
    silent: set[str] = set()
    if suspects:
        on_wait(len(suspects))
        silent = find_silent(suspects)
        found = _look(storage)  # half a minute later a run may have ended as it should
    return [_status(run, signs, silent) for run, signs in found]


def sweep(storage: str, statuses: list[RunStatus]) -> list[str]:
    """Record how dead processes ended: in Prefect, which must have an API here, and on the storage.

    Returns what could not be recorded, and what to do. Raises httpx.HTTPError if Prefect's server does not answer; what
    it must learn is then not forgotten.
    """
    sweep_dead_runs()
    folders = {status.run.id: run_folder(storage, status.run.id) for status in statuses}
    # Read again: a process may have given a sign of life since.
    signs = {run_id: read_signs(folder) for run_id, folder in folders.items()}
    dead = {status.run.id: [sign for sign in status.unswept if sign in signs[status.run.id]] for status in statuses}
    # A run that is retried has its id again: the sign of the ended process says nothing about the new one.
    at_work = {sign.flow_run_id for run_id, found in signs.items() for sign in found if sign not in dead[run_id]}
    gone = [(sign.flow_run_id, sign.holder) for found in dead.values() for sign in found]
    left = end_runs_of([(run_id, holder) for run_id, holder in gone if run_id is not None and run_id not in at_work])
    warnings = []
    for status in statuses:
        folder = folders[status.run.id]
        if status.state == "died":
            _record_death(folder, status)
        for sign in dead[status.run.id]:
            why = left.get(sign.flow_run_id or "")
            if why == "unknown" and sign.api not in (None, configured_api()):
                warnings.append(
                    f"{status.run.id} is not marked in Prefect: its flow run belongs to the server {sign.api}. Set "
                    "PREFECT_API_URL to it, and run trainflow status again; where that server is gone for good, delete "
                    f"{folder.url}/{sign.file}."
                )
            # A run that is just being retried may still have to be marked.
            elif why != "starting":
                remove_sign(folder, sign)
    return warnings


def _look(storage: str) -> list[tuple[PastRun, list[Sign]]]:
    # The record before the signs: a command writes its sign first, and removes it last.
    runs = list_runs(storage)
    return [(run, read_signs(run_folder(storage, run.id))) for run in runs]


def _status(run: PastRun, signs: list[Sign], silent: Collection[str] = ()) -> RunStatus:
    dead = tuple(
        # A beat that stands still for longer than an outage of the storage, or a pause of the machine.
        sign
        for sign in signs
        if sign.life() == "dead" or (sign.id in silent and not _is_within(sign, PAUSE_S))
    )
    for sign in sorted(signs, key=lambda sign: sign.id in silent):
        if sign not in dead:
            state = _LIVING.get(sign.life(), "running")
            return RunStatus(run, "silent" if sign.id in silent else state, sign, dead)
    if run.status == "RUNNING" or run.record.get("died"):
        return RunStatus(run, "died", dead[0] if dead else None, dead)
    return RunStatus(run, _ENDED.get(run.status, "stopped"), None, dead)


def _is_within(sign: Sign, seconds: float) -> bool:
    """Whether the last beat is at most so old; where the clocks are obviously different they say nothing."""
    age_s = seconds_since(sign.at)
    return age_s is not None and 0 <= age_s < seconds


def _record_death(folder: Store, status: RunStatus) -> None:
    """Record that a run has died, and where, unless another process has recorded it."""
    # Read again: the same command may be working on it.
    record = read_record(folder)
    if record.get("status") != "RUNNING" or any(sign not in status.unswept for sign in read_signs(folder)):
        return
    record |= {"status": "KILLED", "died": status.where or "before its first stage", "ended": now()}
    past_runs.write_record(folder, record)


@dataclass(frozen=True)
class StageProgress:
    """One stage of a run: seconds that it took or has been running, the share that is done, and seconds until its end.

    None: not known. Its state is ran, cached, failed, skipped, running or waiting.
    """

    stage: str
    state: str
    seconds: float | None = None
    share: float | None = None
    eta_s: float | None = None
    text: str = ""


def describe_progress(status: RunStatus) -> list[StageProgress]:
    """The stages of a running run, in their order."""
    run, sign = status.run, status.sign
    outcomes = run.record.get("outcomes") or {}
    found = []
    for name in run.record.get("planned") or sorted(run.stages):
        if sign is not None and name == sign.stage and name not in run.stages:
            since_s = seconds_since(sign.since)
            took_s = None if since_s is None else max(since_s, 0.0)
            found.append(StageProgress(name, "running", took_s, sign.share, sign.eta_s, sign.progress))
        elif name in run.stages:
            outcome = outcomes.get(name) or {}
            found.append(StageProgress(name, str(outcome.get("status") or "done"), outcome.get("seconds"), 1.0))
        else:
            found.append(StageProgress(name, "waiting"))
    return found


# -- resuming ---------------------------------------------------------------------------------------------------------


def prepare_resumption(
    storage: str, past: PastRun, say: Callable[[str], object]
) -> tuple[PipelineSpec, dict[str, Any]]:
    """Read the spec of a run below `storage`, and check that the run can resume here. Raises ConfigError.

    Returns the spec as it was recorded, with paths of this machine, and which stages, as
    `trainflow.flows.pipeline.run_pipeline` takes them; `say` gets a line for what is not as it was then.
    """
    spec = read_recorded_spec(storage, past, say)
    plan = Plan.of(spec, only=past.only, start=past.start, from_run=past.from_run, as_of=past.first_started)
    plan.require_committed()
    require_sources(plan)
    if changed := past_runs.describe_changes(plan.spec.storage, past, plan.early_keys):
        say(f"Changed since that run: {summary(changed)}. What these changes do not reach is kept.")
    choice = {"only": past.only, "start": past.start, "from_run": past.from_run}
    return spec, {**choice, "force": find_still_forced(past, plan)}


def require_unfinished(past: PastRun, status: RunStatus | None, *, named: str) -> None:
    """Raise ConfigError, about the word `named`, for a run that has finished or, with a `status`, is running."""
    if status is not None:
        remedy = "Wait for it, or stop it; trainflow status shows its process."
        raise ConfigError(f"This run is still running: {status.where}.", field="RUN", value=named, remedy=remedy)
    if past.is_finished:
        what = "This run has finished: nothing of it is left to do."
        remedy = "To begin in its middle: trainflow run SPEC --from-run ID --from STAGE."
        raise ConfigError(what, field="RUN", value=named, remedy=remedy)


def require_sources(plan: Plan) -> None:
    """Raise ConfigError if prepare-data has to run, and its sources are not on this machine."""
    assumed = plan.context.resolver.assumed_sources
    reason = plan.reasons["prepare-data"]
    if assumed and not reason.hit and plan.is_wanted("prepare-data"):
        what = f"prepare-data has to run ({reason.reason}), and its sources are not on this machine."
        remedy = "Copy them to the same place on this machine, or resume where they are."
        raise ConfigError(what, field="prepare.sources", value=", ".join(assumed), remedy=remedy)


def find_still_forced(past: PastRun, plan: Plan) -> list[str]:
    """The forced stages that had not started when the run ended; `plan` is that of the run without its force."""
    forced = []
    is_next = True
    for name, reason in plan.reasons.items():
        # Its first act is to discard its result, so with a result it had not started.
        has_begun = name in past.stages or (is_next and not reason.hit)
        if name in past.force and plan.is_wanted(name) and not has_begun:
            forced.append(name)
        is_next = is_next and (name in past.stages or not plan.is_wanted(name))
    return forced


def plan_of_try(choose: Callable[..., Plan], force: Sequence[str], began: datetime | None) -> Plan:
    """Plan one try of a flow run, whose first try `began` then: a retry continues from what earlier tries forced."""
    if began is not None and force:
        force = _left_to_force(force, choose(as_of=began), began)
    return choose(force=force, as_of=began)


def _left_to_force(force: Sequence[str], plan: Plan, began: datetime) -> Sequence[str]:
    """Stages that a retry of a flow run still has to force; `plan` is that of the run without its force."""
    # Found by its name and time: the recipe may have been mended meanwhile, which makes it another run.
    earliest = began.replace(microsecond=0)
    tries = (run for run in list_runs(plan.spec.storage) if run.name == plan.spec.name and set(run.force) <= set(force))
    past = next((run for run in tries if run.first_started is not None and run.first_started >= earliest), None)
    # Without one, the try before this one died before it recorded anything.
    return force if past is None else find_still_forced(replace(past, force=tuple(force)), plan)
