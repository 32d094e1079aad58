"""Plays one case of `benchmarks.chaos_pipeline`: the fault comes from outside, then the same command is run again."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._chaos_cases import FORWARD_S, Case, Moment, Project
from benchmarks._chaos_services import MlflowServer, Relay, Services
from tests.support.machine import fill, small_disk

MARK = "TRAINFLOW_CHAOS_CASE"
"""In the environment of every process of a case: its folder."""
POLL_S = 0.02
COMMANDS = 4
GONE_S = 30.0
"""After the end of a command its processes may take so long to end: five seconds of grace, on a busy machine."""
DISK_BYTES = 96 << 20
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "hang up": signal.SIGHUP, "interrupt": signal.SIGINT}
FILES = {
    "result": "stages/*/*/{data,model,predictions,metrics.json,data.json,README.md}",
    "checkpoint": "stages/train/*/checkpoints",
    "commit": "stages/*/*/COMMIT.json",
    "publication": "hub",
    "record": "runs",
    "books": "stages/*/*/{key.json,attempts,lease,history.json}",
}
# In this order: the words of a guard end with those of what it guards.
ROLES = {
    "guard.py": "guard",
    "trainer_lib.machines.agent": "agent",
    "trainer_lib.worker": "worker",
    "flows/server/embedded.py": "engine",
    "trainflow run": "orchestrator",
}


def settings(url: str, name: str, *, processes: int, tracked: bool) -> list[str]:
    """The settings of a case: an experiment and a registered model of this name on the MLflow server at `url`."""
    words = [f"tracking.uri={url}", f"tracking.experiment={name}", f"train.launch.processes={processes}"]
    if not tracked:
        return [*words, "tracking.enabled=false"]
    return [*words, f"register.name={name}", "register.metric=test_accuracy"]


@dataclass(frozen=True)
class Found:
    """A living process of a case, by the part that it plays."""

    pid: int
    role: str
    words: str

    def signal(self, number: int) -> None:
        """Send it a signal; it may have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def find_processes(folder: Path) -> list[Found]:
    """Return the living processes whose mark is this folder, or one below it."""
    mark, found = f"{MARK}={folder}/".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            if any((word + b"/").startswith(mark) for word in (place / "environ").read_bytes().split(b"\0")):
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                role = next((role for text, role in ROLES.items() if text in words), "other")
                found.append(Found(int(place.name), role, words))
    return sorted(found, key=lambda process: process.pid)


def kill_processes(folder: Path) -> None:
    """Send SIGKILL to those processes until none is left."""
    while left := find_processes(folder):
        for process in left:
            process.signal(signal.SIGKILL)
        time.sleep(0.05)


def has_come(storage: Path, moment: Moment) -> bool:
    """Whether the files of a storage show that the moment has come; its pause is left to the caller."""
    stage = storage / "stages" / moment.stage
    if moment.event in ("step", "save"):
        folders = list(stage.glob("*/checkpoints/checkpoint-*"))
        steps = {int(folder.name.rpartition("-")[2]): folder for folder in folders}
        is_there = moment.step in steps and (moment.event == "save" or (steps[moment.step] / "COMMIT.json").exists())
        return is_there or max(steps, default=0) > moment.step  # it has been passed, and perhaps rotated away
    signs = {
        "begin": (stage, "*/attempts/*.json"),
        "commit": (stage, "*/COMMIT.json"),
        "files": (storage, "hub/*/revisions/*"),
        "closing": (storage, "runs/*/report.html"),
    }
    folder, pattern = signs.get(moment.event, (storage.parent, ""))  # "start" and "time" have come
    return not pattern or any(folder.glob(pattern))


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
        """Begin with a copy of a storage, or with its stages alone without the results of one (`but`)."""
        if but is None:
            shutil.copytree(storage, self.storage, dirs_exist_ok=True)
            return
        for folder in (storage / "stages").iterdir():
            if folder.name != but:
                shutil.copytree(folder, self.storage / "stages" / folder.name)
        if but != "push-to-hub":
            shutil.copytree(storage / "hub", self.storage / "hub")

    def start(self, verb: str = "run") -> Command:
        """Start `trainflow run`, or another verb that takes a spec, in another session."""
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def wait_for(self, reached: Callable[[], Any], seconds: float) -> Any:
        """Wait until something is true, and return it; None if the command ends before, or so many seconds pass."""
        deadline = time.monotonic() + seconds
        while self.is_running and time.monotonic() < deadline:
            if found := reached():
                return found
            time.sleep(POLL_S)
        return None

    def with_role(self, role: str) -> list[Found]:
        """Return the processes that play this part."""
        if role == "orchestrator":
            return [Found(self.process.pid, role, "")] if self.is_running else []
        return [process for process in self.place.processes() if process.role == role]


class Scene:
    """A case while it is played; leave it (a context) only after the checks, because disks go with it.

    Attributes:
        injected: whether the fault came before the command ended.
        codes, seconds: of the commands, in order; the code of one that had to be killed is None.
        problems: what was wrong while it was played.
        synced: whether `trainflow sync` had to deliver what still waited for MLflow after the last command.
        seen: what was hit, in words.
        database: of the MLflow server.
    """

    def __init__(self, case: Case, place: Workplace, services: Services, spans: Mapping[str, float]) -> None:
        self.case = case
        self.place = place
        self.services = services
        self.draw = random.Random(f"{case.seed} scene {case.number}")
        self.injected = self.synced = False
        self.codes: list[int | None] = []
        self.seconds: list[float] = []
        self.problems: list[str] = []
        self.seen = ""
        self.database = services.mlflow.database
        self._at_rest = case.family == "damage" and case.moment.event in ("start", "closing")
        self._spans = spans
        self._limit_s = max(120.0, 6 * spans[""])
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        kill_processes(self.place.folder)
        self._stack.close()

    def play(self, reference: Path) -> None:
        """Play the case; committed results are taken from the storage of the undisturbed run."""
        case = self.case
        if case.family == "disk":
            self._stack.enter_context(small_disk(getattr(self.place, case.target), DISK_BYTES))
        if self.place.home != self.services.home:
            shutil.copytree(self.services.new_home, self.place.home, dirs_exist_ok=True)
        if not case.whole or self._at_rest:
            self.place.take(reference, but=None if self._at_rest else case.moment.stage or "push-to-hub")
        self._track(f"http://127.0.0.1:{self.services.mlflow.port}")
        code = _PLAYS[case.family](self)
        # What waits for a server is delivered, and what could not be recorded is corrected, by the next command.
        if case.family in ("mlflow", "twice") or case.target == "home":
            code = self._finish(self.place.start())
        while code != 0 and len(self.codes) < COMMANDS:
            code = self._finish(self.place.start())
        if code != 0:
            self.problems.append(f"command: exit codes {self.codes}")
        elif self.place.is_waiting():  # the summary names the command that delivers it
            if "deliver it" not in self.place.log.read_text(errors="replace").rpartition("browse it")[2]:
                self.problems.append("MLflow: something waits, and the last summary does not say so")
            self.synced = self._finish(self.place.start("sync")) == 0
        self._expect_gone("last")

    def _wait_for_moment(self, command: Command) -> bool:
        """Wait for the case's moment; False if the command ended before."""
        moment = self.case.moment
        if not command.wait_for(lambda: has_come(self.place.storage, moment), self._limit_s):
            return False
        span = self._spans.get("" if moment.event in ("time", "start") else moment.stage, 1.0)
        if moment.event in ("step", "save", "commit", "files", "closing"):
            span = 0.3
        command.wait(moment.pause * span)
        return command.is_running

    def _finish(self, command: Command) -> int | None:
        """Wait for the end of a command, and note its exit code."""
        code = command.wait(self._limit_s)
        if code is None:
            self.problems.append(f"command: it did not end within {self._limit_s:.0f} s")
            kill_processes(self.place.folder)
            command.process.wait()
        self.codes.append(code)
        self.seconds.append(round(time.monotonic() - command.started, 1))
        return code

    def _finish_first(self, command: Command, *, may_stay: bool = False) -> int | None:
        """Wait for the end of the disturbed command and, if the case says so, of all its processes."""
        code = self._finish(command)
        if not self.case.at_once and not may_stay:
            self._expect_gone("first")
        return code

    def _expect_gone(self, which: str) -> None:
        if left := self.place.wait_until_gone(GONE_S):
            first = f"{left[0].role}: {left[0].words[:80]}"
            self.problems.append(f"orphans: {len(left)} after the {which} command ({first})")

    def _track(self, url: str) -> None:
        case = self.case
        self.place.overrides = settings(url, f"case-{case.number}", processes=case.processes, tracked=case.tracked)

    # -- processes ----------------------------------------------------------------------------------------------------

    def hit_process(self) -> int | None:
        """Send a signal to the target.

        "freeze" stops it and kills the orchestrator; "power" kills all processes at once; "drain" asks all of them to
        end, and kills those that are left after some seconds, as a machine that is given back does.
        """
        case, command = self.case, self.place.start()
        role = "engine" if case.family == "prefect" else case.target
        frozen = False
        if self._wait_for_moment(command):
            if case.target == "all":
                self.injected = True
                for process in self.place.processes() if case.fault == "drain" else []:
                    process.signal(signal.SIGTERM)
                self.place.wait_until_gone(case.seconds if case.fault == "drain" else 0.0)
                kill_processes(self.place.folder)
            elif found := command.wait_for(lambda: command.with_role(role), self._limit_s):
                self._signal(command, self.draw.choice(found))
                frozen = case.fault == "freeze" and role == "guard"
        # The supervisor of the workers is stopped: the next command ends them.
        return self._finish_first(command, may_stay=frozen)

    def _signal(self, command: Command, target: Found) -> None:
        self.injected, self.seen = True, target.words[:100] or target.role
        target.signal(SIGNALS.get(self.case.fault, signal.SIGSTOP))
        if self.case.fault == "stop":
            time.sleep(self.case.seconds)
            target.signal(signal.SIGCONT)
        elif self.case.fault == "freeze":
            time.sleep(0.3)
            command.process.kill()

    # -- servers and disks --------------------------------------------------------------------------------------------

    def disturb_mlflow(self) -> int | None:
        """Make the MLflow server dead, slow, silent or failing, some time or until the end of the first command."""
        case = self.case
        if case.fault == "killed":
            server = MlflowServer(self.place.folder / "mlflow")
            self._stack.callback(server.kill)
            self.database = server.database
            self._track(f"http://127.0.0.1:{server.port}")
            return self._disturb(server.kill, server.start, case.seconds)
        relay = self._relay(self.services.mlflow.port)
        self._track(relay.url)
        if case.fault in ("away", "slow"):
            self.injected = True
            relay.set("dead" if case.fault == "away" else "open", delay_s=case.seconds / 3)
            code = self._finish_first(self.place.start())
            relay.set("open")
            return code
        mode = {"outage": "dead", "silent": "silent", "errors": "errors"}[case.fault]
        seconds = None if case.fault == "silent" else case.seconds
        return self._disturb(lambda: relay.set(mode), lambda: relay.set("open"), seconds)

    def disturb_prefect(self) -> int | None:
        """Make a configured Prefect server dead, slow or silent for some time; signal an embedded one."""
        if self.case.target == "embedded server":
            return self.hit_process()
        port, password = self.services.engine()
        relay = self._relay(port)
        self.place.env = {"PREFECT_API_URL": f"{relay.url}/api", "PREFECT_API_AUTH_STRING": password}
        return self._disturb_relay(relay)

    def disturb_store(self) -> int | None:
        """Make the S3 server dead, slow or silent for some time."""
        server = self.services.s3()
        relay = self._relay(int(server.endpoint.rpartition(":")[2]))
        self.place.env = {**server.env, "AWS_ENDPOINT_URL": relay.url}
        return self._disturb_relay(relay)

    def _relay(self, port: int) -> Relay:
        relay = Relay(port)
        self._stack.callback(relay.close)
        return relay

    def _disturb_relay(self, relay: Relay) -> int | None:
        delay_s = 0.5 if self.case.fault == "slow" else 0.0
        mode = {"outage": "dead", "slow": "open", "silent": "silent"}[self.case.fault]
        return self._disturb(lambda: relay.set(mode, delay_s=delay_s), lambda: relay.set("open"), self.case.seconds)

    def fill_disk(self) -> int | None:
        """Fill the disk for some time, or until the end of the first command."""
        ballast: list[Path] = []
        folder: Path = getattr(self.place, self.case.target)
        seconds = self.case.seconds if self.case.at_once else None
        return self._disturb(lambda: ballast.append(fill(folder)), lambda: ballast.pop().unlink(), seconds)

    def _disturb(self, begin: Callable[[], object], end: Callable[[], object], seconds: float | None) -> int | None:
        """Begin at the moment; end after so many seconds, or with the command."""
        command = self.place.start()
        if not self._wait_for_moment(command):
            return self._finish_first(command)
        begin()
        self.injected = True
        if seconds is not None:
            time.sleep(seconds)
            end()
        code = self._finish_first(command)
        if seconds is None:
            end()
        return code

    # -- files --------------------------------------------------------------------------------------------------------

    def damage_files(self) -> int | None:
        """Damage what lies in the storage, after the end or after a power cut, then run the command."""
        if not self._at_rest:
            command = self.place.start()
            self._wait_for_moment(command)
            kill_processes(self.place.folder)
            self._finish(command)
        storage, fault = self.place.storage, self.case.fault
        if fault == "folder":
            paths = [path for path in storage.glob("stages/*/*") if path.is_dir()]
        else:
            paths = _files(storage, FILES[self.case.target]) or _files(storage, "stages")
        if paths:
            path, other = self.draw.choice(paths), self.draw.choice(paths)
            self.injected, self.seen = True, str(path.relative_to(storage))
            if fault in ("swap", "folder"):
                self.seen += f" and {other.relative_to(storage)}"
                _swap(path, other, self.place.folder / "aside")
            else:
                self._damage(path)
        return self._finish(self.place.start())

    def _damage(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        if self.case.fault == "missing":
            path.unlink()
        elif self.case.fault == "cut":
            os.truncate(path, self.draw.randrange(len(data)))
        else:
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
            path.write_bytes(data)

    # -- two commands -------------------------------------------------------------------------------------------------

    def run_twice(self) -> int | None:
        """Start the command a second time while it runs; perhaps kill the first one then."""
        first = self.place.start()
        self.injected = self._wait_for_moment(first)
        second = self.place.start()
        if self.case.fault == "one killed":
            first.wait(self.case.seconds)
            first.process.kill()
        code, later = self._finish(first), self._finish(second)
        if later != 0 or (code != 0 and self.case.fault == "both"):
            self.problems.append(f"command: of two at once they ended with {code} and {later}")
        return later


def _files(storage: Path, pattern: str) -> list[Path]:
    head, _, names = pattern.partition("{")
    patterns = [head + name for name in names.rstrip("}").split(",")] if names else [pattern]
    tops = [path for part in patterns for path in storage.glob(part)]
    files = (file for top in tops for file in (top.rglob("*") if top.is_dir() else [top]))
    return sorted(file for file in files if file.is_file() and file.stat().st_size)


def _swap(path: Path, other: Path, aside: Path) -> None:
    if path == other:  # of a folder that is drawn twice nothing stays
        if path.is_dir():
            shutil.rmtree(path)
        return
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


_PLAYS: dict[str, Callable[[Scene], Any]] = {
    "process": Scene.hit_process,
    "prefect": Scene.disturb_prefect,
    "mlflow": Scene.disturb_mlflow,
    "store": Scene.disturb_store,
    "disk": Scene.fill_disk,
    "damage": Scene.damage_files,
    "twice": Scene.run_twice,
}
