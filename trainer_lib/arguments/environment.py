"""The identity of this process in a job, from the variables of its launcher: torchrun, Slurm, Kubernetes or MPI.

::

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
                        torchrun, accelerate launch, deepspeed, python -m torch.distributed.launch, PyTorchJob
    SLURM_PROCID …      a step of several tasks that srun started
    OMPI_COMM_WORLD_…   mpirun of Open MPI
    JOB_COMPLETION_INDEX with WORLD_SIZE and MASTER_ADDR: an indexed Job of Kubernetes, one process a pod

The first that applies is used. A batch script of Slurm is one process although its job has several tasks: only a step
(`SLURM_STEP_ID`) counts. Other schedulers start one command on each machine, and number machines::

    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT
                        a TrainJob or PyTorchJob of Kubeflow; torchrun reads the same variables
    SKYPILOT_NUM_NODES, SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS
                        a task of SkyPilot
    DSTACK_NODES_NUM, DSTACK_NODE_RANK, DSTACK_MASTER_NODE_IP
                        a task of dstack

Something still has to start the processes of each machine: a launch of kind `environment`, or torchrun in a script.
Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from trainer_lib.errors import ConfigError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_PORT = 29_500
"""Torchrun's default port of a rendezvous."""
# Ports derived from a job's number: below the range from which systems assign ports.
_FIRST_PORT, _PORTS = 15_000, 20_000


@dataclass(frozen=True)
class Ranks:
    """The place of this process in its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    # Host and port of the rendezvous with rank 0; None when no variable gives them.
    master: tuple[str, int] | None = None
    source: str = "nothing"  # the variable that gave the rank, for messages

    def variables(self) -> dict[str, str]:
        """Return torchrun's variables, which torch.distributed and other libraries read."""
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
"""A process that is not part of a job."""


def ranks(environ: Mapping[str, str] | None = None) -> Ranks:
    """Return this process's place in its job; `ALONE` when no launcher set variables. Raises ConfigError."""
    found = read(environ)
    if found.world_size < 1 or not 0 <= found.rank < found.world_size:
        what = f"This rank does not fit a job of {found.world_size} processes."
        remedy = "Start through torchrun, or unset it."
        raise ConfigError(what, field=f"environment variable {found.source}", value=found.rank, remedy=remedy)
    return found


def read(environ: Mapping[str, str] | None = None) -> Ranks:
    """Return this process's place in its job, without comparing rank and world size. Raises ConfigError."""
    env = os.environ if environ is None else environ
    for look in (_torchrun, _slurm, _open_mpi, _indexed_job):
        found = look(env)
        if found is not None:
            return found
    return ALONE


def _torchrun(env: Mapping[str, str]) -> Ranks | None:
    rank, world, local = find_number(env, "RANK"), find_number(env, "WORLD_SIZE"), find_number(env, "LOCAL_RANK")
    others = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
    if rank is None and ((world is None and local is None) or any(name in env for name in others)):
        return None  # scripts of jobs often export WORLD_SIZE and MASTER_ADDR, and Slurm numbers the processes
    rank, world = rank or 0, 1 if world is None else world
    local_world = find_number(env, "LOCAL_WORLD_SIZE")
    if local is None and local_world is None and "KUBERNETES_SERVICE_HOST" in env:
        local, local_world = 0, 1  # a pod of a PyTorchJob has its own devices
    return Ranks(
        rank,
        world,
        rank if local is None or local < 0 else local,  # without one, all processes count as one machine's
        local_world or world,
        _master(env),
        "RANK",
    )


def _slurm(env: Mapping[str, str]) -> Ranks | None:
    if not env.get("SLURM_STEP_ID", env.get("SLURM_STEPID")):
        return None
    rank, world = find_number(env, "SLURM_PROCID"), find_number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if rank is None or world is None or world < 2:  # a step of one task is an ordinary process
        return None
    local = find_number(env, "SLURM_LOCALID") or 0
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"
    counts = tasks_per_node(per_node)
    node = find_number(env, "SLURM_NODEID") or 0
    local_world = counts[node] if node < len(counts) else local + 1
    master = _master(env)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if master is None and nodes:
        job = find_number(env, "SLURM_JOB_ID", "SLURM_JOBID") or 0
        step = find_number(env, "SLURM_STEP_ID", "SLURM_STEPID") or 0
        # Every task computes the same port on its own; steps of one job that run side by side get different ones.
        master = first_host(nodes), _FIRST_PORT + (job + step) % _PORTS
    return Ranks(rank, world, local, local_world, master, "SLURM_PROCID")


def _open_mpi(env: Mapping[str, str]) -> Ranks | None:
    rank, world = find_number(env, "OMPI_COMM_WORLD_RANK"), find_number(env, "OMPI_COMM_WORLD_SIZE")
    if rank is None or world is None:
        return None
    local, local_world = find_number(env, "OMPI_COMM_WORLD_LOCAL_RANK"), find_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Ranks(rank, world, local or 0, local_world or world, _master(env), "OMPI_COMM_WORLD_RANK")


def _indexed_job(env: Mapping[str, str]) -> Ranks | None:
    rank, world = find_number(env, "JOB_COMPLETION_INDEX"), find_number(env, "WORLD_SIZE")
    if rank is None or world is None:
        return None
    return Ranks(rank, world, 0, 1, _master(env), "JOB_COMPLETION_INDEX")


def _master(env: Mapping[str, str]) -> tuple[str, int] | None:
    host, port = env.get("MASTER_ADDR"), find_number(env, "MASTER_PORT")
    return (host, DEFAULT_PORT if port is None else port) if host else None


def find_number(env: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of these variables that is not empty; None when all are. Raises ConfigError."""
    for name in names:
        text = env.get(name, "").strip()
        if not text:
            continue
        try:
            return int(text)
        except ValueError:
            what = "This is not an integer."
            remedy = "Start through torchrun, or unset it."
            raise ConfigError(what, field=f"environment variable {name}", value=text, remedy=remedy) from None
    return None


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form of the tasks on each node: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ConfigError("This is not a list of tasks in Slurm's form.", field="SLURM_TASKS_PER_NODE", value=text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host in Slurm's short form of a list: ``gpu[007-009,11],login`` begins with ``gpu007``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", nodes.strip())
    if match is None:
        raise ConfigError("This is not a list of hosts in Slurm's form.", field="SLURM_NODELIST", value=nodes)
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def use_interface(host: str, chosen: str | None = None) -> None:
    """Have Gloo and NCCL use the network interface that leads to `host`; they resolve this machine's own name instead.

    One that is `chosen` replaces it, and one that the variables name already stays.
    """
    interface = chosen or _interface_towards(host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _interface_towards(host: str) -> str | None:
    import psutil

    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing: it only finds the route
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    found = {address.address: name for name, each_of in psutil.net_if_addrs().items() for address in each_of}
    return found.get("127.0.0.1" if own.startswith("127.") else own)


PREFIXES = ("PET_", "SKYPILOT_NODE", "SKYPILOT_NUM_", "DSTACK_NODE", "DSTACK_MASTER_NODE")
# The number of machines, the place of this one, and the address of the first.
_SCHEDULERS = (
    ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
    ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
    ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP"),
)
LOOKED_FOR = (
    "RANK and WORLD_SIZE",
    "SLURM_STEP_ID and SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "JOB_COMPLETION_INDEX and WORLD_SIZE",
    *(names[0] for names in _SCHEDULERS),
)
"""The variables by which `launch.kind: environment` recognises a job."""


@dataclass(frozen=True)
class Machines:
    """The machines of a job, and which of them this one is."""

    nodes: int | str  # number of machines, or a range such as ``"1:4"``
    node_rank: int
    processes: int | None  # processes to start on each machine; None: not given
    master: tuple[str, int] | None  # host and port of the rendezvous with machine 0; None when no variable gives them
    source: str  # the variable that gave the number of machines, for messages

    @property
    def most(self) -> int:
        """The largest number of machines."""
        return int(str(self.nodes).rpartition(":")[2])


def find_machines(environ: Mapping[str, str] | None = None) -> Machines | None:
    """The place of this machine in its job; None when no such scheduler started this process. Raises ConfigError."""
    env = os.environ if environ is None else environ
    named = (names for names in _SCHEDULERS if env.get(names[0], "").strip())
    source, place, address = next(named, (None, "", ""))
    # Below torchrun every process has a rank of its own.
    if source is None or env.get("LOCAL_RANK"):
        return None
    nodes = env[source].strip()
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
        what = "This is neither a number of machines nor a range."
        raise ConfigError(what, field=f"environment variable {source}", value=nodes, remedy="Correct it, or unset it.")
    rank = find_number(env, place, "JOB_COMPLETION_INDEX", "GROUP_RANK")
    if rank is None and nodes != "1":
        what = f"The environment describes {nodes} machines ({source}), and this variable is not set."
        remedy = "Set it on every machine, or write launch.nodes, node_rank and rendezvous."
        raise ConfigError(what, field=f"environment variable {place}", remedy=remedy)
    # Besides a number, torchrun takes "gpu", "cpu" and "auto": this machine's.
    is_named = env.get("PET_NPROC_PER_NODE", "").strip() in ("auto", "gpu", "cpu", "xpu")
    processes = None if is_named else find_number(env, "PET_NPROC_PER_NODE")
    count = int(nodes) if nodes.isdigit() else nodes
    found = Machines(count, rank or 0, processes, _find_meeting(env, address), source)
    if not 0 <= found.node_rank < found.most:
        what = f"This number does not fit a job of {nodes} machines."
        remedy = "Correct it, or unset it."
        raise ConfigError(what, field=f"environment variable {source}", value=found.node_rank, remedy=remedy)
    return found


def _find_meeting(env: Mapping[str, str], address: str) -> tuple[str, int] | None:
    """The rendezvous of the machines; not every scheduler names a port, so a script's own variables may."""
    host = next(iter(env.get(address, "").split()), None) or env.get("MASTER_ADDR")  # the first of SkyPilot's list
    port = find_number(env, "PET_MASTER_PORT", "MASTER_PORT")
    if not host and env.get("PET_RDZV_ENDPOINT"):
        host, _, text = env["PET_RDZV_ENDPOINT"].strip().rpartition(":")
        host, port = (host, find_number({"PET_RDZV_ENDPOINT": text}, "PET_RDZV_ENDPOINT")) if host else (text, port)
    return (host, DEFAULT_PORT if port is None else port) if host else None


def is_whole_job() -> bool:
    """Whether Slurm's variables describe a job of one task, so that one process alone is all of it."""
    env = os.environ
    if not (env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")):
        return False
    in_step = bool(env.get("SLURM_STEP_ID", env.get("SLURM_STEPID")))
    tasks = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if in_step else ("SLURM_NTASKS",)
    nodes = 1 if in_step else find_number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    return (find_number(env, *tasks) or 1) == 1 and (nodes or 1) == 1
