"""How many processes fit on this machine, found without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

DEVICE_FILES = Path("/dev")


def cores() -> int:
    """CPU cores this process may run on (its affinity, not the machine's total)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def devices(environment: Mapping[str, str]) -> int:
    """CUDA devices a worker started with `environment` would see; 0 means it runs on the CPU.

    Counted from the device files the container was given, cut to ``CUDA_VISIBLE_DEVICES``; a CPU build of torch sees
    none.
    """
    if not _torch_has_cuda():
        return 0
    present = sum(1 for path in DEVICE_FILES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    if "-1" in chosen:  # CUDA ignores everything from the first invalid number on
        chosen = chosen[: chosen.index("-1")]
    return min(len(chosen), present) if not any(part.startswith("MIG-") for part in chosen) else len(chosen)


@cache
def _torch_has_cuda() -> bool:
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
