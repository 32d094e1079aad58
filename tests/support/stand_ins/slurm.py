"""Stands in for Slurm's programs: ``python -I -S slurm.py CLUSTER PROGRAM …``, with a cluster that is a folder.

::

    CLUSTER/machines            how many there are
    CLUSTER/hold                while it is there, jobs wait in the queue, for the reason in it
    CLUSTER/silent              the controller does not answer       CLUSTER/refuse     sbatch refuses, for this reason
    CLUSTER/forgets             squeue knows no job                  CLUSTER/unaccounted   sacct knows none
    CLUSTER/unanswered          sbatch takes the job and its answer is lost
    CLUSTER/unshared            the machines do not see the folder of a job
    CLUSTER/calls               every command line
    CLUSTER/jobs/N/state.json   state, code and who has cancelled it
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("sbatch", "srun", "squeue", "sacct", "scancel", "scontrol", "sinfo")
KILL_WAIT_S = 3.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def main(argv: list[str]) -> int:
    """Be one of Slurm's programs. Returns its exit code."""
    cluster, program, *rest = argv
    folder = Path(cluster)
    with (folder / "calls").open("a") as calls:
        calls.write(" ".join([program, *rest]) + "\n")
    if (folder / "silent").exists() and program in ("sbatch", "squeue", "scancel"):
        return _fail(f"{program}: error: Unable to contact slurm controller (connect failure)")
    options = [word for word in rest if word.startswith("--")]
    given = dict(word[2:].partition("=")[::2] for word in options)
    return _PROGRAMS[program](folder, rest, given)


def state_of(folder: Path, number: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "jobs" / number / "state.json").read_text())
    return found


def set_state(folder: Path, number: str, **changes: Any) -> None:
    path = folder / "jobs" / number / "state.json"
    before = state_of(folder, number) if path.exists() else {}
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({**before, **changes}))
    temporary.replace(path)


def signal_tasks(folder: Path, number: str, sent: int) -> list[int]:
    """Signal the processes of a job's tasks; returns those that were there."""
    found = []
    for path in (folder / "jobs" / number).glob("task-*"):
        pid = int(path.read_text())
        try:
            os.kill(pid, sent)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


def start(folder: Path, number: str, **variables: str) -> None:
    """Have the daemon start a job, also again, in the environment in which it was submitted."""
    begin = folder / "jobs" / number / "begin"
    submitted = json.loads((folder / "jobs" / number / "job.json").read_text())["environment"]
    begin.with_suffix(".new").write_text(json.dumps({**submitted, **variables}))
    begin.with_suffix(".new").replace(begin)


def _daemon(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    """Start jobs, which are not processes of the command that submits them; until CLUSTER/stop is there."""
    running: list[subprocess.Popen[bytes]] = []
    while not (folder / "stop").exists():
        for begin in (folder / "jobs").glob("*/begin"):
            environment = json.loads(begin.read_text())
            begin.unlink()
            command = [sys.executable, "-I", "-S", __file__, str(folder), "run", begin.parent.name]
            running.append(subprocess.Popen(command, env=environment, start_new_session=True))
        running = [process for process in running if process.poll() is None]
        time.sleep(0.02)
    for process in running:
        process.wait()
    return 0


def _sbatch(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    if (folder / "refuse").exists():
        return _fail((folder / "refuse").read_text())
    (folder / "jobs").mkdir(exist_ok=True)
    number = _new_number(folder / "jobs")
    script = rest[next(index for index, word in enumerate(rest) if not word.startswith("--")) :]
    least, _, most = given["nodes"].partition("-")
    nodes = min(int(most or least), int((folder / "machines").read_text()))
    job = {"script": script, "output": given["output"], "nodes": nodes, "name": given["job-name"]}
    job["environment"] = dict(os.environ)
    (folder / "jobs" / number / "job.json").write_text(json.dumps(job))
    set_state(folder, number, state="PENDING", code="0:0", by="")
    start(folder, number)
    if (folder / "unanswered").exists():
        return _fail("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    print(number)
    return 0


def _new_number(jobs: Path) -> str:
    """Return the number of a new job; others may be submitted at the same time."""
    while True:
        number = str(len(list(jobs.iterdir())) + 1)
        try:
            (jobs / number).mkdir()
        except FileExistsError:
            continue
        return number


def _run(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    number = rest[0]
    job = json.loads((folder / "jobs" / number / "job.json").read_text())
    while (folder / "hold").exists():
        time.sleep(0.05)
        if state_of(folder, number)["state"] in ENDED:
            return 0
    if (folder / "unshared").exists():  # slurmstepd cannot open the job's output there
        set_state(folder, number, state="FAILED", code="0:53")
        return 0
    set_state(folder, number, state="RUNNING")
    variables = {"SLURM_JOB_ID": number, "SLURM_NNODES": str(job["nodes"]), "FAKE_JOB": number}
    with Path(job["output"]).open("ab") as output:
        done = subprocess.run(
            ["sh", *job["script"]], stdout=output, stderr=output, env={**os.environ, **variables}, check=False
        )
    if state_of(folder, number)["state"] == "RUNNING":
        code = done.returncode
        set_state(folder, number, state="COMPLETED" if code == 0 else "FAILED", code=f"{code}:0")
    return 0


def _srun(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    number, count = os.environ["FAKE_JOB"], int(os.environ["SLURM_NNODES"])
    command = rest[next(index for index, word in enumerate(rest) if not word.startswith("--")) :]
    tasks = []
    for rank in range(count):
        variables = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_NODES": str(count)}
        variables |= {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURMD_NODENAME": f"n{rank + 1}"}
        variables |= {"TMPDIR": str(folder / "tmp")}  # a machine of its own has a disk of its own
        with Path(given["output"].replace("%t", str(rank))).open("ab") as output:
            tasks.append(subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **variables}))
        (folder / "jobs" / number / f"task-{rank}").write_text(str(tasks[-1].pid))
    while any(task.poll() is None for task in tasks):
        time.sleep(0.05)
        if any(task.poll() for task in tasks):
            for task in tasks:
                if task.poll() is None:
                    task.terminate()
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


def _squeue(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    if (folder / "forgets").exists():
        return _fail("slurm_load_jobs error: Invalid job id specified")
    if "name" in given:
        return _by_name(folder, given["name"])
    state = state_of(folder, given["jobs"])["state"]
    reason = (folder / "hold").read_text() if (folder / "hold").exists() else ""
    nodes = "" if state == "PENDING" else "n[1-2]"
    print(f"{state}|{reason or 'Resources' if state == 'PENDING' else 'None'}|{nodes}")
    return 0


def _sacct(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    if (folder / "unaccounted").exists():
        return _fail("Slurm accounting storage is disabled")
    if "name" in given:
        return _by_name(folder, given["name"])
    found = state_of(folder, given["jobs"])
    print(f"{found['state']}{found['by'] and ' ' + found['by']}|{found['code']}|n[1-2]")
    return 0


def _by_name(folder: Path, name: str) -> int:
    for path in (folder / "jobs").glob("*/job.json"):
        if json.loads(path.read_text())["name"] == name:
            print(path.parent.name)
    return 0


def _scancel(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    number = rest[-1]
    if "signal" in given:
        signal_tasks(folder, number, getattr(signal, f"SIG{given['signal']}"))
        return 0
    if state_of(folder, number)["state"] not in ENDED:
        set_state(folder, number, state="CANCELLED", by="by 0")
    signal_tasks(folder, number, signal.SIGTERM)
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline and signal_tasks(folder, number, 0):
        time.sleep(0.05)
    signal_tasks(folder, number, signal.SIGKILL)
    return 0


def _scontrol(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    print("n1\nn2")
    return 0


def _sinfo(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    print(f"debug: {(folder / 'machines').read_text()} machine(s) with 2 CPUs")
    return 0


def _requeue(folder: Path, rest: list[str], given: dict[str, str]) -> int:
    start(folder, rest[0], SLURM_RESTART_COUNT="1")
    return 0


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


_PROGRAMS = {
    "sbatch": _sbatch,
    "srun": _srun,
    "squeue": _squeue,
    "sacct": _sacct,
    "scancel": _scancel,
    "scontrol": _scontrol,
    "sinfo": _sinfo,
    "run": _run,
    "daemon": _daemon,
    "requeue": _requeue,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
