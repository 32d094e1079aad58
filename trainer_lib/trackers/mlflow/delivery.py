"""Delivers what a spool holds to MLflow: every session's records once, in order, and the ends of runs.

A pass goes over all sessions. Those of one run are delivered together: the run is found or created, then the points of
its workers, then what the flow logged, its files, and its end. What a session's process logs meanwhile is the next
pass's. A session that is over and delivered is removed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trainer_lib.errors import StorageError, first_line
from trainer_lib.secrets import mask
from trainer_lib.storage import relative_problem
from trainer_lib.storage.outages import describe_outage
from trainer_lib.trackers.mlflow import mlflow_client as calls
from trainer_lib.trackers.mlflow.mlflow_client import Clock, GoneError, Point, RefusedError, shorten
from trainer_lib.trackers.mlflow.mlflow_models import deliver_model
from trainer_lib.trackers.spool import Session, known_run, note_run, sole_delivery

if TYPE_CHECKING:
    from mlflow import MlflowClient


class Arrived:
    """The points that a run has on its server: asked for when a record may be one of them, once in a pass.

    A point keeps the timestamp of its record however often it is sent, and a database has a point of one key, time,
    step and value once. So a request without an answer that arrives after it was repeated adds nothing.
    """

    def __init__(self, client: MlflowClient, run_id: str, session: Session) -> None:
        self._client = client
        self._run_id = run_id
        self._session = session
        self._is_resumable = bool(session.head.get("dedupe"))
        self._known: dict[str, dict[int, list[Point]]] = {}
        self._complete: set[str] = set()  # keys whose whole history is known

    def holds(self, point: Point, once: object) -> bool:
        """Whether a point is there already, by its key, timestamp, step and value.

        `once` is True: a result that the run has as the newest value of that step is the same one, whenever it was
        measured. "step": the step alone decides, as of an evaluation next to the training, which may be ahead.
        """
        there = self._at_step(point)
        identity = _identity(point)
        if any(_identity(known) == identity for known in there):
            return True
        if once == "step":
            return bool(there)
        if once and there:
            newest = max(there, key=lambda known: known.timestamp)
            return _comparable(newest.value) == _comparable(point.value)
        # A resumed training repeats some steps of an earlier session, perhaps of another machine.
        return self._is_resumable and any(_identity(known) not in self._written for known in there)

    def add(self, point: Point) -> None:
        """Note a point that is about to be sent."""
        self._known.setdefault(point.key, {}).setdefault(point.step, []).append(point)

    def _at_step(self, point: Point) -> list[Point]:
        last = self._latest.get(point.key)
        if last is not None and point.step <= last.step and point.key not in self._complete:
            # Nothing is behind the last point of a key; what is before it needs a request.
            if self._is_resumable or (point.step, point.timestamp) <= (last.step, last.timestamp):
                self._complete.add(point.key)
                for known in calls.history(self._client, self._run_id, point.key):
                    self.add(known)
            else:
                return [last, *self._known.get(point.key, {}).get(point.step, ())]
        return self._known.get(point.key, {}).get(point.step, [])

    @functools.cached_property
    def _latest(self) -> dict[str, Point]:
        return calls.latest_points(self._client, self._run_id)

    @functools.cached_property
    def _written(self) -> set[tuple[Any, ...]]:
        """The session's own points, which are no repetitions of another one's."""
        return {_identity(point) for record, _ in self._session.read(0) for point in _points_of(record)}


def _points_of(record: Mapping[str, Any]) -> list[Point]:
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        return [Point(key, float(value), record["t"], record["s"]) for key, value in record["m"].items()]
    return []


def _identity(point: Point) -> tuple[str, int, int, float | str]:
    return point.key, point.timestamp, point.step, _comparable(point.value)


def _comparable(value: float) -> float | str:
    # Databases keep infinity as the largest number.
    return "nan" if math.isnan(value) else max(-1.7e308, min(1.7e308, value))


POLL_S = 1.0  # between two looks at the spool
MAX_BACKOFF_S = 10.0  # between two tries while the server fails: a try costs one request
SAY_S = 2.0  # a longer wait is announced
LOAD_S = 30.0  # how long `close` waits for the server's client to be imported
_CLOSING_POLL_S = 0.05  # between two looks while another process delivers the same spool
_OBSTACLE_S = 1.0  # how long `close` waits for what only another process can bring, such as the run of a worker
_KILLED = "Its process was killed, or its machine was lost: it recorded no end."
_MODELS = {"model", "measured", "registration"}
_log = logging.getLogger(__name__)


class UnknownRunError(Exception):
    """The run of a worker's session is not on the server yet; the session of its flow creates it."""


class _UnsentFilesError(Exception):
    """Files of a run cannot be read or sent now; everything else of the run has arrived."""


class Delivery:
    """Sends a spool to a server, by default that of `MLFLOW_TRACKING_URI`, also while other processes write to it."""

    def __init__(self, root: Path, tracking_uri: str | None = None) -> None:
        self.root = root
        self.clock = Clock()  # the request that is under way
        self.is_loaded = threading.Event()  # set once mlflow is imported, or when nothing waits that would need it
        self.is_elsewhere = False  # whether another thread or process delivered the spool when this one last tried
        # Why the newest pass left something over; None: it did not, or raised the reason.
        self.obstacle: str | None = None
        self._uri = tracking_uri
        self._client: MlflowClient | None = None
        self._warned: set[str] = set()

    def deliver(self) -> bool:
        """Send what is there; return whether all that is over has arrived. Of several failures, the first is raised."""
        with sole_delivery(self.root) as ours:
            self.is_elsewhere, self.obstacle = not ours and self.root.is_dir(), None
            try:
                return self._deliver_all() if ours else not self.is_elsewhere
            finally:
                self.is_loaded.set()  # also when nothing needed it

    def drop_foreign(self) -> None:
        """Remove what is over and waits for another server than this one, as that of a wrong address."""
        with sole_delivery(self.root) as ours:
            for session in Session.stored(self.root) if ours else ():
                if session.over and not self._is_own(_run_of(session)[0]):
                    session.remove()

    def _deliver_all(self) -> bool:
        # A flow logs a stage's results after the stage's workers have ended, so what the flows hold now is read before
        # what the workers hold: no result is sent before the points that lead to it.
        flows = [session for session in Session.stored(self.root) if _is_flow(session)]
        groups: dict[tuple[str, str], list[Session]] = {}
        for session in [*(stored for stored in Session.stored(self.root) if not _is_flow(stored)), *flows]:
            groups.setdefault(_run_of(session), []).append(session)
        if groups and self._client is None:
            self.is_loaded.clear()
        failed: list[Exception] = []
        is_whole = True
        for group in groups.values():
            try:
                is_whole &= self._deliver_run(group)
            except GoneError as error:
                for session in group:
                    if session.over:
                        session.set_aside("orphan")
                self._warn(f"What was logged about a run is kept in {self.root} and cannot be sent: {error}")
            except Exception as error:
                failed.append(error)
                # A server that refuses one run may take the next one, and files may be out of reach for one run alone.
                if not isinstance(error, _UnsentFilesError) and (self._client is None or describe_outage(error)):
                    break
        if failed:
            raise failed[0]
        return is_whole

    def _own_uri(self) -> str:
        return self._uri or os.environ.get("MLFLOW_TRACKING_URI") or ""

    def _is_own(self, server: str) -> bool:
        """Whether a session is for the server that this process was configured with."""
        own = mask(self._own_uri())
        theirs, ours = calls.sqlite_file(server), calls.sqlite_file(own)
        was_moved = theirs is not None and ours is not None and theirs.name == ours.name and not theirs.exists()
        return server == own or was_moved

    def _deliver_run(self, group: Sequence[Session]) -> bool:
        server, _ = _run_of(group[0])
        if not self._is_own(server):
            # Nor with our credentials to an address that a file names.
            what = f"{group[0].path} is for {server}, not for the server of this command."
            remedy = "Name that one by tracking.uri, or set MLFLOW_TRACKING_URI, and run trainflow sync."
            self.obstacle = f"{what} {remedy} Or drop it: trainflow sync --drop."
            self._warn(self.obstacle)
            return False
        if self._client is None:
            calls.load()
            self.is_loaded.set()
            self._client = calls.connect_timed(self._own_uri(), self.clock)
        location = calls.artifact_location(self._own_uri())
        try:
            _RunDelivery(self._client, self.root, group, self._warn, location).deliver()
        except UnknownRunError:
            self.obstacle = f"The run of {group[-1].path} is not on the server."
            return False
        return True

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", mask(text))


class Shipper(threading.Thread):
    """Delivers a spool in the background. It never raises and never keeps the process alive."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(name="MLflow shipper", daemon=True)
        self._delivery = delivery
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._stopping = False
        self.failure: str | None = None  # why the newest try failed
        self._done = False

    def wake(self) -> None:
        """Look at the spool now, and not after the pause between two looks."""
        self._wake.set()

    @override
    def run(self) -> None:
        delay, stuck_s = POLL_S, 0.0
        while not self._stopping:
            # Read before delivering: only a pass that begins after `close` delivers everything.
            closing = self._closing.is_set()
            try:
                is_whole = self._delivery.deliver()
                self.failure, delay = None, POLL_S
                if closing and is_whole:
                    self._done = True
                    return
            except Exception as error:  # a tracking client must not end training, whatever it raises
                reason = shorten(error)
                if self.failure is None:
                    kept = self._delivery.root
                    _log.warning("MLflow cannot be reached (%s); what is logged waits in %s.", reason, kept)
                self.failure = reason
                delay = min(MAX_BACKOFF_S, 2 * delay)
                if closing:
                    return
            if closing:
                if stuck_s > _OBSTACLE_S:
                    return
                stuck_s += _CLOSING_POLL_S if self._delivery.obstacle is not None else 0.0
                time.sleep(_CLOSING_POLL_S)
            else:
                self._wake.wait(delay)
                self._wake.clear()  # a close that comes in between is seen at once, by its flag

    def close(self, patience_s: float, request_s: float, on_wait: Callable[[], None] | None = None) -> bool:
        """Let the thread deliver the rest, and end; return whether everything has arrived.

        Args:
            patience_s: how long to wait for a server that answers, in seconds, besides the time that uploads take.
            request_s: how long to wait for one answer, in seconds. A failure ends the waiting at once.
            on_wait: called once when it takes longer than two seconds.
        """
        self._closing.set()
        self._wake.set()
        loaded_by = time.monotonic() + (LOAD_S if patience_s else 0.0)
        while self.is_alive() and not self._delivery.is_loaded.wait(0.02) and time.monotonic() < loaded_by:
            continue
        clock = self._delivery.clock
        began = time.monotonic()
        deadline = began + patience_s - clock.granted_s
        while self.is_alive() and time.monotonic() < deadline + clock.granted_s:
            if clock.is_overdue(request_s):
                break
            self.join(0.02)
            if on_wait is not None and time.monotonic() > began + SAY_S:
                on_wait()
                on_wait = None
        self._stopping = True
        self._wake.set()
        return self._done


@dataclass(frozen=True)
class _RunDelivery:
    """One pass over the sessions of one run: its workers' first, each kind oldest first."""

    _client: MlflowClient
    _root: Path
    _group: Sequence[Session]
    _warn: Callable[[str], None]
    _location: str | None

    def deliver(self) -> None:
        """Send what the sessions held when the pass began, and remove those that are over."""
        flows = [session for session in self._group if _is_flow(session)]
        run_id = self._attach(flows or [self._group[-1]])
        for session in self._group:
            self._send_records(session, run_id)
        failure: Exception | None = None
        for session in flows:
            try:
                self._send_files(session, run_id)
            except GoneError:
                raise
            except Exception as error:  # a broken artifact store must not leave the run open
                failure = error
        if flows:
            self._end(flows[-1], run_id)
        if failure is not None:
            raise _UnsentFilesError(first_line(failure)) from failure
        for session in self._group:
            if session.over:
                session.remove()

    # -- the run ------------------------------------------------------------------------------------------------------

    def _attach(self, owners: Sequence[Session]) -> str:
        newest = owners[-1]
        run_id = newest.state.run_id or newest.head.get("run_id") or self._find(newest)
        for session in self._group:
            if session.state.run_id is not None:
                continue
            if _is_flow(session) and session is newest:
                calls.reopen_run(self._client, run_id, int(session.head.get("start_ms") or 0))
            session.state.run_id = run_id
            session.save_state()
        return str(run_id)

    def _find(self, session: Session) -> str:
        token = session.head["token"]
        known = known_run(self._root, token)
        # If a person has deleted the run, the token gets another one from the session of its flow.
        if known and (not _is_flow(session) or calls.is_active(self._client, known["run_id"])):
            return known["run_id"]
        run = calls.find_run(self._client, session.head)
        if run is None:
            if not _is_flow(session):
                raise UnknownRunError
            location = self._location if session.head.get("artifact_location") else None
            run = calls.make_run(self._client, {**session.head, "artifact_location": location})
        note_run(self._root, token, run.run_id, run.experiment_id)
        return run.run_id

    def _end(self, session: Session, run_id: str) -> None:
        state = session.state
        if state.closed is None and session.over:  # its process was killed
            calls.send_tags(self._client, run_id, {calls.FAILURE_TAG: _KILLED})
            state.closed, state.end_ms = "FAILED", session.written_ms()
        if state.closed is not None:
            calls.end_run(self._client, run_id, state.closed, state.end_ms)

    # -- records ------------------------------------------------------------------------------------------------------

    def _send_records(self, session: Session, run_id: str) -> None:
        waiting: list[Point] = []
        offset = session.state.offset
        arrived = Arrived(self._client, run_id, session)  # now that the sessions before it are delivered
        for record, behind in session.read(offset):
            if record and "m" not in record:
                # Points before it go first; an offset covers everything in front of it.
                self._send_points(session, run_id, waiting, offset)
                waiting = []
                self._send_other(session, run_id, record)
                self._advance(session, behind)
            for point in _points_of(record):
                if not arrived.holds(point, record.get("once")):
                    arrived.add(point)
                    waiting.append(point)
            offset = behind
            if len(waiting) >= calls.BATCH:
                self._send_points(session, run_id, waiting, offset)
                waiting = []
        self._send_points(session, run_id, waiting, offset)

    def _send_points(self, session: Session, run_id: str, points: list[Point], offset: int) -> None:
        if offset > session.state.offset:
            if points:
                calls.send_points(self._client, run_id, points)
            self._advance(session, offset)

    def _advance(self, session: Session, offset: int) -> None:
        session.state.offset = offset
        session.save_state()

    def _send_other(self, session: Session, run_id: str, record: Mapping[str, Any]) -> None:
        try:  # all of these are safe to repeat
            if "tags" in record:
                calls.send_tags(self._client, run_id, record["tags"])
            elif "params" in record:
                calls.send_params(self._client, run_id, record["params"])
            elif "dataset" in record:
                calls.send_dataset(self._client, run_id, record)
            elif "end" in record:
                session.state.closed, session.state.end_ms = record["end"], record["t"]
        except RefusedError as error:
            self._warn(f"MLflow refuses {next(iter(record))}: {error}")

    # -- files --------------------------------------------------------------------------------------------------------

    def _send_files(self, session: Session, run_id: str) -> None:
        behind = session.state.files_offset
        for record, behind in session.read(behind, session.state.offset):  # noqa: B020 - read once
            if not record.keys() & {"file", "params", *_MODELS}:
                continue
            try:
                _check_places(session, record)
                if "file" in record:
                    file, path = session.kept_file(record["file"]), PurePosixPath(record["path"])
                    calls.send_file(self._client, run_id, file, path)
                elif record.keys() & _MODELS:
                    deliver_model(self._client, run_id, record, session.path / "files")
                elif "params" in record:
                    calls.send_changed_params(self._client, run_id, record["params"], record["when"])
            except RefusedError as error:
                self._warn(f"MLflow refuses {_name_of(record)}: {error}")
            except (FileNotFoundError, StorageError) as error:
                # A storage that does not answer, or refuses us today, still has it.
                if not isinstance(error, FileNotFoundError) and not isinstance(error.__cause__, FileNotFoundError):
                    raise
                self._warn(f"{_name_of(record)} is not logged to MLflow; it is not there any more: {error}")
            session.state.files_offset = behind
            session.save_state()
        session.state.files_offset = behind


def _check_places(session: Session, record: Mapping[str, Any]) -> None:
    """Raise RefusedError for a record that names a file outside of the session, or a folder outside of the storage."""
    kept = record.get("files") or {}
    targets = [record["path"]] if "file" in record else list(kept)
    problems = [f"the name {path!r} {problem}" for path in targets if (problem := relative_problem(path))]
    for name in kept.values():
        session.kept_file(name)
    asked = record.get("registration") or {}
    folders = [file["folder"] for file in (asked.get("flavor") or {}).get("files") or ()]
    folders += [record["kept_in"]] if record.get("kept_in") else []
    problems += [f"{folder} is not in this storage" for folder in folders if not session.is_of_storage(folder)]
    if problems:
        raise RefusedError(problems[0])


def _name_of(record: Mapping[str, Any]) -> str:
    if asked := record.get("registration"):
        return f"the version of {asked['name']}"
    return str(record.get("path", "a model" if record.keys() & _MODELS else "a file"))


def _is_flow(session: Session) -> bool:
    """Whether the session is that of the process to which the run belongs, and not that of a worker."""
    return "run_name" in session.head


def _run_of(session: Session) -> tuple[str, str]:
    """The server and the token, or the id, of a session's run."""
    return str(session.head.get("tracking_uri")), str(session.head.get("token") or session.head.get("run_id"))
