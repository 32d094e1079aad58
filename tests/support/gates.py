"""Stop the writing of a checkpoint at a known point, so that a test decides what happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from trainer_lib.checkpoint import writer
from trainer_lib.checkpoint.snapshot import Snapshot
from trainer_lib.storage import FileEntry, Store

LIMIT_S = 30.0


class Gate:
    """Between claiming a checkpoint's folder and its first file: `before(step)` is called in the thread that writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
        self.started = threading.Event()
        self.threads: list[str] = []
        self._before = before
        self._write = writer._write_shared
        monkeypatch.setattr(writer, "_write_shared", self._held)

    def _held(self, store: Store, snapshot: Snapshot) -> list[FileEntry]:
        self.threads.append(threading.current_thread().name)
        self.started.set()
        self._before(snapshot.step)
        return self._write(store, snapshot)


def until(event: threading.Event) -> Callable[[Any], None]:
    """Waits for `event`; fails rather than hang."""

    def wait(_: Any) -> None:
        assert event.wait(LIMIT_S), "nobody opened the gate"

    return wait
