"""The private folder through which a launch's owner and its workers exchange files, and its removal after a crash.

::

    <tmp>/trainflow-<uid>/<random>/     mode 0700, removed when the launch ends
        request.json        what to do; no secrets
        place               digest of the output, or of what else two launches must not share
        owner.pid guard.pid agent.pid worker-<rank>.pid     "pid start-time", one each
        events.jsonl        progress, appended by rank 0
        result.json         written last by rank 0, when everything is done and on the store
        error-rank<r>.json  why a rank failed
        guard.json agent.json   how the command and the ranks ended
        stack-<rank>.txt    the stacks of a rank that made no progress
        trace-<rank>.json   the collectives that it had entered; kept, with the stacks, when the launch ends
        stacks.asked cancelled  the owner asks for those stacks; the owner ends the launch
        reserve             room on the disk for how the launch ends, should the disk become full
        launch.json         the settings, for the agent of this machine or the driver of an engine
        outcome.json        several machines: how this one's part ended
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer_lib.base.json_text import parse_json, read_json
from trainer_lib.errors import ConfigError, InfrastructureError, StorageFullError, is_full_disk
from trainer_lib.guard import Process, is_alive, read_process, send_signal, start_time
from trainer_lib.launch.settings.config import LaunchConfig, from_settings

POLL_S = 0.1
HALF_MADE_S = 3600.0  # a younger folder without an owner may be one that is just being made
_LOADING_S = 0.01
PLACES = re.compile(r"stack-\d+\.txt|trace-\d+\.json")
_PLACE = "place"
_RESERVE, _RESERVE_BYTES = "reserve", 256 << 10
MARK = "TRAINFLOW_RUN_DIR"  # in the environment of every process of a launch
NOTHING = "nothing"  # the verb of a launch that only dismisses the waiting machines
WARM_SOCKET = "TRAINFLOW_WARM_SOCKET"  # the descriptor at which a worker waits for its launch (`launch.warm`)
_SETTINGS = "launch.json"


class RunDir:
    """The folder of one launch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events_read = 0

    @classmethod
    def make(cls) -> RunDir:
        """Make a folder for a launch to come. Raises ConfigError or StorageFullError, as `create`."""
        while True:
            # Suppressed: another launch that ended has just removed the empty base.
            with suppress(FileNotFoundError), _typed_if_full():
                run_dir = cls(Path(tempfile.mkdtemp(dir=_private_base())))
                break
        with _typed_if_full(run_dir):
            run_dir.record_process("owner", os.getpid())
        return run_dir

    @classmethod
    def create(
        cls,
        request: dict[str, Any],
        grace_s: float,
        should_cancel: Callable[[], bool],
        *,
        shared: bool = False,
        engine: str | None = None,
        made: RunDir | None = None,
    ) -> RunDir:
        """Make a folder for `request`, after the processes of earlier, killed launches of the same output have ended.

        `shared`: other launches may work on this output at the same time. `engine` places the launch, whose leading
        machine may be this one. `made`: the folder, where a worker waits in it already. Raises ConfigError where the
        folder for run files is another user's, InfrastructureError where a living process works on this output,
        StorageFullError.
        """
        # Separate for those that share an output, so that none takes another for one that was killed.
        place = uuid.uuid4().hex if shared else f"{engine or ''}{request.get('output', '')}"
        digest = hashlib.sha256(place.encode()).hexdigest()[:16]
        with _typed_if_full():
            base = _private_base()
        for path in list(base.iterdir()):
            with suppress(FileNotFoundError):  # the folder's owner has just removed it
                _sweep_one(path, digest, grace_s, should_cancel)
        run_dir = made or cls.make()
        with _typed_if_full(run_dir):
            run_dir.write(_PLACE, digest)
            run_dir.write_json("request.json", request)
            (run_dir.path / _RESERVE).write_bytes(bytes(_RESERVE_BYTES))
        return run_dir

    def record_process(self, name: str, pid: int) -> None:
        """Record a process of this launch with its start time, which a later process with its pid does not share."""
        self.write(f"{name}.pid", f"{pid} {start_time(pid)}")

    def find_processes(self) -> set[Process]:
        """Return the launch's living processes: the recorded ones, and those with its mark in their environment.

        When the guard, which knew them all, is gone, the mark also finds the workers' children (Linux only).
        """
        recorded = (read_process(path) for path in self.path.glob("*.pid") if path.stem != "owner")
        found = {process for process in recorded if process is not None and is_alive(process)}
        # The files miss what an agent started before it died; its mark in the environment does not.
        if not (found := found | self._find_marked()):
            time.sleep(_LOADING_S)  # the environment of a process looks empty until its program is loaded
            found = self._find_marked()
        return found

    def _find_marked(self) -> set[Process]:
        found, mark = set(), f"{MARK}={self.path}".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # the process has just ended, or belongs to another user
                if mark in environment.read_bytes().split(b"\0"):
                    pid = int(environment.parent.name)
                    found |= {Process(pid, start) for start in [start_time(pid)] if start is not None}
        return found

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a file atomically: a reader finds all of it, or no file."""
        self.write(name, json.dumps(value))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file; None if it was never written."""
        try:
            return read_json(self.path / name, dict)
        except (OSError, ValueError):
            return None

    def read_errors(self) -> list[dict[str, Any]]:
        """Return the failure records of all ranks, earliest first."""
        records = [self.read_json(path.name) for path in self.path.glob("error-rank*.json")]
        return sorted((record for record in records if record), key=lambda record: float(record.get("time", 0)))

    def read_new_events(self) -> list[dict[str, Any]]:
        """Return the events appended since the last call, up to the last complete line."""
        try:
            with (self.path / "events.jsonl").open("rb") as file:
                file.seek(self._events_read)
                data = file.read()
        except OSError:
            return []
        # The last line may be half written.
        complete = data[: data.rfind(b"\n") + 1]
        self._events_read += len(complete)
        events = []
        for line in complete.splitlines():
            with suppress(ValueError):  # a line that a full disk has cut
                events.append(parse_json(line, dict))
        return events

    def read_stacks(self) -> dict[int, str]:
        """Return the stacks that ranks wrote, in the order of the ranks, without empty ones."""
        stacks = {int(name[6:-4]): text for name, text in self.read_places().items() if name.startswith("stack")}
        return dict(sorted(stacks.items()))

    def read_places(self) -> dict[str, str]:
        """Return the files with the stacks and the collective traces of ranks, without empty ones."""
        files = {path.name: path for path in self.path.glob("*-*.*") if PLACES.fullmatch(path.name)}
        return {name: text for name, path in files.items() if (text := path.read_text(errors="replace"))}

    def find_workers(self) -> list[Process]:
        """Return the workers of this machine that have recorded themselves."""
        recorded = map(read_process, self.path.glob("worker-*.pid"))
        return [process for process in recorded if process is not None]

    def request_stacks(self) -> None:
        """Ask every rank, on all machines, to write its stack."""
        self.write("stacks.asked", "")

    def ask_workers_for_stacks(self) -> None:
        """Have the workers of this machine write their stacks, and their traces, which they do at the request."""
        self.request_stacks()
        for process in self.find_workers():
            send_signal(process, signal.SIGUSR1)

    def has_stacks_request(self) -> bool:
        """Whether the owner has asked for the stacks."""
        return (self.path / "stacks.asked").exists()

    def mark_cancelled(self) -> None:
        """Record that the owner ends the launch, so that it is not attempted again."""
        with suppress(OSError):
            self.write("cancelled", "")

    def was_cancelled(self) -> bool:
        """Whether the owner has ended the launch."""
        return (self.path / "cancelled").exists()

    def clear_attempt(self) -> None:
        """Remove the files of an earlier attempt's workers: their processes, failure records, stacks and traces."""
        for pattern in ("worker-*.pid", "error-rank*.json", "stack-*.txt", "trace-*.json", "stacks.asked"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    def end_processes(self, patience_s: float, should_cancel: Callable[[], bool] = lambda: False) -> None:
        """Wait for the launch's processes to end, then send SIGKILL to those that did not."""
        deadline = time.monotonic() + patience_s
        while self.find_processes() and time.monotonic() < deadline and not should_cancel():
            time.sleep(POLL_S)
        while left := self.find_processes():
            for process in left:
                send_signal(process, signal.SIGKILL)
            time.sleep(POLL_S)

    def keep(self) -> None:
        """Keep the folder for a user who wants to look into it: later launches do not remove it."""
        self.write("keep", "")

    def close(self) -> None:
        """Remove the folder when the launch ends; of a kept folder all but stacks and traces."""
        if not (self.path / "keep").exists():
            self.remove()
            return
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "keep" and not path.name.startswith(("stack-", "trace-")):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder, and its parent if that is empty now."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a file atomically, into the reserve where the disk is full."""
        try:
            self._write_whole(name, text)
        except OSError as error:
            if not is_full_disk(error):
                raise
            (self.path / _RESERVE).unlink(missing_ok=True)  # another process of the launch may have done it
            self._write_whole(name, text)

    def _write_whole(self, name: str, text: str) -> None:
        # Written aside and moved: a reader never sees half a file.
        temporary = self.path / f"{name}.tmp"
        try:
            temporary.write_text(text)
            temporary.replace(self.path / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def _typed_if_full(run_dir: RunDir | None = None) -> Iterator[None]:
    """Turn a full disk into a typed failure; a run directory that is half made is removed."""
    try:
        yield
    except OSError as error:
        if run_dir is not None:
            run_dir.remove()
        if not is_full_disk(error):
            raise
        place = tempfile.gettempdir()
        what = f"The files of a run need {_RESERVE_BYTES:,} bytes, {shutil.disk_usage(place).free:,} are free."
        remedy = "Free space there, or set TMPDIR to a folder on another disk."
        raise StorageFullError(what, field="TMPDIR", value=place, remedy=remedy) from error


def _private_base() -> Path:
    """Make ``<tmp>/trainflow-<uid>``, private to this user: the owner of the folder can read and redirect our files."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    base = Path(tempfile.gettempdir()) / f"trainflow-{user}"
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    # Another user may have made the folder first, to read our requests or to lead our files elsewhere.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        what = "The folder for run files is not private to this user."
        remedy = "Remove it (or chmod 700 it if it is yours), or set TMPDIR to a folder of your own."
        raise ConfigError(what, field="TMPDIR", value=str(base), remedy=remedy)
    return base


def _sweep_one(path: Path, digest: str, grace_s: float, should_cancel: Callable[[], bool]) -> None:
    if (path / "keep").exists():
        return
    place = path / _PLACE
    same_output = place.exists() and place.read_text() == digest
    owner, leftover = read_process(path / "owner.pid"), RunDir(path)
    if owner is not None and is_alive(owner):
        if same_output and leftover.find_processes():
            remedy = "Wait for that process, or end it; then run the same command again."
            raise InfrastructureError(f"Process {owner.pid} already writes this output.", remedy=remedy)
        return
    if same_output:
        leftover.end_processes(grace_s, should_cancel)
    half_made = owner is None and time.time() - path.stat().st_mtime < HALF_MADE_S
    if not half_made and not leftover.find_processes():
        leftover.remove()


def write_settings(run_dir: RunDir, config: LaunchConfig, **more: Any) -> None:
    """Write the settings of the launch, and what else the process that starts its workers needs. No secret."""
    run_dir.write_json(_SETTINGS, {"config": dataclasses.asdict(config), **more})


def read_settings(run_dir: RunDir) -> tuple[LaunchConfig, dict[str, Any], dict[str, Any]]:
    """Read the settings that `write_settings` wrote, the request next to them, and all that was written."""
    written, request = run_dir.read_json(_SETTINGS), run_dir.read_json("request.json")
    if written is None or request is None:
        what = "The folder does not hold a launch."
        raise ConfigError(what, field="run dir", value=str(run_dir.path), remedy="Start through trainflow.")
    return from_settings(written["config"]), request, written
