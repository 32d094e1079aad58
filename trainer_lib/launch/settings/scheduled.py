"""The place of this machine or process in a job that a scheduler has started (`launch.kind: environment`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainer_lib.arguments import environment
from trainer_lib.launch.settings.refusal import refused

if TYPE_CHECKING:
    from trainer_lib.arguments.environment import Machines, Ranks
    from trainer_lib.launch.settings.config import LaunchConfig


def with_environment(config: LaunchConfig, *, use_cpu: bool) -> LaunchConfig:
    """Take the place of this machine or process that a scheduler assigned; raise ConfigError when there is none."""
    found = environment.ranks()
    # A PyTorchJob sets RANK as well, which numbers its pods, however many processes they have.
    machines = environment.find_machines()
    if machines is not None and (found is environment.ALONE or machines.source == "PET_NNODES"):
        return _with_machines(config, machines, use_cpu=use_cpu)
    # One process of one is a job too; no variable at all means that machines would train alone.
    if found is environment.ALONE and not environment.is_whole_job():
        looked = ", ".join(environment.LOOKED_FOR)
        raise refused(
            "kind",
            config.kind,
            f"No scheduler described a job to this process: none of {looked} is set.",
            "Start the command through the scheduler (Slurm: srun, also in a batch script), write nodes, node_rank and "
            "rendezvous, or set kind=auto for this machine alone.",
        )
    return _with_ranks(config, found)


def _with_machines(config: LaunchConfig, found: Machines, *, use_cpu: bool) -> LaunchConfig:
    """Take the machines that Kubeflow, SkyPilot or dstack started: they start their own processes."""
    if found.is_exact and config.processes not in ("auto", found.processes):
        raise refused(
            "processes",
            config.processes,
            f"The job starts {found.processes} processes on each machine (PET_NPROC_PER_NODE).",
            "Leave it out, or make them equal.",
        )
    # A number of GPUs is what machines have, of which fewer may be used, or none.
    if config.processes == "auto" and found.processes is not None and (found.is_exact or not use_cpu):
        config = replace(config, processes=found.processes)
    if found.most == 1:
        return replace(config, kind="auto", nodes=1, node_rank=None, rendezvous=None)
    rendezvous = config.rendezvous or (":".join(map(str, found.master)) if found.master else None)
    return replace(config, kind="torchrun", nodes=found.nodes, node_rank=found.node_rank, rendezvous=rendezvous)


def _with_ranks(config: LaunchConfig, found: Ranks) -> LaunchConfig:
    """Take the ranks that Slurm, MPI or an enclosing torchrun assigned: the processes that they started are nodes."""
    if found.world_size == 1:
        return replace(config, kind="auto", nodes=1, node_rank=None, rendezvous=None)
    rendezvous = config.rendezvous or (":".join(map(str, found.master)) if found.master else None)
    local = {}
    if found.local_world_size > 1:
        if config.processes not in ("auto", 1):
            raise refused(
                "processes",
                config.processes,
                f"Each of this machine's {found.local_world_size} tasks is one process ({found.source}).",
                "Leave it out, or start one task per machine.",
            )
        config = replace(config, processes=1)
        local = {"TRAINFLOW_LOCAL_RANK": f"{found.local_rank}/{found.local_world_size}"}
    return replace(
        config,
        kind="torchrun",
        nodes=found.world_size,
        node_rank=found.rank,
        rendezvous=rendezvous,
        env={**config.env, **local},
    )
