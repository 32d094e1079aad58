"""Seeds, the switch to deterministic algorithms, and the random state that Keras layers keep.

Dropout of Keras and its kin draw from a seed that is a parameter of the model: an integer tensor ``[2]`` (seed, draws
so far) that no optimizer trains. It belongs to a process's random state: every rank has its own, and an evaluation
leaves it as it was. Other models have none.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer_lib.data.loading.order import derive


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices); with `deterministic`, also `enable_full_determinism`'s switches."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # NumPy takes 32 bits only
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and use deterministic algorithms only; slower, and an error for an operation without one.

    Sets CUBLAS_WORKSPACE_CONFIG unless it is set: torch reads it when the first CUDA product runs
    (https://pytorch.org/docs/stable/notes/randomness.html). torch.compile selects its kernels without timing them,
    since other kernels round otherwise.
    """
    # The smaller of the two workspaces with which cuBLAS is deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # read when torch's compiler is imported
    compiler: Any = sys.modules.get("torch._inductor.config")
    if hasattr(compiler, "deterministic"):
        compiler.deterministic = True


_NAME = "seed_generator_state"
_GLOBAL = "global"


def capture_seeds(model: nn.Module) -> dict[str, list[int]]:
    """The seeds of a model by name, as JSON."""
    return {name: seed.tolist() for name, seed in _seeds(model).items()}


def restore_seeds(model: nn.Module, saved: Mapping[str, list[int]]) -> None:
    """Restore seeds that `capture_seeds` returned; a name that the model does not have is ignored."""
    create = getattr(sys.modules.get("keras.src.random.seed_generator"), "global_seed_generator", None)
    if _GLOBAL in saved and _global_seed() is None and callable(create):
        create()
    with torch.no_grad():
        for name, seed in _seeds(model).items():
            if name in saved:
                seed.copy_(torch.tensor(saved[name], dtype=seed.dtype))


def part_seeds(model: nn.Module, *numbers: int) -> None:
    """Give the model seeds of its own, which follow from `numbers`."""
    with torch.no_grad():
        for index, seed in enumerate(_seeds(model).values()):
            seed[0] = int(derive(*numbers, index)[0]) & 0x7FFFFFFF


@contextlib.contextmanager
def keep_seeds(model: nn.Module) -> Iterator[None]:
    """Restore the seeds of a model after a block."""
    before = {name: seed.detach().clone() for name, seed in _seeds(model).items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, seed in _seeds(model).items():
                if name in before:
                    seed.copy_(before[name])


def _seeds(model: nn.Module) -> dict[str, torch.Tensor]:
    if "keras" not in sys.modules:
        return {}
    named = {name: tensor for name, tensor in model.named_parameters() if name.endswith(_NAME)}
    seeds: dict[str, torch.Tensor] = {name: tensor for name, tensor in named.items() if not tensor.is_floating_point()}
    if (shared := _global_seed()) is not None:
        seeds[_GLOBAL] = shared
    return seeds


def _global_seed() -> torch.Tensor | None:
    """The seed of `keras.random` functions that are called without one; None before the first such call."""
    state: Any = sys.modules.get("keras.src.backend.common.global_state")
    generator = None if state is None else state.get_global_attribute("global_seed_generator")
    value = getattr(getattr(generator, "state", None), "value", None)
    return value if isinstance(value, torch.Tensor) else None
