"""Launch one request in several workers that are independent and share the parts of the job.

Workers are separate launches with separate guards: one that is lost ends no other, which takes its parts over
(`trainer_lib.locks.shared_parts`). Any other failure would meet the next worker too, so it ends them all.

The owner of a launch may be on another machine: reports, and the owner's sign of life, go through the job's folder.

    claims/<id>/owner                 the owner's sign of life, renewed by a thread; "stop" once the work shall end
    claims/<id>/<time>-<worker>-<id>  lines and events of a worker, about one file a second; the owner removes them

So it takes nothing of what runs the workers but to call a function with a text: no channel, and no way to stop a call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import queue
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from typing import Any, Self, TypeVar

from typing_extensions import override

from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import to_record
from trainer_lib.errors import ConfigError, InfrastructureError, Interrupted, StorageError, from_exception
from trainer_lib.launch.base import launch
from trainer_lib.launch.settings.config import LaunchConfig, from_settings, unshared
from trainer_lib.launch.settings.gpu_selection import core_share, list_visible
from trainer_lib.locks.lease import Heartbeat
from trainer_lib.locks.shared_parts import CLAIMS
from trainer_lib.protocol.requests import Request, read_request
from trainer_lib.storage import Store

R = TypeVar("R")

POLL_S = 0.2
REPORT_S = 0.5  # between two reports of the work of all
BEAT_S = 5.0
SILENT_S = 60.0  # without a new sign of life of the owner: its work ends
LOOK_S = 2.0
FLUSH_S = 1.0
_OWNER = "owner"
_STOP = b"stop"
_REPORT = re.compile(r"\d{20}-\d{4}-[0-9a-f]{8}")
_LIMIT = 1 << 26
_log = logging.getLogger(__name__)


def apart(config: LaunchConfig, *, on_devices: bool = True) -> list[LaunchConfig]:
    """A resolved configuration of several processes as several of one, with the same threads and, `on_devices`, a GPU.

    What starts its processes by another program, or on several machines, stays as it is. An engine places them all.
    """
    count = int(config.processes)
    if config.engine is not None and not config.several_nodes:
        return [replace(config, kind="process", processes=1)] * count
    if config.kind != "torchrun" or config.several_nodes or count == 1:
        return [config]
    threads = config.threads or max(1, core_share() // count)
    single = replace(config, kind="process", processes=1, threads=threads)
    devices = (config.devices or list_visible({**os.environ, **config.env})) if on_devices else ()
    if len(devices) < count:  # a CPU, or a GPU of another kind than CUDA's
        return [single] * count
    env = {name: value for name, value in config.env.items() if name != "CUDA_VISIBLE_DEVICES"}
    return [replace(single, devices=(device,), env=env) for device in devices[:count]]


def launch_workers(
    request: Request[R],
    configs: Sequence[LaunchConfig],
    *,
    env: Mapping[str, str],
    on_line: Callable[[str], None],
    on_event: Callable[[dict[str, Any]], None],
    should_cancel: Callable[[], bool] = lambda: False,
    what: str | None = None,
) -> tuple[R, ...]:
    """Run one request in a launch for every configuration. Blocks, and calls back in the calling thread.

    Returns the answers of the workers that were not lost. Raises TrainflowError: a failure that would meet every
    worker, or that of the last one when all are lost.
    """
    progress, start = Progress(on_event), partial(launch, request, env=env, what=what, shared=True)
    if len(configs) == 1:
        report = partial(progress.event, 0)
        return (start(configs[0], on_line=on_line, on_event=report, should_cancel=should_cancel),)
    calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # that this thread has to make
    stop, ends = threading.Event(), list[Any]()

    def run(number: int, config: LaunchConfig) -> None:
        try:
            end: Any = start(
                config,
                on_line=lambda line: calls.put(partial(on_line, f"[worker {number}] {line}")),
                on_event=lambda event: calls.put(partial(progress.event, number, event)),
                should_cancel=stop.is_set,
            )
        except BaseException as error:
            end = error
        calls.put(partial(ends.append, end))

    threads = [threading.Thread(target=run, args=worker, daemon=True) for worker in enumerate(configs)]
    for thread in threads:
        thread.start()
    try:
        while len(ends) < len(configs):
            if should_cancel() or any(map(would_meet_all, ends)):
                stop.set()
            with contextlib.suppress(queue.Empty):
                calls.get(timeout=POLL_S)()
    finally:
        # Also when a callback raises, or on Ctrl-C: launches end their own processes.
        stop.set()
        for thread in threads:
            thread.join()
    return settle(ends, on_event)


def would_meet_all(end: Any) -> bool:
    """Whether a worker ended by a failure that would meet every other worker, too."""
    return isinstance(end, BaseException) and not isinstance(end, InfrastructureError)


def settle(ends: Sequence[Any], on_event: Callable[[dict[str, Any]], None]) -> tuple[Any, ...]:
    """Return the answers of how the workers ended; raise a failure that would meet all, or the last of lost ones."""
    answers = [end for end in ends if not isinstance(end, BaseException)]
    lost = [end for end in ends if isinstance(end, InfrastructureError)]
    failures = list(filter(would_meet_all, ends))
    # The others were stopped because of the first.
    if failures:
        raise next((end for end in failures if not isinstance(end, Interrupted)), failures[0])
    if not answers:
        raise lost[-1]
    for error in lost:
        message = f"A worker was lost; the others took over its part. {error.message}"
        on_event({"event": "warning", "message": message})
    return tuple(answers)


class Progress:
    """The progress of all workers as one: the furthest row, the speed of all together, and the time that is left."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._on_event = on_event
        self._rows: dict[int, int] = {}
        self._done = 0
        self._furthest: dict[str, Any] = {"step": 0, "row": 0}
        self._began: tuple[float, int, float] | None = None
        self._reported = 0.0

    def event(self, number: int, event: dict[str, Any]) -> None:
        """An event of a worker: its progress becomes that of all, any other is passed on."""
        if "rows" not in event:
            if event.get("event") != "start" or number == 0:
                self._on_event(event)
            return
        self._done += int(event["rows"]) - self._rows.get(number, 0)
        self._rows[number] = int(event["rows"])
        if event["step"] >= self._furthest["step"]:
            self._furthest = event
        now, rows = time.monotonic(), self._done
        share = self._furthest["step"] / max(1, self._furthest["max_steps"])
        if self._began is None:
            self._began = (now, rows, share)
        elif now - self._reported < REPORT_S:
            return
        self._reported = now
        seconds, done, gained = now - self._began[0], rows - self._began[1], share - self._began[2]
        message = self._furthest.get("message") or f"row {self._furthest['row']:,}"
        fields: dict[str, Any] = {}
        if seconds > 0 and done > 0 and gained > 0:
            fields = {"samples_per_second": done / seconds, "eta_s": (1 - share) * seconds / gained}
            message += f", {fields['samples_per_second']:,.0f} rows/s, {describe_seconds(fields['eta_s'])} left"
        self._on_event({**self._furthest, "rows": rows, "message": message, **fields})


class Owner(Heartbeat):
    """The owner's side of workers elsewhere; used in a ``with`` block, after which they end."""

    def __init__(self, store: Store) -> None:
        self._name = uuid.uuid4().hex[:16]
        self._folder = store.child(CLAIMS, self._name)
        super().__init__(BEAT_S, "the owner of a launch")

    def job(self, request: Request[Any], config: LaunchConfig, number: int) -> str:
        """Return what a worker needs, as a text for `launch_reported`. It holds no secret."""
        place = {"folder": self._name, "number": number, "installation": _installation()}
        return json.dumps({"request": request.to_json(), "config": asdict(config), **place})

    def stop(self) -> None:
        """Have the workers save and end."""
        if not self._stopped.is_set():
            self._stop_beating()
            self._folder.replace(_OWNER, _STOP)

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Return what the workers have reported since the last call, with their numbers."""
        found = []
        for name in sorted(filter(_REPORT.fullmatch, self._folder.children())):
            if (data := self._folder.read_if_exists(name, limit=_LIMIT)) is not None:
                report = parse_json(data)
                found += [(int(report["number"]), message) for message in report["messages"]]
                self._folder.delete(name)
        return found

    @override
    def _beat(self) -> None:
        self._folder.replace(_OWNER, uuid.uuid4().hex.encode())

    @override
    def _end(self) -> None:
        self._folder.delete_tree()


class Reporter(Heartbeat):
    """A worker's side; used in a ``with`` block."""

    def __init__(self, folder: Store, number: int) -> None:
        self._folder = folder
        self._number = number
        self._messages: list[dict[str, Any]] = [{"started": socket.gethostname()}]
        self._lock = threading.Lock()
        super().__init__(FLUSH_S, "a worker")
        self._sign: bytes | None = None
        self._seen = self._looked = time.monotonic()
        self._is_ended = False

    @override
    def __enter__(self) -> Self:
        self._sign = self._folder.read_if_exists(_OWNER, limit=_LIMIT)
        if self._sign is None:
            raise unshared(socket.gethostname(), self._folder.url.partition(f"/{CLAIMS}/")[0])
        # It reports at once: the owner names the machine of a worker that is lost, however soon.
        return super().__enter__()

    def line(self, text: str) -> None:
        """Report a line that the work has printed."""
        with self._lock:
            self._messages.append({"line": text})

    def event(self, event: dict[str, Any]) -> None:
        """Report an event."""
        with self._lock:
            self._messages.append({"event": event})

    def is_ended(self) -> bool:
        """Whether the owner asks the work to end, or gives no sign of life any more."""
        now = time.monotonic()
        if self._is_ended or now - self._looked < LOOK_S:
            return self._is_ended
        self._looked, sign = now, self._sign
        with contextlib.suppress(StorageError):
            sign = self._folder.read_if_exists(_OWNER, limit=_LIMIT)
        if sign != self._sign:
            self._sign, self._seen = sign, now
        # Timed by our own clock: those of two machines differ.
        self._is_ended = sign is None or sign == _STOP or now - self._seen > SILENT_S
        return self._is_ended

    @override
    def _beat(self) -> None:
        with self._lock:
            messages, self._messages = self._messages, []
        if not messages:
            return
        # In the order of their ends, also those of one that was started again.
        name = f"{time.time_ns():020d}-{self._number:04d}-{uuid.uuid4().hex[:8]}"
        try:
            self._folder.replace(name, json.dumps({"number": self._number, "messages": messages}).encode())
        except StorageError as error:
            _log.warning("What a worker reports could not be written: %s", error)

    _end = _beat


def launch_reported(text: str) -> str:
    """Carry out a request as the text of `Owner.job` says, on this machine; return as text how it ended."""
    asked = parse_json(text)
    try:
        for name, here in _installation().items():
            if (owners := asked["installation"][name]) != here:
                what = f"The machine {socket.gethostname()} of the cluster has {name} {here}, and the command {owners}."
                remedy = "Use the same Python environment on all machines."
                raise ConfigError(what, field=f"{asked['request']['verb']}.runner", remedy=remedy)
        request = read_request(asked["request"])
        folder = Store.open(request.output).child(CLAIMS, asked["folder"])
        with Reporter(folder, asked["number"]) as reporter:
            answer = launch(
                request,
                from_settings(asked["config"]),
                env={},
                on_line=reporter.line,
                on_event=reporter.event,
                should_cancel=reporter.is_ended,
                shared=True,
            )
    except Exception as error:
        return json.dumps({"failure": from_exception(error).to_record()})
    return json.dumps({"result": to_record(answer)})


def _installation() -> dict[str, str]:
    """The versions that have to be the same on all machines: with others, a key would name other bytes."""
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "trainflow": metadata.version("trainflow")}
