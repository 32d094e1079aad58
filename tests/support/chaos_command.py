"""`trainflow run` in the folder of one case: its processes and its progress, seen from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.chaos_cases import Moment
from tests.support.chaos_project import FORWARD_S, Project

MARK = "TRAINFLOW_CHAOS_CASE"
"""In the environment of every process of a case: its folder."""
POLL_S = 0.02


@dataclass(frozen=True)
class Found:
    """A living process of a case, by the part that it plays."""

    pid: int
    role: str
    words: str


class Workplace:
    """The folder of a case: project, storage, logs, temporary files, and the environment of its commands."""

    def __init__(self, folder: Path, project: Project, home: Path, storage: str | None = None) -> None:
        self.folder = folder
        self.project = project
        self.home = home
        self.storage = folder / "store"
        self.storage_url = storage or str(self.storage)
        self.tmp = folder / "tmp"
        self.log = folder / "log"
        self.tmp.mkdir(parents=True)
        self.spec = project.copy_to(folder / "project")
        self.overrides: list[str] = []
        self.env: dict[str, str] = {}

    def take(self, storage: Path, *, but: str | None = None) -> None:
        """Begin with a copy of a storage, without the results of one stage and without what lies beside the stages.

        Args:
            but: the stage whose result is left out; None copies the whole storage.
        """
        if but is None:
            shutil.copytree(storage, self.storage, dirs_exist_ok=True)
            return
        for folder in (storage / "stages").iterdir():
            if folder.name != but:
                shutil.copytree(folder, self.storage / "stages" / folder.name)
        if but != "push-to-hub":
            shutil.copytree(storage / "hub", self.storage / "hub")

    def start(self, verb: str = "run") -> Command:
        """Start `trainflow run`, or another verb that takes a spec, in a session of its own."""
        trainflow = str(Path(sys.executable).with_name("trainflow"))
        words = [trainflow, verb, str(self.spec), f"storage={self.storage_url}", *self.project.overrides]
        env = {
            **os.environ,
            "PREFECT_HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "XDG_DATA_HOME": str(self.folder / "data"),
            "CHAOS_FORWARD_S": FORWARD_S,
            "PYTHONUNBUFFERED": "1",
            "TRAINFLOW_PREFECT_LINGER_S": "0",  # no process may be left
            **self.env,
            MARK: str(self.folder),
        }
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*words, *self.overrides],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                cwd=self.folder,
                start_new_session=True,
            )
        return Command(self, process)

    def has_worked(self) -> bool:
        """Whether a command has started a stage: one that finds every result committed only looks."""
        return " starts: " in self.log.read_text(errors="replace")

    def processes(self) -> list[Found]:
        """Return the living processes of this case."""
        return find_processes(self.folder)

    def wait_until_gone(self, seconds: float) -> list[Found]:
        """Wait until no process of this case is left, and return those that are after so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def spools(self) -> list[Path]:
        """Return the folders where what is logged waits for MLflow."""
        return [*self.storage.glob("spool/*"), *self.folder.glob("data/trainflow/tracking/*/spool/*")]

    def is_waiting(self) -> bool:
        """Whether something waits for MLflow."""
        return any(path.is_dir() for spool in self.spools() for path in spool.glob("*-*"))

    def kill_all(self) -> None:
        """Send SIGKILL to every process of this case until none is left."""
        kill_processes(self.folder)


class Command:
    """One started command."""

    def __init__(self, place: Workplace, process: subprocess.Popen[bytes]) -> None:
        self.place = place
        self.process = process
        self.started = time.monotonic()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    def wait(self, seconds: float) -> int | None:
        """Wait for its end and return its exit code; None if it still runs after so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def wait_for(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is true; False if the command ends before, or so many seconds pass."""
        deadline = time.monotonic() + seconds
        while self.is_running and time.monotonic() < deadline:
            if reached():
                return True
            time.sleep(POLL_S)
        return False

    def pick(self, role: str, choose: Callable[[Sequence[Found]], Found]) -> Found | None:
        """Return a process that plays this part; None while there is none."""
        if role == "orchestrator":
            return Found(self.process.pid, role, "") if self.is_running else None
        found = [each for each in self.place.processes() if each.role == role]
        return choose(found) if found else None


def find_processes(folder: Path) -> list[Found]:
    """Return the living processes whose mark is this folder, or one below it."""
    marks, found = (f"{MARK}={folder}".encode(), f"{MARK}={folder}/".encode()), []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            environ = (place / "environ").read_bytes().split(b"\0")
            if any(each == marks[0] or each.startswith(marks[1]) for each in environ):
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Found(int(place.name), _role(words), words))
    return sorted(found, key=lambda each: each.pid)


def kill_processes(folder: Path) -> None:
    """Send SIGKILL to those processes until none is left."""
    while left := find_processes(folder):
        for each in left:
            signal_process(each.pid, signal.SIGKILL)
        time.sleep(0.05)


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def has_come(storage: Path, moment: Moment) -> bool:
    """Whether the files of a storage show that the moment has come; its pause is left to the caller."""
    stage = storage / "stages" / moment.stage
    if moment.event == "begin":
        return any(path for path in stage.glob("*/attempts/*.json"))
    if moment.event == "commit":
        return any(stage.glob("*/COMMIT.json"))
    if moment.event in ("step", "save"):
        folders = list(stage.glob(f"*/checkpoints/checkpoint-{moment.step}"))
        committed = [folder for folder in folders if (folder / "COMMIT.json").exists()]
        return bool(committed if moment.event == "step" else folders) or _is_later(stage, moment.step)
    if moment.event == "files":
        return any(storage.glob("hub/*/revisions/*"))
    if moment.event == "closing":
        return any(storage.glob("runs/*/report.html"))
    return True  # "start" and "time"


def _is_later(stage: Path, step: int) -> bool:
    """Whether the training has passed the step, and rotation has removed its checkpoint."""
    steps = [int(path.name.rpartition("-")[2]) for path in stage.glob("*/checkpoints/checkpoint-*")]
    return max(steps, default=0) > step


def _role(words: str) -> str:
    for text, role in (
        ("warm_parent", "warm parent"),  # first, as the words of a worker are part of these
        ("guard.py", "guard"),  # its words end with those of what it guards
        ("trainer_lib.machines.agent", "agent"),
        ("trainer_lib.worker", "worker"),
        ("flows/server/embedded.py", "engine"),
        ("trainflow run", "orchestrator"),
    ):
        if text in words:
            return role
    return "other"
