"""Training on an XLA device with torch_xla, which records operations and runs them when a step is marked.

torch_xla is imported when a process takes its device. Where it is not used, nothing here imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_used() -> bool:
    """Whether this process has taken an XLA device."""
    package = sys.modules.get("torch_xla")
    library = getattr(package, "_XLAC", None)
    return library is not None and bool(library._xla_runtime_is_initialized())


def take_device() -> torch.device:
    """Take this process's XLA device."""
    device: torch.device = importlib.import_module("torch_xla").device()
    return device


def count_replicas() -> int:
    """Return the number of devices that run this script together: more than one under `torch_xla.launch`."""
    return int(importlib.import_module("torch_xla.runtime").world_size())


def mark_step(*_: Any) -> None:
    """Run what was recorded so far, without waiting for it. Arguments, which hooks give, are ignored."""
    importlib.import_module("torch_xla").sync()


def _core() -> Any:
    return importlib.import_module("torch_xla.core.xla_model")


def random_state() -> int:
    """Return the state of the device's random number generator, an unsigned 64-bit number."""
    return int(_core().get_rng_state())


def set_random_state(state: int) -> None:
    """Set the device's random number generator to a state, or seed it: both are one number."""
    _core().set_rng_state(state)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards the device's random number generator is where it was; without an XLA device nothing happens."""
    state = random_state() if is_used() else None
    try:
        yield
    finally:
        if state is not None:
            set_random_state(state)


def memory_address(tensor: Tensor) -> int:
    """A number that tensors ``[...]`` on one device share if and only if they begin in the same memory.

    One of XLA has no address: there it is the number of its values, which tied weights share.
    """
    if tensor.device.type == "xla":
        return int(importlib.import_module("torch_xla")._XLAC._xla_get_tensor_id(tensor))
    return tensor.data_ptr()


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module; its parameters stay the same objects, so tied weights stay tied and optimizers keep theirs."""
    if device.type != "xla":
        module.to(device)  # torch puts the new values into the same parameters
        return
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
