"""Pushing while training goes on: jobs run one after the other, each in a thread of its own that ends with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait


class Background:
    """A queue of jobs. No thread waits for work, and none keeps the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: Future[str] | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is under way or waiting."""
        return self._last is not None and not self._last.done()

    def submit(self, job: Callable[[], str]) -> Future[str]:
        """Run `job` after those before it; what it returns or raises is the future's."""
        before, future = self._last, Future[str]()
        self._last = future

        def run() -> None:
            if before is not None:
                wait([before])
            try:
                future.set_result(job())
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future

    def wait(self, *, unless: Callable[[], bool], poll_s: float = 0.2) -> bool:
        """Wait for all jobs, or until `unless()` is true; whether all are done."""
        while self.busy and self._last is not None:
            if unless():
                return False
            wait([self._last], timeout=poll_s)
        return True
