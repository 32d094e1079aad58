"""A launch that an engine places, in a thread, and what it reports."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.launched import wait_until
from trainer_lib.errors import TrainflowError
from trainer_lib.launch.base import launch
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.requests import Request


class Launch:
    """A launch in a thread of its own, which a test watches and stops."""

    def __init__(self, asked: Request[Any], env: dict[str, str] | None = None, **config: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.stop = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        usual = {"processes": 1, "grace_s": 5.0, "join_timeout_s": 60.0}
        self._config = LaunchConfig(**{**usual, **config})
        self._thread = threading.Thread(target=self._run, args=(asked, {"OMP_NUM_THREADS": "1", **(env or {})}))
        self._thread.start()

    def _run(self, asked: Request[Any], env: dict[str, str]) -> None:
        try:
            self.result = launch(
                asked,
                self._config,
                env=env,
                on_line=self.lines.append,
                on_event=self.events.append,
                should_cancel=self.stop.is_set,
            )
        except BaseException as error:
            self.error = error

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout: float = 120.0) -> Any:
        self._thread.join(timeout)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result

    def failure(self) -> TrainflowError:
        with pytest.raises(TrainflowError) as caught:
            self.join()
        return caught.value

    def reported(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def wait_for(self, kind: str, count: int = 1) -> None:
        wait_until(lambda: len(self.reported(kind)) >= count or not self._thread.is_alive(), 90)
