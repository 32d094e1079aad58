"""Seeds, and the switch to deterministic algorithms."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from trainer_lib import xla


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices); with `deterministic`, also `enable_full_determinism`'s switches."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # NumPy takes 32 bits only
    torch.manual_seed(seed)
    if xla.is_used():  # torch does not know its generator
        xla.set_random_state(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and use deterministic algorithms only; slower, and an error for an operation without one.

    Sets CUBLAS_WORKSPACE_CONFIG unless it is set: torch reads it when the first CUDA product runs
    (https://pytorch.org/docs/stable/notes/randomness.html).
    """
    # The smaller of the two workspaces with which cuBLAS is deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
