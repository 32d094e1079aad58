"""Which devices of this machine a launch uses, and its wait until other launches leave them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from trainer_lib.errors import ConfigError, Interrupted
from trainer_lib.launch.config import LaunchConfig
from trainer_lib.launch.gpu_selection import name_devices, selection_variables
from trainer_lib.locks.tickets import POLL_S, Place, Queue, Ticket

SAY_S = 60.0  # between two messages about one wait
CPU = "the CPU"


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
    if config.engine is not None:  # its own queue decides
        yield ()
        return
    variables = {**os.environ, **config.env, **selection_variables(config.devices, config.device_order)}
    gpus = name_devices(variables, int(config.processes)) if on_devices else ()
    limit = config.per_device or (1 if gpus else "any")
    if limit == "any":
        yield ()
        return
    with contextlib.ExitStack() as stack:
        try:
            queue = stack.enter_context(contextlib.closing(Queue()))
            place = stack.enter_context(queue.draw(gpus or (CPU,), what, should_cancel))
            _await_turn(queue, place, limit, on_event, should_cancel)
        except OSError as error:
            _refuse(config.per_device, error, on_event)
            stack.close()
            yield ()
        else:
            yield (place.descriptor,)


def _await_turn(
    queue: Queue,
    place: Place,
    limit: int,
    on_event: Callable[[dict[str, Any]], None],
    should_cancel: Callable[[], bool],
) -> None:
    began, said = time.monotonic(), float("-inf")
    while before := queue.find_before(place, limit, should_cancel):
        if should_cancel():
            raise Interrupted(
                f"Cancelled while it waited for {_names(place.ticket.devices)}.", remedy="The same command continues."
            )
        now = time.monotonic()
        if now - said >= SAY_S:
            said = now
            on_event({"event": "wait", "message": _describe_wait(place.ticket, before)})
        time.sleep(POLL_S)
    if said > 0:
        waited_s = time.monotonic() - began
        free = f"{_names(place.ticket.devices)} can be used."
        on_event({"event": "wait", "message": free[0].upper() + free[1:], "waited_s": waited_s})


def _describe_wait(ticket: Ticket, before: Sequence[Ticket]) -> str:
    shared = [device for device in ticket.devices if any(device in other.devices for other in before)]
    wait = f"waits for {_names(shared)}"
    if before[0].waits:
        return f"{wait}, after {'; '.join(map(str, before))}, which asked first"
    users = "; ".join(f"{other}, since {datetime.fromtimestamp(other.since, UTC):%H:%M} UTC" for other in before)
    return f"{wait}, in use by {users}"


def _names(devices: Sequence[str]) -> str:
    return ", ".join(devices)


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
    on_event({"event": "warning", "message": f"{message} This one starts beside them."})
