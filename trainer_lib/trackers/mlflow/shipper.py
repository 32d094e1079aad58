"""The thread that delivers a spool to MLflow's server."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from typing_extensions import override

from trainer_lib.errors import first_line
from trainer_lib.secrets import mask
from trainer_lib.storage.outages import describe_outage

if TYPE_CHECKING:
    from trainer_lib.trackers.mlflow.delivery import Delivery

POLL_S = 1.0  # between two looks at the spool
MAX_BACKOFF_S = 10.0  # between two tries while the server fails: a try costs one request
SAY_S = 2.0  # a longer wait is announced
LOAD_S = 30.0  # how long `close` waits for the server's client to be imported
UPLOAD_BYTES_S = 10e6  # an upload slower than this counts as one that hangs
_CLOSING_POLL_S = 0.05  # between two looks while another process delivers the same spool
_OBSTACLE_S = 1.0  # how long `close` waits for what only another process can bring, such as the run of a worker
_REASON_CHARS = 160
_log = logging.getLogger(__name__)


class Clock:
    """Seconds that the current request has gone without an answer; read by another thread.

    Attributes:
        granted_s: seconds granted to the bytes of all uploads so far.
    """

    def __init__(self) -> None:
        self.granted_s = 0.0
        self._due: float | None = None

    @contextlib.contextmanager
    def request(self, size: int = 0) -> Iterator[None]:
        """Measure the block, a request that sends `size` bytes."""
        self.granted_s += size / UPLOAD_BYTES_S
        self._due = time.monotonic() + size / UPLOAD_BYTES_S
        try:
            yield
        finally:
            self._due = None

    def is_overdue(self, patience_s: float) -> bool:
        """Whether the answer should have come `patience_s` seconds ago."""
        due = self._due
        return due is not None and time.monotonic() > due + patience_s


class Shipper(threading.Thread):
    """Delivers a spool in the background. It never raises and never keeps the process alive."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(name="MLflow shipper", daemon=True)
        self._delivery = delivery
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._stopping = False
        self.failure: str | None = None  # why the newest try failed
        self._done = False

    def wake(self) -> None:
        """Look at the spool now, and not after the pause between two looks."""
        self._wake.set()

    @override
    def run(self) -> None:
        delay, stuck_s = POLL_S, 0.0
        while not self._stopping:
            # Read before delivering: only a pass that begins after `close` delivers everything.
            closing = self._closing.is_set()
            try:
                is_whole = self._delivery.deliver()
                self.failure, delay = None, POLL_S
                if closing and is_whole:
                    self._done = True
                    return
            except Exception as error:  # a tracking client must not end training, whatever it raises
                reason = shorten(error)
                if self.failure is None:
                    kept = self._delivery.root
                    _log.warning("MLflow cannot be reached (%s); what is logged waits in %s.", reason, kept)
                self.failure = reason
                delay = min(MAX_BACKOFF_S, 2 * delay)
                if closing:
                    return
            if closing:
                if stuck_s > _OBSTACLE_S:
                    return
                stuck_s += _CLOSING_POLL_S if self._delivery.obstacle is not None else 0.0
                time.sleep(_CLOSING_POLL_S)
            else:
                self._wake.wait(delay)
                self._wake.clear()  # a close that comes in between is seen at once, by its flag

    def close(self, patience_s: float, request_s: float, on_wait: Callable[[], None] | None = None) -> bool:
        """Let the thread deliver the rest, and end; return whether everything has arrived.

        Args:
            patience_s: how long to wait for a server that answers, in seconds, besides the time that uploads take.
            request_s: how long to wait for one answer, in seconds. A failure ends the waiting at once.
            on_wait: called once when it takes longer than two seconds.
        """
        self._closing.set()
        self._wake.set()
        loaded_by = time.monotonic() + (LOAD_S if patience_s else 0.0)
        while self.is_alive() and not self._delivery.is_loaded.wait(0.02) and time.monotonic() < loaded_by:
            continue
        clock = self._delivery.clock
        began = time.monotonic()
        deadline = began + patience_s - clock.granted_s
        while self.is_alive() and time.monotonic() < deadline + clock.granted_s:
            if clock.is_overdue(request_s):
                break
            self.join(0.02)
            if on_wait is not None and time.monotonic() > began + SAY_S:
                on_wait()
                on_wait = None
        self._stopping = True
        self._wake.set()
        return self._done


def shorten(error: Exception) -> str:
    """Return why a request failed, in a few words: what HTTP clients say of a connection fills several lines."""
    if (outage := describe_outage(error)) is not None:
        return outage
    text = mask(first_line(error))
    return text if len(text) <= _REASON_CHARS else f"{text[:_REASON_CHARS]}..."
