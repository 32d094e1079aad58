"""The thread that carries a spool's sessions to a server, whatever the server is."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Protocol

from trainer_lib.errors import first_line
from trainer_lib.trackers.spool import Session

POLL_S = 1.0  # between looks at the spool
MAX_BACKOFF_S = 60.0
CLOSE_S = 30.0  # `close` waits so long for a server that answers, and
CLOSE_FAILING_S = 5.0  # so long for one that has stopped answering

_log = logging.getLogger(__name__)


class GoneError(Exception):
    """The server will never take these points: it does not know the run."""


class Delivery(Protocol):
    """How the points of one session reach their server. Any method may raise anything; `GoneError` ends it."""

    server: str

    def ship(self) -> None:
        """Send what is there and not yet sent."""

    def finish(self) -> None:
        """Everything is sent and the attempt is over."""

    def release(self) -> None:
        """Let go of whatever is held."""


class Shipper(threading.Thread):
    """Ships one session in the background. Never raises, never keeps the process alive."""

    def __init__(self, session: Session, delivery: Delivery) -> None:
        super().__init__(name=f"{delivery.server} shipper", daemon=True)
        self._session = session
        self._delivery = delivery
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._failing = False
        self._done = False

    def run(self) -> None:
        """Ship until closed; on failure try again, each time later, and say so once."""
        delay = POLL_S
        try:
            while True:
                closing = self._closing.is_set()  # asked before shipping: what was logged before close is shipped
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
                except Exception as error:  # whatever a tracking client raises must not end training
                    self._warn(error)
                    delay = min(MAX_BACKOFF_S, 2 * delay)
                    if closing:
                        return
                self._wake.wait(delay)
        finally:
            self._session.release()
            self._delivery.release()

    def close(self, status: str) -> None:
        """Note how the attempt ended, and wait a bounded time for the rest to be shipped."""
        self._session.state.closed, self._session.state.end_ms = status, time.time_ns() // 1_000_000
        self._closing.set()
        self._wake.set()
        deadline = time.monotonic() + CLOSE_S
        while self.is_alive() and time.monotonic() < deadline:
            failing = self._failing
            self.join(CLOSE_FAILING_S if failing else 0.05)
            if failing:
                break
        if not self._done:
            with contextlib.suppress(OSError):
                self._session.save_state()
            _log.warning(
                "%s did not take all metrics; the rest is kept in %s and sent by the next run with this spool.",
                self._delivery.server,
                self._session.path,
            )

    def _warn(self, error: Exception) -> None:
        if not self._failing:
            where = (self._delivery.server, self._session.path)
            _log.warning("%s is out of reach; metrics wait in %s: %s", *where, first_line(error))
        self._failing = True

    def _give_up(self, error: Exception) -> None:
        self._done = True
        self._session.set_aside("orphan")
        where = (self._delivery.server, error, self._session.path)
        _log.warning("Metrics no longer go to %s: %s They are kept in %s.", *where)
