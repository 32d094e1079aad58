"""The environment variables of workers, and a free port for a launcher that needs one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from trainer_lib.arguments.environment import ALONE, PREFIXES, RANK_VARIABLES
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.launch.settings.gpu_selection import core_share, selection_variables

# Enclosing launchers and schedulers leave these in our environment; a worker would take them for its own.
_FOREIGN = (
    "TORCHELASTIC_",
    "ACCELERATE_",
    "FSDP_",
    "OMPI_COMM_WORLD_",
    "SLURM_STEP",
    "SLURM_PROCID",
    "JOB_COMPLETION_",
    *PREFIXES,
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def worker_environment(config: LaunchConfig, env: Mapping[str, str]) -> dict[str, str]:
    """Return the workers' variables: ours, then `config.env`, then `env`, then those that a launch has to fix."""
    kept = {name: value for name, value in _present().items() if not name.startswith(_FOREIGN)}
    environment = {**kept, **config.env, **env, **selection_variables(config.devices, config.device_order)}
    environment |= thread_variables(threads_of(config, environment))
    environment["PYTHONSAFEPATH"] = "1"  # or a folder of the working directory could shadow an installed module
    # torch's C++ code would warn on every rank of every run about the search for unused parameters.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment["TRAINFLOW_GRACE_S"] = str(config.grace_s)
    if not config.several_nodes:
        environment["TRAINFLOW_WORLD_SIZE"] = str(config.processes)
    interface = config.interface
    if interface is None and not config.several_nodes and Path("/sys/class/net/lo").exists():
        interface = "lo"  # on one machine, collectives must not depend on a network interface
    if interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment[name] = config.interface or environment.get(name) or interface
    return environment | (ALONE.variables() if config.is_one_process else {})


def engine_environment(config: LaunchConfig, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that has an engine place the workers, which set theirs on their machines."""
    return {**_present(), **config.env, **env, "PYTHONSAFEPATH": "1"}


def _present() -> dict[str, str]:
    """This process's variables but for those of ranks, which a trainer in another thread may remove meanwhile."""
    return {name: os.environ[name] for name in os.environ if name not in RANK_VARIABLES}


def threads_of(config: LaunchConfig, environment: Mapping[str, str]) -> str:
    """Number of CPU threads of a worker, as a variable's value."""
    # Shared out, so that the ranks do not compete; a fixed number also fixes the order of additions.
    return str(config.threads or environment.get("OMP_NUM_THREADS") or max(1, core_share() // int(config.processes)))


def thread_variables(threads: str) -> dict[str, str]:
    """Return the variables from which numerical libraries take their number of threads."""
    return dict.fromkeys(_THREAD_VARIABLES, threads)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port for a launcher that needs one. Another process may take it first: the launch is retried."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])
