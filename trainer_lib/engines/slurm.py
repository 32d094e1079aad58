"""Slurm, by its own commands: `sbatch`, `squeue`, `sacct`, `scancel`.

A job has one task on each machine, ``python -m trainer_lib.engines.slurm FOLDER``; the first leads. The folder lies in
the stage's attempts, where every machine sees it: what the job does, its number, and what its tasks write. A driver
that finds the number of a job working on the same request takes it up instead of submitting another one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from trainer_lib import errors
from trainer_lib.base.json_text import parse_json, read_json
from trainer_lib.base.paths import expand_home
from trainer_lib.engines import member
from trainer_lib.engines.base import Alive, Ended, Job, Lost, State
from trainer_lib.storage import Store

# squeue and sacct are asked more seldom the longer nothing changes.
FIRST_LOOK_S, LAST_LOOK_S = 0.5, 10.0
GONE_S = 120.0  # Slurm answers, and knows nothing of the job: squeue forgets it before sacct learns of it
SILENT_S = 3600.0  # its controller does not answer, while jobs go on
LEAVE_S = 20.0  # for a job whose work is done
COMMAND_S = 60.0
NOTICE_S = 10.0  # beyond the grace time, from the notice of the time limit
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_WORKING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
_UNREACHABLE = re.compile(r"contact slurm controller|timed out|temporarily unable|connection refused|try again", re.I)
_BUSY = re.compile(r"submit.*limit|MaxSubmit", re.I)
# Slurm takes jobs that no machines of the partition can ever run, and lets them wait.
_HOPELESS = {
    "BadConstraints",
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "DependencyNeverSatisfied",
}
_SCRIPT = '#!/bin/sh\nexec "$@"\n'


class Row(NamedTuple):
    """Slurm's state of a job."""

    state: str
    detail: str = ""
    nodes: str = ""


class Slurm:
    """One job of Slurm."""

    outlives_driver = True
    restarts_workers = True

    def __init__(self) -> None:
        self._row = Row("PENDING")
        self._look_s, self._looked = FIRST_LOOK_S, float("-inf")
        self._known = time.monotonic()
        self._silent = False
        self._read, self._partial = 0, b""

    @property
    def _name(self) -> str:
        return f"trainflow-{self._folder.name}"

    def place(self, job: Job) -> None:
        """Submit the job, or take up the one that an earlier driver has submitted for the same request."""
        self._job = job
        self._base = _base(job)
        self._number: str | None = None
        self._cluster: str | None = None
        if not job.shared and self._take_up():
            return
        self._folder = self._base / uuid.uuid4().hex[:12]
        self._folder.mkdir(mode=0o700, parents=True)
        _write(self._folder / "job.json", job.to_text())
        _write(self._folder / "run.sh", _SCRIPT)
        # Before the submission: a job whose number was never read here is found by its name.
        self._record()
        self._submit()
        self._record()

    def addresses(self) -> tuple[str, ...]:
        """Return the names of the job's machines."""
        if self._row.state not in _WORKING:
            return ()
        done = self._run("scontrol", "show", "hostnames", self._row.nodes)
        return tuple(done.stdout.split()) if done.returncode == 0 else (self._row.nodes,)

    def poll(self) -> tuple[list[str], State]:
        """Read what the leading task has written, and ask Slurm for the state when it is time."""
        lines = self._new_lines()
        if any('"result"' in line or '"failure"' in line for line in lines):
            self._look_s = FIRST_LOOK_S
        if time.monotonic() - self._looked >= self._look_s:
            self._look()
        return lines, self._state()

    def end(self, *, now: bool) -> None:
        """Signal the job's tasks, which save; with `now`, cancel what has not ended, and remove the job's files."""
        self._look_s = FIRST_LOOK_S
        if self._number is None:
            return
        if not now:  # a job that waits has no process that could save; it may have begun since the last look
            self._look()
            self._run("scancel", *([] if self._row.state in _WAITING else ["--signal=USR2"]), self._number)
            return
        deadline = time.monotonic() + (LEAVE_S if self._has_said("result", "failure") else 0.0)
        while self._is_active() and time.monotonic() < deadline:
            time.sleep(FIRST_LOOK_S)
            self._look()
        if self._is_active():
            self._run("scancel", self._number)
        if self._row.state not in _WORKING and not self._job.request.get("debug"):
            self._forget()

    def _take_up(self) -> bool:
        """Find the job of an earlier driver. True if it does this very work or has done it."""
        try:
            record = read_json(self._base / "placed.json", dict)
            # The folder will be removed and the number cancelled: the file of a stranger must not choose others.
            if not re.fullmatch(r"\w+", record["folder"]) or not re.fullmatch(r"\d*", record.get("job") or ""):
                return False
            folder = self._base / record["folder"]
            same = read_json(folder / "job.json", dict)["request"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self._folder = folder
        self._cluster = record.get("cluster")
        self._number = record.get("job") or self._find_by_name()
        if self._number is None:
            self._forget()
            return False
        self._look(patiently=True)
        if same == parse_json(self._job.to_text())["request"] and (self._is_active() or self._has_said("result")):
            self._record()
            return True
        deadline = time.monotonic() + COMMAND_S
        while self._is_active() and time.monotonic() < deadline:  # it works on other settings, and on our output
            self._run("scancel", self._number)
            time.sleep(1.0)
            self._look()
        self._forget()
        self._row, self._number = Row("PENDING"), None
        return False

    def _submit(self) -> None:
        config = self._job.config
        least, most = config.node_range
        options = {name: value for name, value in config.engine_options.items() if name != "folder"}
        if "cpus-per-task" not in options and "exclusive" not in options:
            options["cpus-per-task"] = int(config.processes) * (config.threads or 1)
        nodes = least if least == most else f"{least}-{most}"
        notice = f"USR2@{round(config.grace_s + NOTICE_S)}"
        own: dict[str, Any] = {"nodes": nodes, "ntasks-per-node": 1, "job-name": self._name, "signal": notice}
        own |= {"output": self._folder / "job.out", "open-mode": "append", "parsable": True}
        # srun takes them from the command alone, not from the job.
        cores = {name: value for name, value in options.items() if name == "cpus-per-task"}
        task = {"ntasks-per-node": 1, **cores, "output": self._folder / "machine-%t.out", "open-mode": "append"}
        python = [sys.executable, "-P", "-u", "-m", "trainer_lib.engines.slurm", str(self._folder)]
        done = self._run(
            *("sbatch", *_flags({**options, **own}), str(self._folder / "run.sh")),
            *("srun", *_flags({**task, "kill-on-bad-exit": 1}), *python),
            cwd=self._folder,
        )
        if done.returncode == 0 and done.stdout.strip():
            number, _, cluster = done.stdout.strip().splitlines()[-1].partition(";")
            self._number, self._cluster = number, cluster or None
            return
        # It may have been submitted all the same, when only the answer was lost.
        self._number = self._find_by_name() if _UNREACHABLE.search(done.stderr) else None
        if self._number is None:
            self._forget()
            raise self._not_submitted(_last_line(done.stderr))

    def _not_submitted(self, reason: str) -> errors.TrainflowError:
        if _UNREACHABLE.search(reason) or _BUSY.search(reason):
            again = "The same command submits it again."
            return errors.InfrastructureError(f"Slurm did not take the job: {reason}.", remedy=again)
        offered = self._run("sinfo", "--noheader", "--format=%R: %D machine(s) with %c CPUs").stdout.split("\n")
        offers = "; ".join(line.strip() for line in offered if line.strip())
        config = self._job.config
        asked = f"{config.nodes} machine(s) with {config.processes} process(es) each were asked for"
        return errors.ConfigError(
            f"Slurm refused the job: {reason}. The cluster offers {offers or 'nothing'}, and {asked}.",
            field="train.launch.engine_options",
            value=dict(config.engine_options),
            remedy="Change these options, or nodes and processes.",
        )

    def _find_by_name(self) -> str | None:
        for command in (
            ("squeue", "--noheader", "--me", f"--name={self._name}", "--format=%A"),
            ("sacct", "--noheader", "--parsable2", "--allocations", f"--name={self._name}", "--format=JobID"),
        ):
            done = self._run(*command)
            if done.returncode == 0 and done.stdout.split():
                return str(done.stdout.split()[-1])
        return None

    def _record(self) -> None:
        if not self._job.shared:
            record = {"folder": self._folder.name, "job": self._number, "cluster": self._cluster}
            _write(self._base / "placed.json", json.dumps(record))

    def _forget(self) -> None:
        if not self._job.shared:
            (self._base / "placed.json").unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _look(self, *, patiently: bool = False) -> None:
        """Ask for the state of the job; what is not known stays as it was."""
        deadline = time.monotonic() + (COMMAND_S if patiently else 0.0)
        while (row := self._ask()) is None and self._silent and time.monotonic() < deadline:
            time.sleep(1.0)
        self._looked = time.monotonic()
        self._look_s = min(self._look_s * 1.5, LAST_LOOK_S)
        if row is not None:
            self._look_s = self._look_s if row.state == self._row.state else FIRST_LOOK_S
            self._row, self._known = row, time.monotonic()
        elif patiently:
            self._row = Row("UNKNOWN")

    def _ask(self) -> Row | None:
        jobs = f"--jobs={self._number}"
        done = self._run("squeue", "--noheader", "--states=all", jobs, "--format=%T|%r|%N")
        self._silent = done.returncode != 0 and bool(_UNREACHABLE.search(done.stderr))
        row = _last_row(done)
        if row is not None and row.state in _WAITING | _WORKING:
            return row
        # squeue says neither an exit code nor who has cancelled it.
        account = ("sacct", "--noheader", "--parsable2", "--allocations", jobs, "--format=State,ExitCode,NodeList")
        if (ended := _last_row(self._run(*account))) is not None:
            word, _, rest = ended.state.partition(" ")  # "CANCELLED by 1000"
            return ended._replace(state=word, detail=rest or ended.detail)
        return None if row is None else row._replace(detail="")

    def _is_active(self) -> bool:
        return self._row.state in _WAITING | _WORKING

    def _state(self) -> State:
        state, job = self._row.state, f"job {self._number}"
        unknown_s = time.monotonic() - self._known
        if unknown_s > (SILENT_S if self._silent else GONE_S) and self._is_active():
            why = "Slurm has not answered" if self._silent else f"Slurm has known nothing of {job}"
            remedy = "The same command takes the job up if it still runs, and submits it again otherwise."
            return Lost(errors.InfrastructureError(f"{why} for {unknown_s:.0f} s.", remedy=remedy))
        if state == "PENDING" and self._row.detail in _HOPELESS:
            return Lost(self._not_submitted(self._row.detail))
        if state in _WAITING:
            why = "" if self._row.detail in ("", "None") else f" ({self._row.detail})"
            return Alive(f"{job} waits in Slurm's queue{why}")
        if state in _WORKING:
            return Alive(f"{job} runs on {self._row.nodes}" if state == "RUNNING" else f"{job} is {state.lower()}")
        return self._ended(state, job)

    def _ended(self, state: str, job: str) -> State:
        again, tail = "The same command continues from the last save.", self._tail()
        if state in ("COMPLETED", "FAILED"):
            if state == "FAILED" and not (self._folder / "machine-0.out").exists():
                return Lost(self._never_began(job, tail))
            return Ended(_exit_code(self._row), tail)
        if state == "PREEMPTED":
            return Lost(errors.Preempted(f"Slurm took the machines of {job} back.", remedy=again))
        if state == "CANCELLED":
            who = f" {self._row.detail}" if self._row.detail.startswith("by ") else ""
            return Lost(errors.Interrupted(f"The {job} was cancelled{who}.", remedy=again))
        if state == "OUT_OF_MEMORY":
            remedy = "Ask for more (engine_options.mem), or lower per_device_train_batch_size."
            message = f"The {job} had no memory left on its machines."
            return Lost(errors.OutOfMemoryError(message, remedy=remedy, details=tail))
        if state in ("TIMEOUT", "DEADLINE"):
            message = f"The time limit of {job} was reached before the work had been saved."
            remedy = "Give it more time (engine_options.time), or save more often (train.args.save_steps)."
            return Lost(errors.InfrastructureError(message, remedy=remedy))
        reasons = {"NODE_FAIL": "a machine failed", "BOOT_FAIL": "a machine did not start"}
        why = reasons.get(state, f"its state is {state}")
        message = f"The {job} on {self._row.nodes} ended: {why}."
        return Lost(errors.InfrastructureError(message, remedy=again, details=tail))

    def _never_began(self, job: str, tail: str) -> errors.ConfigError:
        return errors.ConfigError(
            f"The {job} ended on {self._row.nodes or 'its machine'} before it had written into its folder"
            + (f": {_last_line(tail)}." if tail else "."),
            field="train.launch.engine_options.folder",
            value=str(self._base),
            remedy="Use a storage, or a folder, and a Python environment that all machines of the cluster see.",
            details=tail,
        )

    def _new_lines(self) -> list[str]:
        try:
            with (self._folder / "machine-0.out").open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []
        self._read += len(data)
        self._known = time.monotonic() if data else self._known  # it lives, whatever Slurm knows of it
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def _has_said(self, *words: str) -> bool:
        """Whether the leading task has written a report of this kind."""
        starts = tuple(f'{{"{word}"'.encode() for word in words)
        try:
            with (self._folder / "machine-0.out").open("rb") as file:
                return any(line.startswith(starts) for line in file)
        except OSError:
            return False

    def _tail(self) -> str:
        """Return the last lines of what Slurm itself and the other machines have written."""
        found = []
        for path in (self._folder / "job.out", *sorted(self._folder.glob("machine-*.out"))):
            if path.exists() and path.name != "machine-0.out":
                found += path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        return "\n".join(found)

    def _run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        where = [f"--clusters={self._cluster}"] if self._cluster and command[0] not in ("sbatch", "scontrol") else []
        line = [command[0], *where, *command[1:]]
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "cwd": cwd, "timeout": COMMAND_S, "check": False}
        try:
            return subprocess.run(line, capture_output=True, text=True, errors="replace", **given)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"{command[0]} timed out after {COMMAND_S:.0f} s")
        except OSError as error:  # sacct is not there where nothing is accounted for
            return subprocess.CompletedProcess(command, 127, "", str(error))


def _base(job: Job) -> Path:
    """Return the folder of the jobs for this output: in its attempts, or where the options say."""
    folder = job.config.engine_options.get("folder")
    store = Store.open(job.output)
    if folder is not None:
        digest = uuid.uuid5(uuid.NAMESPACE_URL, store.url).hex[:16]
        return expand_home(str(folder)) / f"trainflow-{digest}"
    if store.is_local:
        return store.local_path() / "attempts" / "slurm"
    what = "Slurm writes what a job prints into a folder, and the storage is not one."
    remedy = "Name a folder that all machines of the cluster see."
    raise errors.ConfigError(what, field="train.launch.engine_options.folder", value="none", remedy=remedy)


def _last_row(done: subprocess.CompletedProcess[str]) -> Row | None:
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2]
    return Row(*(part.strip() for part in rows[-1])) if rows and done.returncode == 0 else None


def _exit_code(row: Row) -> int:
    """Return the exit code of a job that has ended; squeue, which does not say it, leaves 1 for a failure."""
    code, _, signal = row.detail.partition(":")
    found = int(code) if code.isdigit() else 0
    return found or (128 + int(signal) if signal.isdigit() and int(signal) else int(row.state == "FAILED"))


def _flags(options: dict[str, Any]) -> list[str]:
    given = {name: value for name, value in options.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Try ")]  # its --help
    return re.sub(r"^\w+: (error: )?", "", lines[-1]).rstrip(".") if lines else "it gave no reason"


def _write(path: Path, text: str) -> None:
    """Write a file of this user that appears whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def main(argv: list[str]) -> int:
    """Be the member of this task's machine. Returns the exit code."""
    folder, rank = Path(argv[0]), int(os.environ["SLURM_PROCID"])
    nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ["SLURM_NNODES"]
    # A job that was put back into the queue has another leading machine.
    address = folder / f"address-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    host = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    part = "lead" if rank == 0 else "follow"
    code = member.main([part, str(folder / "job.json"), "--host", host, "--nodes", nodes, "--address", str(address)])
    # srun ends the other tasks when one fails: only the leading one may do that.
    return code if rank == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
