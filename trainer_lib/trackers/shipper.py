"""The thread that sends a session of the spool to a tracking server of any kind."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Protocol

from typing_extensions import override

from trainer_lib.errors import first_line
from trainer_lib.trackers.spool import Session

POLL_S = 1.0  # between two looks at the spool
MAX_BACKOFF_S = 60.0  # between two tries while the server fails
CLOSE_S = 30.0  # how long `close` waits for a server that answers
CLOSE_FAILING_S = 5.0  # how long `close` waits for a server that has stopped answering

_log = logging.getLogger(__name__)


class GoneError(Exception):
    """The server does not know the run, so it will never accept these points."""


class Delivery(Protocol):
    """How the points of one session reach their server.

    Any method may raise any exception, and is called again later; only `GoneError` ends the delivery.
    """

    server: str

    def ship(self) -> None:
        """Send every point that is in the session and not on the server."""

    def finish(self) -> None:
        """End the run on the server, after everything is sent and the attempt is over."""

    def release(self) -> None:
        """Release the locks that it holds."""


class Shipper(threading.Thread):
    """Sends one session in the background. It never raises and never keeps the process alive."""

    def __init__(self, session: Session, delivery: Delivery) -> None:
        super().__init__(name=f"{delivery.server} shipper", daemon=True)
        self._session = session
        self._delivery = delivery
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._failing = False
        self._done = False

    @override
    def run(self) -> None:
        delay = POLL_S
        try:
            while True:
                # Read before sending: only then does the last round send everything that was logged before `close`.
                closing = self._closing.is_set()
                try:
                    self._delivery.ship()
                    self._failing, delay = False, POLL_S
                    if closing:
                        self._delivery.finish()
                        self._done = True
                        self._session.remove()
                        return
                except GoneError as error:
                    self._give_up(error)
                    return
                except Exception as error:  # a tracking client must not end training, whatever it raises
                    self._warn(error)
                    delay = min(MAX_BACKOFF_S, 2 * delay)
                    if closing:
                        return
                self._wake.wait(delay)
        finally:
            self._session.release()
            self._delivery.release()

    def close(self, status: str) -> None:
        """Record how the attempt ended, and wait a bounded time until the rest is sent."""
        self._session.state.closed, self._session.state.end_ms = status, time.time_ns() // 1_000_000
        self._closing.set()
        self._wake.set()
        deadline = time.monotonic() + CLOSE_S
        while self.is_alive() and time.monotonic() < deadline:
            failing = self._failing
            self.join(CLOSE_FAILING_S if failing else 0.05)
            if failing:  # the thread may sit in a backoff of up to a minute: do not hold up the end of training
                break
        if not self._done:
            with contextlib.suppress(OSError):
                self._session.save_state()
            _log.warning(
                "%s did not accept all metrics; the rest is kept in %s, and the next run with this spool sends it.",
                self._delivery.server,
                self._session.path,
            )

    def _warn(self, error: Exception) -> None:
        if not self._failing:
            where = (self._delivery.server, self._session.path)
            _log.warning("%s cannot be reached; metrics wait in %s: %s", *where, first_line(error))
        self._failing = True

    def _give_up(self, error: Exception) -> None:
        self._done = True
        self._session.set_aside("orphan")
        where = (self._delivery.server, error, self._session.path)
        _log.warning("Metrics no longer go to %s: %s They are kept in %s.", *where)
