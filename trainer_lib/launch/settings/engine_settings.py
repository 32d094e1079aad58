"""The settings of a launch that an engine places, and their check before anything is asked of a cluster.

Nothing of an engine's package is imported: whether it is installed is all that can be seen here.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import MissingExtraError
from trainer_lib.launch.settings.refusal import refused

if TYPE_CHECKING:
    from trainer_lib.launch.settings.config import LaunchConfig

# What the engine decides, or what holds for one machine only.
_DECIDED = ("node_rank", "rendezvous", "devices", "device_order", "per_device", "config_file")
_PROGRAMS = ("sbatch", "squeue", "scancel")
# What we pass to sbatch ourselves, and where it is set instead.
_OURS = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "nodes and processes of the launch"),
    **dict.fromkeys(("job-name", "output", "error", "open-mode", "parsable", "wrap", "array", "wait"), "nothing"),
    **dict.fromkeys(("signal", "input", "export", "chdir", "test-only"), "grace_s, env and the spec"),
}
# The others that sbatch takes.
_SBATCH = (
    *("account", "acctg-freq", "begin", "clusters", "comment", "constraint", "contiguous", "core-spec"),
    *("cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency"),
    *("distribution", "exclude", "exclusive", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus"),
    *("gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "hold", "licenses"),
    *("mail-type", "mail-user", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice"),
    *("no-requeue", "nodefile", "nodelist", "oversubscribe", "partition", "power", "prefer", "priority", "profile"),
    *("qos", "requeue", "reservation", "sockets-per-node", "spread-job", "switches", "thread-spec"),
    *("threads-per-core", "time", "time-min", "tmp", "tres-per-task", "uid", "use-min-nodes", "wckey", "container"),
)
_RESOURCE = re.compile(r"[A-Za-z_][\w:.-]*")


def check(config: LaunchConfig, known: Sequence[str]) -> None:
    """Check the settings of an engine, which must be among those that are known.

    Raises:
        ConfigError: an unknown engine, one that is not installed here, settings that do not belong to it.
    """
    if config.engine is None:
        name = "address" if config.address is not None else "engine_options"
        raise refused(
            name, getattr(config, name), "Only an engine reads this setting.", f"Set engine ({', '.join(known)})."
        )
    if config.engine not in known:
        raise refused("engine", config.engine, "This is not an engine.", f"Choose one of {', '.join(known)}.")
    if config.kind not in ("auto", "torchrun", "process"):
        raise refused("kind", config.kind, "An engine starts the processes of each machine itself.", "Remove it.")
    for name in _DECIDED:
        if getattr(config, name) is not None:
            raise refused(
                name, getattr(config, name), f"The engine {config.engine} decides this on the cluster.", "Remove it."
            )
    if config.processes == "auto" and not config.is_one_process:
        raise refused(
            "processes",
            "auto",
            "The devices of the cluster's machines cannot be seen from here, and the global batch depends on them.",
            "Give the number of processes of each machine.",
        )
    if config.is_one_process and config.several_nodes:
        raise refused("nodes", config.nodes, "The launcher 'process' runs one process.", "Set kind=auto.")
    if config.engine == "ray":
        _check_ray(config)
    else:
        _check_slurm(config)


def _check_ray(config: LaunchConfig) -> None:
    if importlib.util.find_spec("ray") is None:  # finds it without importing it
        raise MissingExtraError(
            "This engine belongs to the package ray, which is not installed.",
            extra="ray",
            field="train.launch.engine",
            value="ray",
        )
    if config.address is not None and not re.fullmatch(r"auto|[^/\s]+:\d+", config.address):
        raise refused(
            "address",
            config.address,
            "This is not the address of a Ray cluster.",
            "Give host:port of its head, and run the command on a machine of the cluster; ray:// is not served.",
        )
    for name, value in config.engine_options.items():
        if not _RESOURCE.fullmatch(name) or isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise refused(
                f"engine_options.{name}",
                value,
                "This is not an amount of a resource.",
                "Give a number from 0 on for cpus, gpus, memory (bytes) or a custom resource of the cluster.",
            )


def _check_slurm(config: LaunchConfig) -> None:
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            raise refused(
                "engine",
                "slurm",
                f"Slurm's program {program} is not on this machine's PATH.",
                "Run the command where jobs are submitted, on a login node of the cluster.",
            )
    if config.address is not None:
        raise refused(
            "address", config.address, "Slurm's programs know their cluster.", "Remove it (engine_options.clusters)."
        )
    for name, value in config.engine_options.items():
        field = f"engine_options.{name}"
        if name in _OURS:
            instead = _OURS[name]
            remedy = "Remove it." if instead == "nothing" else f"Remove it; see {instead}."
            raise refused(field, value, "trainflow passes this option to sbatch itself.", remedy)
        if name not in (*_SBATCH, "folder"):
            raise refused(field, value, "sbatch has no such option.", suggestion(name, [*_SBATCH, "folder"]))
