"""A real Slurm of two machines on this one: `needs("slurm")` asks for Debian's packages slurm-wlm and munge, and root.

Everything lies in one folder: munge's key and socket, the configuration, spools and logs. `SLURM_CONF` leads Slurm's
commands there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.machine import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel")
_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=5
MinJobAge=60
SlurmdTimeout=20
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL
PartitionName=requeued Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def is_installed() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of machines n1 and n2 with two cores each; yields the variables that lead to it."""
    for name in ("state", "munge"):
        (folder / name).mkdir(parents=True, mode=0o700)
    folder.chmod(0o711)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    host = socket.gethostname()
    config = folder / "slurm.conf"
    config.write_text(_CONF.format(folder=folder, host=host, ports=[free_port() for _ in range(3)]))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    variables = {"SLURM_CONF": str(config)}
    with contextlib.ExitStack() as stack:
        munge = folder / "munge"
        _start(
            stack,
            folder / "munged.out",
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        _wait(lambda: (munge / "socket").exists(), "munged has no socket")
        _start(stack, folder / "slurmctld.out", "slurmctld", "-D", "-f", str(config))
        for name in ("n1", "n2"):
            _start(stack, folder / f"slurmd-{name}.out", "slurmd", "-D", "-N", name, "-f", str(config))
        _wait(lambda: _idle(variables) == 2, "the machines are not idle")
        yield variables


def _idle(variables: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%T"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split().count("idle")


def _start(stack: contextlib.ExitStack, log: Path, *command: str) -> None:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)


def _wait(condition: object, what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
