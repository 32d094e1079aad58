"""The place of this machine in a job whose scheduler starts one command on each machine.

::

    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT
                        a TrainJob or PyTorchJob of Kubeflow; torchrun reads the same variables
    SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES, SKYPILOT_NODE_IPS, SKYPILOT_NUM_GPUS_PER_NODE
                        a task of SkyPilot
    DSTACK_NODE_RANK, DSTACK_NODES_NUM, DSTACK_MASTER_NODE_IP, DSTACK_GPUS_PER_NODE
                        a task of dstack

They number machines, not processes: something still has to start the processes of each machine. A launch of kind
`environment` does, and so does torchrun in a script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer_lib.arguments.environment import DEFAULT_PORT, find_number
from trainer_lib.errors import ConfigError

PREFIXES = ("PET_", "SKYPILOT_NODE", "SKYPILOT_NUM_", "DSTACK_NODE", "DSTACK_MASTER_NODE", "DSTACK_GPUS_")
LOOKED_FOR = (
    "RANK and WORLD_SIZE",
    "SLURM_STEP_ID and SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "JOB_COMPLETION_INDEX and WORLD_SIZE",
    "PET_NNODES",
    "SKYPILOT_NODE_RANK",
    "DSTACK_NODE_RANK",
)
"""The variables by which `launch.kind: environment` recognises a job."""


@dataclass(frozen=True)
class Machines:
    """The machines of a job, and which of them this one is.

    Attributes:
        nodes: number of machines, or a range such as ``"1:4"``.
        node_rank: number of this machine, from 0.
        processes: processes to start on each machine; None: not given.
        is_exact: `processes` is the job's own setting, not a number of GPUs.
        master: host and port of the rendezvous with machine 0; None when no variable gives them.
        source: the variable that gave the number of machines, for messages.
    """

    nodes: int | str
    node_rank: int
    processes: int | None
    is_exact: bool
    master: tuple[str, int] | None
    source: str

    @property
    def most(self) -> int:
        """The largest number of machines."""
        return int(str(self.nodes).rpartition(":")[2])


def find_machines(environ: Mapping[str, str] | None = None) -> Machines | None:
    """Return the place of this machine in its job; None when no such scheduler started this process.

    Raises:
        ConfigError: a variable is not a number, is missing beside the others, or contradicts them.
    """
    env = os.environ if environ is None else environ
    for look in (_kubeflow, _skypilot, _dstack):
        found = look(env)
        if found is None:
            continue
        if not 0 <= found.node_rank < found.most:
            raise ConfigError(
                f"This number does not fit a job of {found.nodes} machines.",
                field=f"environment variable {found.source}",
                value=found.node_rank,
                remedy="Correct it, or unset it.",
            )
        return found
    return None


def is_whole_job(environ: Mapping[str, str] | None = None) -> bool:
    """Whether Slurm's variables describe a job of one task, so that one process alone is all of it."""
    env = os.environ if environ is None else environ
    if not (env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")):
        return False
    in_step = bool(env.get("SLURM_STEP_ID", env.get("SLURM_STEPID")))
    tasks = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if in_step else ("SLURM_NTASKS",)
    nodes = 1 if in_step else find_number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    return (find_number(env, *tasks) or 1) == 1 and (nodes or 1) == 1


def _kubeflow(env: Mapping[str, str]) -> Machines | None:
    nodes = env.get("PET_NNODES", "").strip()
    # Below torchrun every process has a rank of its own.
    if not nodes or env.get("LOCAL_RANK"):
        return None
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
        raise _unreadable("PET_NNODES", nodes, "This is neither a number of machines nor a range.")
    rank = find_number(env, "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "GROUP_RANK")
    if rank is None and nodes != "1":
        raise _missing("PET_NODE_RANK", f"{nodes} machines (PET_NNODES)")
    host = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    port = find_number(env, "PET_MASTER_PORT", "MASTER_PORT")
    if not host and env.get("PET_RDZV_ENDPOINT"):
        host, _, text = env["PET_RDZV_ENDPOINT"].strip().rpartition(":")
        host, port = (host, find_number({"PET_RDZV_ENDPOINT": text}, "PET_RDZV_ENDPOINT")) if host else (text, port)
    # Besides a number, torchrun takes "gpu", "cpu" and "auto": this machine's.
    named = env.get("PET_NPROC_PER_NODE", "").strip() in ("auto", "gpu", "cpu", "xpu")
    processes = None if named else find_number(env, "PET_NPROC_PER_NODE")
    return Machines(
        int(nodes) if nodes.isdigit() else nodes,
        rank or 0,
        processes,
        processes is not None,
        (host, DEFAULT_PORT if port is None else port) if host else None,
        "PET_NNODES",
    )


def _skypilot(env: Mapping[str, str]) -> Machines | None:
    rank = find_number(env, "SKYPILOT_NODE_RANK")
    if rank is None:
        return None
    addresses = env.get("SKYPILOT_NODE_IPS", "").split()
    nodes = find_number(env, "SKYPILOT_NUM_NODES") or len(addresses)
    if not nodes:
        raise _missing("SKYPILOT_NUM_NODES", f"machine {rank} (SKYPILOT_NODE_RANK)")
    gpus = find_number(env, "SKYPILOT_NUM_GPUS_PER_NODE")
    return Machines(nodes, rank, gpus or None, False, _meeting(env, addresses[0] if addresses else None), _SKYPILOT)


def _dstack(env: Mapping[str, str]) -> Machines | None:
    rank = find_number(env, "DSTACK_NODE_RANK")
    if rank is None:
        return None
    nodes = find_number(env, "DSTACK_NODES_NUM")
    if nodes is None:
        raise _missing("DSTACK_NODES_NUM", f"machine {rank} (DSTACK_NODE_RANK)")
    gpus = find_number(env, "DSTACK_GPUS_PER_NODE")
    return Machines(nodes, rank, gpus or None, False, _meeting(env, env.get("DSTACK_MASTER_NODE_IP")), _DSTACK)


_SKYPILOT, _DSTACK = "SKYPILOT_NODE_RANK", "DSTACK_NODE_RANK"


def _meeting(env: Mapping[str, str], host: str | None) -> tuple[str, int] | None:
    """Where the machines meet: neither scheduler names a port, so a script's own variables may."""
    port = find_number(env, "MASTER_PORT")
    host = env.get("MASTER_ADDR") or host
    return (host, DEFAULT_PORT if port is None else port) if host else None


def _unreadable(name: str, value: str, what: str) -> ConfigError:
    return ConfigError(what, field=f"environment variable {name}", value=value, remedy="Correct it, or unset it.")


def _missing(name: str, beside: str) -> ConfigError:
    return ConfigError(
        f"The environment describes {beside}, and this variable is not set.",
        field=f"environment variable {name}",
        remedy="Set it on every machine, or write launch.nodes, node_rank and rendezvous.",
    )
