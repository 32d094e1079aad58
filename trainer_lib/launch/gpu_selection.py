"""Which devices the processes of this machine get, found without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from trainer_lib.errors import ConfigError

DEVICE_FILES = Path("/dev")
ORDERS = ("PCI_BUS_ID", "FASTEST_FIRST")
_NAMED = re.compile(r"(GPU|MIG)-[\w/-]+")


def num_cores() -> int:
    """CPU cores this process may run on (its affinity, not the machine's total)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_devices(environment: Mapping[str, str]) -> int:
    """CUDA devices a worker started with `environment` would see; 0 means it runs on the CPU.

    Counted from the device files the container was given, cut to ``CUDA_VISIBLE_DEVICES``; a CPU build of torch sees
    none.
    """
    if not _torch_has_cuda():
        return 0
    present = _present()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = _chosen(visible)
    return min(len(chosen), present) if not any(part.startswith("MIG-") for part in chosen) else len(chosen)


def selection_variables(chosen: Sequence[int | str] | None, order: str | None) -> dict[str, str]:
    """The variables that select and order devices, as a launch's settings ask for it."""
    variables = {}
    if chosen is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, chosen))
    if order is not None:
        variables["CUDA_DEVICE_ORDER"] = order
    return variables


def check_selection(environment: Mapping[str, str]) -> None:
    """Refuse a selection that CUDA would silently cut short.

    It takes the devices up to the first one that it does not know and says nothing, so that training would go on with
    fewer of them, or on the CPU.

    Raises:
        ConfigError: an unknown order; no number or name of a device, one that is not there, or one named twice.
    """
    order = environment.get("CUDA_DEVICE_ORDER")
    if order is not None and order not in ORDERS:
        raise ConfigError(
            "is no order of devices.", field="CUDA_DEVICE_ORDER", value=order, remedy=f"Choose {' or '.join(ORDERS)}."
        )
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not _torch_has_cuda() or _present() == 0:
        return
    chosen, present = _chosen(visible), _present()
    for part in chosen:
        problem = None
        if not part.isdigit() and not _NAMED.fullmatch(part):
            problem = "is neither the number nor the name of a device"
        elif part.isdigit() and int(part) >= present:
            problem = f"there are {present} CUDA devices here, counted from 0"
        elif chosen.count(part) > 1:
            problem = "names a device twice"
        if problem is not None:
            raise ConfigError(
                f"{part}: {problem}.", field="CUDA_VISIBLE_DEVICES", value=visible, remedy="Write for example 0,2."
            )


def _chosen(visible: str) -> list[str]:
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    return chosen[: chosen.index("-1")] if "-1" in chosen else chosen  # CUDA's way of saying: no more


def _present() -> int:
    return sum(1 for path in DEVICE_FILES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


@cache
def _torch_has_cuda() -> bool:
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
