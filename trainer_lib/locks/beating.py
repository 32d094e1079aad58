"""A thread that renews a sign of life in a store while this process works."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from trainer_lib.errors import TrainflowError

_log = logging.getLogger(__name__)


class Heartbeat:
    """Renews a sign of life from `start` to `stop`.

    Args:
        beat: renews it; a failure is logged, and the next beat tries again.
        period_s: seconds between two beats.
        whose: whose sign of life it is, for the warning.
    """

    def __init__(self, beat: Callable[[], None], period_s: float, whose: str) -> None:
        self._beat = beat
        self._period_s = period_s
        self._whose = whose
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="trainflow-heartbeat", daemon=True)

    def start(self) -> None:
        """Beat once, here, and go on in a thread.

        Raises:
            TrainflowError: what the first beat raised.
        """
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Return once no beat is under way; harmless when repeated."""
        self._stopped.set()
        self._thread.join()

    def _keep_beating(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                self._beat()
            except TrainflowError as error:
                _log.warning("The sign of life of %s could not be renewed: %s", self._whose, error)
