"""The CPU cores and GPUs that worker processes of this machine may use. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from trainer_lib.errors import ConfigError

DEVICE_FILES = Path("/dev")
# How many processes like this one have launches at the same time, as the slots of a sweep do.
SHARED_BY = "TRAINFLOW_SHARED_BY"
ORDERS = ("PCI_BUS_ID", "FASTEST_FIRST")
_NAMED = re.compile(r"(GPU|MIG)-[\w/-]+")


def num_cores() -> int:
    """Number of CPU cores that this process may run on (its affinity, not the machine's total)."""
    # In a container or under Slurm the process may use fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_share() -> int:
    """Number of cores for the threads of one launch: those of this process, or its share of them where others work."""
    others = os.environ.get(SHARED_BY, "")
    return max(1, num_cores() // max(1, int(others) if others.isdigit() else 1))


def num_devices(environment: Mapping[str, str]) -> int:
    """Number of CUDA devices that a worker with these variables sees; 0 means that it runs on the CPU."""
    return len(list_visible(environment))


def list_visible(environment: Mapping[str, str]) -> list[str]:
    """The CUDA devices that a worker with these variables sees, as CUDA_VISIBLE_DEVICES names them; none on the CPU.

    They are the device files of this container, reduced to ``CUDA_VISIBLE_DEVICES``. A CPU build of torch sees none.
    """
    if not _torch_has_cuda():
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(_present())]
    chosen = _chosen(visible)
    # Parts of one GPU (MIG) are chosen by name, and have no device file of their own.
    return chosen if any(part.startswith("MIG-") for part in chosen) else chosen[: _present()]


def selection_variables(chosen: Sequence[int | str] | None, order: str | None) -> dict[str, str]:
    """Return the variables that select and order the devices as the settings of a launch ask."""
    variables = {}
    if chosen is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, chosen))
    if order is not None:
        variables["CUDA_DEVICE_ORDER"] = order
    return variables


def check_selection(environment: Mapping[str, str]) -> None:
    """Refuse a selection of devices that CUDA would silently shorten.

    CUDA ignores the first device that it does not know and all after it, without a warning, so training would go on
    with fewer devices, or on the CPU. Raises ConfigError.
    """
    order = environment.get("CUDA_DEVICE_ORDER")
    if order is not None and order not in ORDERS:
        remedy = f"Choose {' or '.join(ORDERS)}."
        raise ConfigError("This is not an order of devices.", field="CUDA_DEVICE_ORDER", value=order, remedy=remedy)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not _torch_has_cuda() or _present() == 0:
        return
    chosen, present = _chosen(visible), _present()
    for part in chosen:
        problem = None
        if not part.isdigit() and not _NAMED.fullmatch(part):
            problem = "is neither the number nor the name of a device"
        elif part.isdigit() and int(part) >= present:
            problem = f"does not exist: the numbers of the {present} CUDA devices here begin with 0"
        elif chosen.count(part) > 1:
            problem = "is named twice"
        if problem is not None:
            remedy = "Write the devices as in 0,2."
            raise ConfigError(f"Device {part} {problem}.", field="CUDA_VISIBLE_DEVICES", value=visible, remedy=remedy)


def _chosen(visible: str) -> list[str]:
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    return chosen[: chosen.index("-1")] if "-1" in chosen else chosen  # CUDA stops at -1


def _present() -> int:
    # /dev/nvidiactl and its like are not devices.
    return sum(1 for path in DEVICE_FILES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


@cache
def _torch_has_cuda() -> bool:
    from importlib import metadata  # it loads the email package, and a spec is read without it

    try:
        # Asked of the package's version, because importing torch takes seconds.
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
