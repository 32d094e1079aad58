"""Pushes that run one after the other beside training, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait


class PushQueue:
    """A queue of pushes. Its threads are daemons: a push under way does not keep the process alive."""

    def __init__(self) -> None:
        self._last: Future[str] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a push is under way or waiting."""
        return self._last is not None and not self._last.done()

    @property
    def has_pushed(self) -> bool:
        """Whether there was a push."""
        return self._last is not None

    def is_done(self) -> bool:
        """Whether no push is under way; `huggingface_hub` and transformers use this name."""
        return not self.is_busy

    def wait_until_done(self) -> None:
        """Wait for all pushes."""
        self.wait(unless=lambda: False)

    def submit(self, push: Callable[[], str]) -> Future[str]:
        """Run `push` after the ones before it. The future holds what it returns or raises."""
        # A chain of futures in place of a pool, whose threads Python would wait for at exit.
        before, future = self._last, Future[str]()
        self._last = future

        def run() -> None:
            if before is not None:
                wait([before])
            try:
                future.set_result(push())
            except BaseException as error:  # raised in the thread that asks for the result
                future.set_exception(error)

        # A push that was queued cannot be cancelled: its checkpoint is protected until it has run.
        future.set_running_or_notify_cancel()
        threading.Thread(target=run, name="hub push", daemon=True).start()
        return future

    def wait(self, *, unless: Callable[[], bool], poll_s: float = 0.2) -> bool:
        """Wait for all pushes, or until `unless()` is true; return whether all pushes ended."""
        while self.is_busy and self._last is not None:
            if unless():
                return False
            wait([self._last], timeout=poll_s)
        return True
