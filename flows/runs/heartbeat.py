"""The sign of life that a command working on a run keeps on the storage, and what it says about a run.

    <storage>/runs/<id>/alive/<random>.json     which process works on it, and its Prefect flow run
    <storage>/runs/<id>/alive/<random>.beat     the stage it is at and how far, written every ten seconds

Both are removed when the command ends, whatever its end; a sign that stays belongs to a process that died, or lives on
another machine. On the same machine that is known at once. A process of another machine is silent once its beat has
stood still for `SILENT_S` seconds of the reader's own clock. It counts as dead once its last beat is `PAUSE_S` old as
well, by the two clocks: a storage is away for minutes, a laptop sleeps. A process that wakes up writes its sign again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainer_lib.base.json_text import parse_record
from trainer_lib.errors import StorageError
from trainer_lib.guard import process_table
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.removal import leave_mark
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import run_folder
from trainflow.flows.records.prefect_runs import configured_api, current_flow_run_id
from trainflow.flows.records.results import RUN_ID_CHARS
from trainflow.tasks.stage.progress import Event, describe, subscribe
from trainflow.tasks.stage.retry import now

ALIVE = "alive"
BEAT_S = 10.0
SILENT_S = 30.0
PAUSE_S = 300.0
_LIMIT = 16_384
_NUMBERS = ("step", "max_steps", "eta_s")
_log = logging.getLogger(__name__)

Life = Literal["running", "suspended", "unknown", "dead"]


@dataclass(frozen=True)
class Sign:
    """A process that works on a run, or did.

    Attributes:
        id: the name of its files.
        holder: the process.
        flow_run_id: its Prefect flow run; None: none.
        api: the address of the Prefect server that knows it; None: an embedded server.
        stage: where it was at the last beat; None: before the first stage.
        progress: how far that stage was, for people.
        at: when the last beat was written, by the writer's clock.
        beat: the last beat as it stands there.
        step, max_steps: optimizer steps, or batches, of the stage; None: not known.
        eta_s: seconds until the stage ends, as it was estimated at the last beat.
        since: when the stage began, ISO-8601 in UTC.
    """

    id: str
    holder: Holder
    flow_run_id: str | None
    api: str | None
    stage: str | None
    progress: str
    at: str | None
    beat: bytes
    step: float | None = None
    max_steps: float | None = None
    eta_s: float | None = None
    since: str | None = None

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
        heart.start()
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
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Keep the sign, which is there, up to date."""
        self._thread = threading.Thread(target=self._keep, name="trainflow-heartbeat", daemon=True)
        self._thread.start()

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
        if self._thread is not None:
            self._done = True
            self._wake.set()
            self._thread.join()

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
