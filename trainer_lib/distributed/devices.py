"""Which device a process computes on."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys

import torch

from trainer_lib.arguments import environment
from trainer_lib.distributed import xla
from trainer_lib.errors import ConfigError

_log = logging.getLogger(__name__)


def choose_device(*, use_cpu: bool) -> torch.device:
    """Choose the device of this process: its own GPU, an XLA device or MPS when alone, else the CPU.

    The n-th process of a machine takes the n-th of the visible GPUs (`CUDA_VISIBLE_DEVICES` selects and orders them).
    Where Slurm or Kubernetes shows each process only its own GPU, the process takes that one.

    Raises:
        ConfigError: there are more local ranks than GPUs, or several ranks would share XLA or MPS.
    """
    ranks = environment.ranks()
    if use_cpu:
        return torch.device("cpu")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        # torchrun (RANK) shows every process all GPUs: a local rank beyond them is then an error.
        if count == 1 and ranks.source not in ("RANK", environment.ALONE.source):
            return torch.device("cuda", 0)
        if ranks.local_rank >= count:
            raise ConfigError(
                f"There are only {count} GPUs on this machine.",
                field="LOCAL_RANK",
                value=ranks.local_rank,
                remedy=f"Start at most {count} processes here, or set use_cpu=True.",
            )
        return torch.device("cuda", ranks.local_rank)
    # torch_xla needs this variable, so where it is set the user means that device.
    if "PJRT_DEVICE" in os.environ and importlib.util.find_spec("torch_xla") is not None:
        _refuse_several("XLA", ranks.world_size)
        device = xla.take_device()
        _refuse_several("XLA", xla.count_replicas())
        return device
    if torch.backends.mps.is_available():
        _refuse_several("MPS", ranks.world_size)
        return torch.device("mps")
    return torch.device("cpu")


def _refuse_several(name: str, world_size: int) -> None:
    if world_size > 1:
        raise ConfigError(
            f"{name} serves one process only.",
            field="WORLD_SIZE",
            value=world_size,
            remedy="Start one process, or set use_cpu=True.",
        )


def mention_idle_gpus(device: torch.device, world_size: int) -> None:
    """Log how to use the other GPUs of this machine when one process sees several: it uses only one."""
    count = torch.cuda.device_count() if device.type == "cuda" and world_size == 1 else 1
    if count > 1:
        script = sys.argv[0] or "script.py"
        _log.warning("One of %d GPUs is used. For all: torchrun --nproc-per-node %d %s", count, count, script)
