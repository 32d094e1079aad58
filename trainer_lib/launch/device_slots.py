"""Launches of one machine and user that use a device at a time: the others wait.

::

    ~/.local/state/trainflow/devices/<machine>/GPU 0.0     locked by a launch that uses the device, and says which it is

A launch locks such a file (flock) for each of its devices, or none; the processes that it starts inherit the open
files. So the kernel frees a device when the last of them has ended, however that was, and not before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer_lib.base.paths import state_folder
from trainer_lib.errors import ConfigError, Interrupted
from trainer_lib.guard import OWNER, start_time
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.launch.settings.gpu_selection import name_devices, selection_variables
from trainer_lib.locks.file_lock import try_lock

SAY_S = 60.0  # between two messages about one wait
POLL_S = 0.2
CPU = "the CPU"
_LIMIT = 4096


@contextlib.contextmanager
def held_devices(
    config: LaunchConfig,
    *,
    on_devices: bool,
    what: str,
    on_event: Callable[[dict[str, Any]], None],
    should_cancel: Callable[[], bool],
) -> Iterator[tuple[int, ...]]:
    """Wait until the devices of a launch are free for it, and hold them inside the block.

    Args:
        config: resolved; its `per_device` says how many launches may use a device at a time.
        on_devices: the work uses accelerators where there are some.
        what: what the launch does; those that wait for it are shown this.

    Yields:
        Open files that the processes of the launch have to inherit: the devices are held until the last one has ended.

    Raises:
        ConfigError: the limit was given, and cannot be kept. Interrupted: `should_cancel` was true.
    """
    variables = {**os.environ, **config.env, **selection_variables(config.devices, config.device_order)}
    # The queue of an engine decides on its machines.
    gpus = name_devices(variables, int(config.processes)) if on_devices and config.engine is None else ()
    limit = "any" if config.engine is not None else config.per_device or (1 if gpus else "any")
    files: Sequence[int] = ()
    if limit != "any":
        try:
            files = _wait_for(gpus or (CPU,), limit, what, on_event, should_cancel)
        except OSError as error:
            _refuse(config.per_device, error, on_event)
    try:
        yield tuple(files)
    finally:
        for descriptor in files:
            os.close(descriptor)


def _wait_for(
    devices: Sequence[str],
    limit: int,
    what: str,
    on_event: Callable[[dict[str, Any]], None],
    should_cancel: Callable[[], bool],
) -> list[int]:
    folder = state_folder("devices") / socket.gethostname()
    folder.mkdir(mode=0o700, exist_ok=True)
    began, said = time.monotonic(), float("-inf")
    names = ", ".join(devices)
    while isinstance(found := _take(folder, devices, limit, what), str):
        if should_cancel():
            raise Interrupted(f"Cancelled while it waited for {names}.", remedy="The same command continues.")
        if time.monotonic() - said >= SAY_S:
            said = time.monotonic()
            on_event({"event": "wait", "message": f"waits for {found}"})
        time.sleep(POLL_S)
    if said > 0:
        free = f"{names[0].upper()}{names[1:]} can be used."
        on_event({"event": "wait", "message": free, "waited_s": time.monotonic() - began})
    return found


def _take(folder: Path, devices: Sequence[str], limit: int, what: str) -> list[int] | str:
    """Lock a file for each device, and return the open files; where that fails, lock none, and return who is there."""
    ours = f"{os.getpid()}:{start_time(os.getpid())} "
    text = f"{ours}{what} (process {os.getpid()}), since {datetime.now(UTC):%H:%M} UTC".encode()
    with contextlib.ExitStack() as opened:
        locked = []
        for device in devices:
            user = ""
            for number in range(limit):
                file = os.open(folder / f"{device.replace('/', '-')}.{number}", os.O_RDWR | os.O_CREAT, 0o600)
                opened.callback(os.close, file)
                if try_lock(file):
                    locked.append(file)
                    os.ftruncate(file, 0)
                    os.pwrite(file, text, 0)
                    break
                user = os.pread(file, _LIMIT, 0).decode(errors="replace")
                # A worker that launches something uses the devices of the launch that it belongs to.
                if OWNER in os.environ and user.startswith(f"{os.environ[OWNER]} "):
                    break
            else:
                return f"{device}, in use by {user.partition(' ')[2]}"
        return list(map(os.dup, locked))  # of the same locks


def _refuse(asked: int | str | None, error: OSError, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Raises ConfigError where the limit was asked for; without one, a warning is enough."""
    reason = f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
    message = f"It cannot be seen which launches use this machine's devices: {reason}."
    if asked is not None:
        raise ConfigError(
            message,
            field="train.launch.per_device",
            value=asked,
            remedy="Make that folder writable, name another one in XDG_STATE_HOME, or leave the setting out.",
        ) from error
    on_event({"event": "warning", "message": f"{message} This one starts next to them."})
