"""A launch whose owner is on another machine: reports, and the owner's sign of life, go through the job's folder.

    claims/<id>/owner                 the owner's sign of life, renewed by a thread; "stop" once the work shall end
    claims/<id>/<time>-<worker>-<id>  lines and events of a worker, about one file a second; the owner removes them

So it takes nothing of what runs the workers but to call a function with a text: no channel, and no way to stop a call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import re
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from types import TracebackType
from typing import Any, Self

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import to_record
from trainer_lib.errors import ConfigError, StorageError, from_exception
from trainer_lib.launch.base import launch
from trainer_lib.launch.settings.config import LaunchConfig, from_settings, unshared
from trainer_lib.locks.shared_parts import CLAIMS, Heartbeat
from trainer_lib.protocol.requests import Request, read_request
from trainer_lib.storage import Store

BEAT_S = 5.0
SILENT_S = 60.0  # without a new sign of life of the owner: its work ends
LOOK_S = 2.0
FLUSH_S = 1.0
_OWNER = "owner"
_STOP = b"stop"
_REPORT = re.compile(r"\d{20}-\d{4}-[0-9a-f]{8}")
_LIMIT = 1 << 26
_log = logging.getLogger(__name__)


class Owner:
    """The owner's side of workers elsewhere; used in a ``with`` block, after which they end."""

    def __init__(self, store: Store) -> None:
        self._name = uuid.uuid4().hex[:16]
        self._folder = store.child(CLAIMS, self._name)
        self._heartbeat = Heartbeat(self._beat, BEAT_S, "the owner of a launch")
        self._is_stopped = False

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.stop()
        with contextlib.suppress(StorageError):  # a store that is out of reach: the sign of life grows old
            self._folder.delete_tree()

    def job(self, request: Request[Any], config: LaunchConfig, number: int) -> str:
        """Return what a worker needs, as a text for `launch_reported`. It holds no secret."""
        place = {"folder": self._name, "number": number, "installation": _installation()}
        return json.dumps({"request": request.to_json(), "config": asdict(config), **place})

    def stop(self) -> None:
        """Have the workers save and end."""
        if not self._is_stopped:
            self._is_stopped = True
            self._heartbeat.stop()
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

    def _beat(self) -> None:
        self._folder.replace(_OWNER, uuid.uuid4().hex.encode())


class Reporter:
    """A worker's side; used in a ``with`` block."""

    def __init__(self, folder: Store, number: int) -> None:
        self._folder = folder
        self._number = number
        self._messages: list[dict[str, Any]] = [{"started": socket.gethostname()}]
        self._lock = threading.Lock()
        self._sending = Heartbeat(self._send, FLUSH_S, "a worker")
        self._sign: bytes | None = None
        self._seen = self._looked = time.monotonic()
        self._is_ended = False

    def __enter__(self) -> Self:
        self._sign = self._folder.read_if_exists(_OWNER, limit=_LIMIT)
        if self._sign is None:
            raise unshared(socket.gethostname(), self._folder.url.partition(f"/{CLAIMS}/")[0])
        self._sending.start()  # it sends at once: the owner names the machine of a worker that is lost, however soon
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sending.stop()
        self._send()

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

    def _send(self) -> None:
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


def launch_reported(text: str) -> str:
    """Carry out a request as the text of `Owner.job` says, on this machine; return as text how it ended."""
    asked = parse_json(text)
    try:
        _require_installation(asked["installation"], field=f"{asked['request']['verb']}.runner")
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


def _require_installation(owners: Mapping[str, str], *, field: str) -> None:
    for name, here in _installation().items():
        if owners[name] != here:
            raise ConfigError(
                f"The machine {socket.gethostname()} of the cluster has {name} {here}, and the command {owners[name]}.",
                field=field,
                remedy="Use the same Python environment on all machines.",
            )
