"""Delivers what a spool holds to MLflow: every session's records once, in order, and the end of each run.

A pass goes over all sessions. Those of one run are delivered together: the run is found or created, then the points of
its workers, then what the flow logged, its files, and its end. What a session's process logs meanwhile is the next
pass's. A session that is over and delivered is removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from trainer_lib.errors import StorageError, first_line
from trainer_lib.secrets import MASK, mask
from trainer_lib.storage import Store
from trainer_lib.storage.outages import describe_outage
from trainer_lib.trackers import mlflow_client as calls
from trainer_lib.trackers.mlflow_client import GoneError, Point, RefusedError
from trainer_lib.trackers.mlflow_models import deliver_model
from trainer_lib.trackers.repeats import Repeats, leave_out_arrived, leave_out_known, leave_out_latest
from trainer_lib.trackers.shipper import Clock
from trainer_lib.trackers.spool import Session, known_run, note_run, sole_delivery

if TYPE_CHECKING:
    from mlflow import MlflowClient

REST_S = 60.0  # between two tries of another server than this process's, which may be gone for ever
_KILLED = "Its process was killed, or its machine was lost: it recorded no end."
_MODELS = {"model", "measured", "outputs", "registration"}
_log = logging.getLogger(__name__)


class UnknownRunError(Exception):
    """The run of a worker's session is not on the server yet; the session of its flow creates it."""


class _UnsentFilesError(Exception):
    """Files of a run cannot be read or sent now; everything else of the run has arrived."""


class Delivery:
    """Sends a spool, also while other processes write to it.

    Args:
        root: the spool.
        tracking_uri: the server of this process, with its credentials; None: `MLFLOW_TRACKING_URI`.

    Attributes:
        clock: the request that is under way.
        is_loaded: set once mlflow is imported, or when nothing waits that would need it.
        is_elsewhere: whether another thread or process delivered the spool when this one last tried.
        obstacle: why the newest pass left something over; None: it did not, or raised the reason.
    """

    server = "MLflow"

    def __init__(self, root: Path, tracking_uri: str | None = None) -> None:
        self.root = root
        self.clock = Clock()
        self.is_loaded = threading.Event()
        self.is_elsewhere = False
        self.obstacle: str | None = None
        self._uri = tracking_uri
        self._clients: dict[str, MlflowClient] = {}
        self._warned: set[str] = set()
        # Servers that do not answer: until when they are left alone, on the monotonic clock, and what they raised.
        self._away: dict[str, tuple[float, Exception]] = {}

    def deliver(self) -> bool:
        """Send what is there, and return whether all that is over has arrived.

        Raises:
            Exception: what mlflow raises; of several failures the first one. The other runs were tried, too, except
            those of a server that does not answer.
        """
        with sole_delivery(self.root) as ours:
            self.is_elsewhere, self.obstacle = not ours and self.root.is_dir(), None
            if not ours:
                self.is_loaded.set()
                return not self.is_elsewhere
            # A flow logs a stage's results after the stage's workers have ended, so what the flows hold now is read
            # before what the workers hold: no result is sent before the points that lead to it.
            flows = [session for session in Session.stored(self.root) if _is_flow(session)]
            return self._deliver([*(each for each in Session.stored(self.root) if not _is_flow(each)), *flows])

    def _deliver(self, sessions: Sequence[Session]) -> bool:
        if not sessions:
            self.is_loaded.set()
            return True
        if not self._clients:
            self.is_loaded.clear()
        groups: dict[tuple[str, str], list[Session]] = {}
        for session in sessions:
            groups.setdefault(_run_of(session), []).append(session)
        try:
            return self._deliver_runs(groups)
        finally:
            self.is_loaded.set()  # also when nothing needed it, for lack of credentials

    def _deliver_runs(self, groups: Mapping[tuple[str, str], Sequence[Session]]) -> bool:
        own = mask(self._own_uri())
        failed: list[Exception] = []
        self._away = {server: each for server, each in self._away.items() if time.monotonic() < each[0]}
        is_whole = True
        # The server of this process first: another one may be gone for ever.
        for (server, _), group in sorted(groups.items(), key=lambda each: each[0][0] != own):
            if server in self._away:
                failed.append(self._away[server][1])
                continue
            self.clock.is_foreign = server != own
            try:
                is_whole &= self._deliver_run(server, group)
            except GoneError as error:
                self._set_aside(group, error)
            except _UnsentFilesError as error:  # of this run alone: the server took the rest
                failed.append(error)
            except Exception as error:
                failed.append(error)
                # A server that refuses one run may take the next one.
                if server not in self._clients or describe_outage(error) is not None:
                    self._away[server] = (time.monotonic() + (REST_S if server != own else 0.0), error)
        if failed:
            raise failed[0]
        return is_whole

    def _own_uri(self) -> str:
        return self._uri or os.environ.get("MLFLOW_TRACKING_URI") or ""

    def _deliver_run(self, server: str, group: Sequence[Session]) -> bool:
        uri = server
        if MASK in server:  # its credentials are in no file
            uri = self._own_uri()
            if mask(uri) != server:
                self.obstacle = f"The credentials for {server} are not in the environment; set MLFLOW_TRACKING_URI."
                self._warn(self.obstacle)
                return False
        if server not in self._clients:
            calls.load()
            self.is_loaded.set()
            self._clients[server] = calls.connect_timed(uri, self.clock)
        try:
            return _RunDelivery(self._clients[server], self.root, group, self._warn).deliver()
        except UnknownRunError:
            self.obstacle = f"The run of {group[-1].path} is not on the server."
            return False

    def _set_aside(self, group: Sequence[Session], error: Exception) -> None:
        for session in group:
            if session.over:
                session.set_aside("orphan")
        self._warn(f"What was logged about a run is kept in {self.root} and cannot be sent: {error}")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", mask(text))


class _RunDelivery:
    """One pass over the sessions of one run: its workers' first, each kind oldest first."""

    def __init__(self, client: MlflowClient, root: Path, group: Sequence[Session], warn: Callable[[str], None]) -> None:
        self._client = client
        self._root = root
        self._group = group
        self._warn = warn

    def deliver(self) -> bool:
        """Send what the sessions held when the pass began; return whether those that are over have arrived."""
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
        return True

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
            run = calls.make_run(self._client, session.head)
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
        repeats = Repeats(self._client, run_id, session)  # now that the sessions before it are delivered
        for record, behind in session.read(offset):
            points = self._points(repeats, run_id, record, waiting)
            if points is None:
                # Points before it go first; an offset covers everything in front of it.
                self._send_points(session, run_id, waiting, offset)
                waiting = []
                self._send_other(session, run_id, record)
                self._advance(session, behind)
            else:
                waiting += points
            offset = behind
            if len(waiting) >= calls.BATCH:
                self._send_points(session, run_id, waiting, offset)
                waiting = []
        self._send_points(session, run_id, waiting, offset)

    def _points(
        self, repeats: Repeats, run_id: str, record: Mapping[str, Any], waiting: Sequence[Point]
    ) -> list[Point] | None:
        """The points of a record that are to be sent; None for a record of another kind."""
        if record and "m" not in record:
            return None
        points: list[Point] = []
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            points = [Point(key, float(value), record["t"], record["s"]) for key, value in record["m"].items()]
        points = [point for point in points if point not in repeats]
        if points and record.get("once"):
            # A result that an earlier command has logged, perhaps at another time; of an evaluation beside the
            # training the step alone decides, because the run may be ahead of it.
            leave_out = leave_out_known if record["once"] == "step" else leave_out_latest
            points = leave_out(self._client, run_id, points, waiting)
        return points

    def _send_points(self, session: Session, run_id: str, points: list[Point], offset: int) -> None:
        state = session.state
        if offset <= state.offset:
            return
        if points:
            if state.is_uncertain:
                points = leave_out_arrived(self._client, run_id, points)
            else:
                # Noted first: if this process dies, or no answer comes, the next one asks what has arrived.
                state.is_uncertain = True
                session.save_state()
            calls.send_points(self._client, run_id, points)
        self._advance(session, offset)

    def _advance(self, session: Session, offset: int) -> None:
        session.state.offset, session.state.is_uncertain = offset, False
        session.save_state()

    def _send_other(self, session: Session, run_id: str, record: Mapping[str, Any]) -> None:
        try:  # each of these is safe to repeat
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
            if not record.keys() & {"file", "folder", "params", *_MODELS}:
                continue
            try:
                if "file" in record:
                    self._send_file(session, run_id, record)
                elif record.keys() & _MODELS:
                    deliver_model(self._client, run_id, record, session.path / "files")
                elif "folder" in record:
                    self._send_folder(run_id, Store.open(record["folder"]), record["path"])
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

    def _send_file(self, session: Session, run_id: str, record: Mapping[str, Any]) -> None:
        path = PurePosixPath(record["path"])
        with _private_folder() as folder:
            # A link: the file keeps its name, and no bytes are copied.
            (folder / path.name).symlink_to(session.path / "files" / record["file"])
            calls.send_file(self._client, run_id, folder / path.name, path)

    def _send_folder(self, run_id: str, store: Store, artifact_path: str) -> None:
        """Send the files that the run does not have in their size."""
        listed: dict[str, dict[str, int]] = {}
        files = list(store.list())
        if not files:
            raise FileNotFoundError(f"{store.url} is empty or gone.")
        for info in files:
            path = PurePosixPath(artifact_path) / info.path
            parent = str(path.parent)
            if parent not in listed:
                listed[parent] = calls.list_sizes(self._client, run_id, parent)
            if listed[parent].get(str(path)) == info.size:
                continue
            if store.is_local:
                calls.send_file(self._client, run_id, store.local_path(info.path), path)
                continue
            with _private_folder() as folder:  # one file at a time needs no room for all
                store.download(info.path, folder / path.name)
                calls.send_file(self._client, run_id, folder / path.name, path)


@contextlib.contextmanager
def _private_folder() -> Any:
    with tempfile.TemporaryDirectory(prefix="trainflow-") as folder:  # made with mode 0700
        yield Path(folder)


def _name_of(record: Mapping[str, Any]) -> str:
    """What a record brings, in words."""
    if asked := record.get("registration"):
        return f"the version of {asked['name']}"
    return str(record.get("path", "a model" if record.keys() & _MODELS else "a file"))


def _is_flow(session: Session) -> bool:
    """Whether the session is that of the process to which the run belongs, and not that of a worker."""
    return "run_name" in session.head


def _run_of(session: Session) -> tuple[str, str]:
    """The server and the token, or the id, of a session's run."""
    return str(session.head.get("tracking_uri")), str(session.head.get("token") or session.head.get("run_id"))
