"""How each recorded run is now, and the sweep of runs whose process died without a word."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from flows.heartbeat import BEAT_S, Sign, find_silent, read_signs, remove_sign
from flows.past_runs import RUN_FILE, PastRun, list_runs, read_record, run_folder
from flows.prefect_runs import end_flow_run, sweep_dead_runs
from tasks.prefect_client import quick_client
from tasks.stage.retry import now
from trainer_lib.storage import Store

State = Literal["running", "suspended", "finished", "failed", "stopped", "died"]
_ENDED: dict[str, State] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStatus:
    """How one run is.

    Attributes:
        state: running; suspended (its process is stopped by a signal); finished, failed, stopped (by a signal or a
            cancel); died (its process ended without a word).
        sign: the process at work on it, or the one that died; None: the run has ended, or died before it began.
        unswept: signs of dead processes, which `sweep` removes.
    """

    run: PastRun
    state: State
    sign: Sign | None = None
    unswept: tuple[Sign, ...] = ()

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
            "process": str(sign.holder) if sign is not None else None,
            "died": run.record.get("died"),
            "heartbeat": sign.at if sign is not None else None,
            "started": run.started,
            "ended": run.record.get("ended"),
            "stages": dict(run.stages),
            "mlflow_run_id": run.mlflow_run_id,
            "flow_run_id": sign.flow_run_id if sign is not None else None,
        }


def find_statuses(storage: str, on_wait: Callable[[int], object] = lambda _: None) -> list[RunStatus]:
    """How every run recorded on a storage is, the newest first.

    Args:
        on_wait: called with their number before the processes of other machines that seem silent are watched for half
            a minute.

    Raises:
        StorageError: the storage cannot be read.
    """
    # The record before the signs: a command writes its sign first, and removes it last.
    runs = list_runs(storage)
    folders = {run.id: run_folder(storage, run.id) for run in runs}
    signs = {run.id: read_signs(folders[run.id]) for run in runs}
    suspects = [(folders[run.id], sign) for run in runs for sign in signs[run.id] if _seems_silent(sign)]
    if suspects:
        on_wait(len(suspects))
    silent = find_silent(suspects)
    return [_status(run, signs[run.id], silent) for run in runs]


def sweep(storage: str, statuses: list[RunStatus]) -> None:
    """Record for each dead process how it ended: in Prefect, which must have an API here, and on the storage.

    Raises:
        httpx.HTTPError: Prefect's server does not answer; what it must learn is then not forgotten.
        StorageError: the storage cannot be written.
    """
    sweep_dead_runs()
    with quick_client() as client:
        for status in statuses:
            for sign in status.unswept:
                _end_in_prefect(client, sign)
    for status in statuses:
        folder = run_folder(storage, status.run.id)
        if status.state == "died":
            _record_death(folder, status)
        for sign in status.unswept:
            remove_sign(folder, sign)


def _status(run: PastRun, signs: list[Sign], silent: set[str]) -> RunStatus:
    dead = tuple(sign for sign in signs if sign.life() == "dead" or sign.id in silent)
    for sign in signs:
        if sign not in dead:
            return RunStatus(run, "suspended" if sign.life() == "suspended" else "running", sign, dead)
    if run.status == "RUNNING" or run.record.get("died"):
        return RunStatus(run, "died", dead[0] if dead else None, dead)
    return RunStatus(run, _ENDED.get(run.status, "stopped"), None, dead)


def _seems_silent(sign: Sign) -> bool:
    """Whether a process of another machine has to be watched: by its clock the last beat is long ago, or unknown."""
    if sign.life() != "unknown":
        return False
    try:
        age_s = (datetime.now(UTC) - datetime.fromisoformat(sign.at or "")).total_seconds()
    except (ValueError, TypeError):
        return True
    # Only whether to look longer depends on the two clocks, never the verdict.
    return not 0 <= age_s < 3 * BEAT_S


def _end_in_prefect(client: Any, sign: Sign) -> None:
    from prefect.exceptions import ObjectNotFound

    if sign.flow_run_id is None:
        return
    try:
        run = client.read_flow_run(uuid.UUID(sign.flow_run_id))
    except (ObjectNotFound, ValueError):  # of another Prefect server
        return
    if run.state is None or not run.state.is_final():
        cancelling = run.state is not None and run.state.is_cancelling()
        end_flow_run(client, run.id, f"Its process ended without a word ({sign.holder}).", cancelling)


def _record_death(folder: Store, status: RunStatus) -> None:
    # Read again: the same command may have begun to go on with it.
    record = read_record(folder)
    if record.get("status") != "RUNNING" or any(sign not in status.unswept for sign in read_signs(folder)):
        return
    record |= {"status": "KILLED", "died": status.where or "before its first stage", "ended": now()}
    folder.write_bytes(RUN_FILE, json.dumps(record, indent=1).encode())
