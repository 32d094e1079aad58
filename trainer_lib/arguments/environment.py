"""Who this process is in a job, as whatever started it says: torchrun, Slurm, Kubernetes, MPI, or nobody.

::

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
                        torchrun, accelerate launch, deepspeed, python -m torch.distributed.launch, PyTorchJob
    SLURM_PROCID …      a step of several tasks that srun started
    OMPI_COMM_WORLD_…   mpirun of Open MPI
    JOB_COMPLETION_INDEX with WORLD_SIZE and MASTER_ADDR: an indexed Job of Kubernetes, one process a pod

The first that applies is taken. A batch script of Slurm is one process, although its job has several tasks: only a step
(`SLURM_STEP_ID`) counts. Torch-free.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from trainer_lib.errors import ConfigError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_FIRST_PORT, _PORTS = 15_000, 20_000  # of what is derived from a job's number: below the ports that systems hand out


@dataclass(frozen=True)
class Ranks:
    """Where this process stands.

    Attributes:
        rank, world_size: number of this process in the whole job, and how many there are.
        local_rank, local_world_size: the same on this machine.
        master: host and port where rank 0 is met; None when nothing said so.
        source: who said it, for messages.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master: tuple[str, int] | None = None
    source: str = "nothing"

    def variables(self) -> dict[str, str]:
        """The same as torch.distributed, and whatever else reads torchrun's variables, expects it."""
        named = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }
        if self.master is not None:
            named |= {"MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1])}
        return named


ALONE = Ranks()
"""One process that is no part of a job."""


def ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """This process's place in its job; a world of one when nothing says otherwise.

    Raises:
        ConfigError: a variable is no number, or they contradict each other.
    """
    found = read(environ)
    if found.world_size < 1 or not 0 <= found.rank < found.world_size:
        raise ConfigError(
            f"does not fit a job of {found.world_size} processes.",
            field=f"environment variable {found.source}",
            value=found.rank,
            remedy="Start through torchrun, or unset it.",
        )
    return found


def read(environ: Mapping[str, str] | None = None) -> Ranks:
    """The same, whether or not rank and world fit each other."""
    env = os.environ if environ is None else environ
    for look in (_torchrun, _slurm, _open_mpi, _indexed_job):
        found = look(env)
        if found is not None:
            return found
    return ALONE


def _torchrun(env: Mapping[str, str]) -> Ranks | None:
    rank, world, local = _number(env, "RANK"), _number(env, "WORLD_SIZE"), _number(env, "LOCAL_RANK")
    others = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
    if rank is None and ((world is None and local is None) or any(name in env for name in others)):
        return None  # a job's script often exports WORLD_SIZE and MASTER_ADDR for what Slurm then numbers
    rank, world = rank or 0, 1 if world is None else world
    local_world = _number(env, "LOCAL_WORLD_SIZE")
    if local is None and local_world is None and "KUBERNETES_SERVICE_HOST" in env:
        local, local_world = 0, 1  # a pod of PyTorchJob: it has devices of its own
    return Ranks(
        rank,
        world,
        rank if local is None or local < 0 else local,
        local_world or world,
        _master(env),
        "RANK",
    )


def _slurm(env: Mapping[str, str]) -> Ranks | None:
    if not env.get("SLURM_STEP_ID", env.get("SLURM_STEPID")):
        return None
    rank, world = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if rank is None or world is None or world < 2:
        return None
    local = _number(env, "SLURM_LOCALID") or 0
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"
    counts = tasks_per_node(per_node)
    node = _number(env, "SLURM_NODEID") or 0
    local_world = counts[node] if node < len(counts) else local + 1
    return Ranks(rank, world, local, local_world, _master(env) or _slurm_master(env), "SLURM_PROCID")


def _slurm_master(env: Mapping[str, str]) -> tuple[str, int] | None:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not nodes:
        return None
    job = _number(env, "SLURM_JOB_ID", "SLURM_JOBID") or 0
    step = _number(env, "SLURM_STEP_ID", "SLURM_STEPID") or 0
    return first_host(nodes), _FIRST_PORT + (job + step) % _PORTS


def _open_mpi(env: Mapping[str, str]) -> Ranks | None:
    rank, world = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    if rank is None or world is None:
        return None
    local, local_world = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK"), _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Ranks(rank, world, local or 0, local_world or world, _master(env), "OMPI_COMM_WORLD_RANK")


def _indexed_job(env: Mapping[str, str]) -> Ranks | None:
    rank, world = _number(env, "JOB_COMPLETION_INDEX"), _number(env, "WORLD_SIZE")
    if rank is None or world is None:
        return None
    return Ranks(rank, world, 0, 1, _master(env), "JOB_COMPLETION_INDEX")


def _master(env: Mapping[str, str]) -> tuple[str, int] | None:
    host, port = env.get("MASTER_ADDR"), _number(env, "MASTER_PORT")
    return (host, 29500 if port is None else port) if host else None


def _number(env: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that says something."""
    for name in names:
        text = env.get(name, "").strip()
        if not text:
            continue
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                "is not an integer.",
                field=f"environment variable {name}",
                value=text,
                remedy="Start through torchrun, or unset it.",
            ) from None
    return None


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form of the tasks on each node: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ConfigError("is not Slurm's list of tasks.", field="SLURM_TASKS_PER_NODE", value=text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form of a list: ``gpu[007-009,11],login`` begins with ``gpu007``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", nodes.strip())
    if match is None:
        raise ConfigError("is not Slurm's list of hosts.", field="SLURM_NODELIST", value=nodes)
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def interface_towards(host: str) -> str | None:
    """The network interface whose address is `host`, or through which it is reached; None when that cannot be told.

    Gloo and NCCL otherwise ask what this machine's own name resolves to, which is often another interface.
    """
    import psutil

    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing, it only looks up the way
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    found = {each.address: name for name, each_of in psutil.net_if_addrs().items() for each in each_of}
    return found.get("127.0.0.1" if own.startswith("127.") else own)
