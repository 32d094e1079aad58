"""Notice that this machine is about to be taken away: a file that appears, a command that exits with 0, a URL.

Clouds give such notice 30 s to two minutes ahead, through their metadata servers; batch systems run a command or make a
file. A thread asks every few seconds, so the work itself never waits for an answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

_ANSWER_BYTES = 1 << 16
_DELIVER_S = 0.2  # between two tries to deliver a notice
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preemption:
    """Where a notice is looked for: a file that exists, a command that exits with 0, or a URL that answers 200.

    Attributes:
        headers: sent with the request.
        contains: text that the answer must contain; None: any answer counts.
        every_s: seconds between two looks.
        timeout_s: seconds that the command or the URL may take.
    """

    file: str | None = None
    command: tuple[str, ...] = ()
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    contains: str | None = None
    every_s: float = 5.0
    timeout_s: float = 2.0


def find_notice(asked: Preemption) -> str | None:
    """Look once; what gave the notice, as a clause, or None. Raises OSError, HTTPException and ValueError."""
    if asked.file is not None and Path(asked.file).exists():
        return f"the file {asked.file} is there"
    if asked.command and _succeeds(asked.command, asked.timeout_s):
        return f"{asked.command[0]} exited with 0"
    if asked.url is not None and _answers(asked, asked.url):
        return f"{asked.url} answered"
    return None


def _succeeds(command: tuple[str, ...], timeout_s: float) -> bool:
    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    except OSError:
        return False
    try:
        return process.wait(timeout_s) == 0
    except subprocess.TimeoutExpired:
        # Its whole group: a shell's child would stay.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def _answers(asked: Preemption, url: str) -> bool:
    import urllib.request  # every command imports this module with the requests

    class Refuse(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *given: Any, **more: Any) -> None:
            """Answer None: a redirect is not an answer."""

    # Metadata servers are on the machine itself: never through a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Refuse)
    request = urllib.request.Request(url, headers={"Connection": "close", **asked.headers})  # noqa: S310  # the user's
    try:
        with opener.open(request, timeout=asked.timeout_s) as answer:
            text = answer.read(_ANSWER_BYTES).decode(errors="replace")
            return answer.status == 200 and (asked.contains is None or asked.contains in text)
    except OSError:
        return False


class NoticeWatch(threading.Thread):
    """Looks for a notice until one is given, and calls `deliver`, again until it returns True.

    `notice`: what gave it; None so far.
    """

    def __init__(self, asked: Preemption, deliver: Callable[[], bool]) -> None:
        super().__init__(name="trainflow-preemption", daemon=True)
        self._asked = asked
        self._deliver = deliver
        self._done = threading.Event()
        self.notice: str | None = None

    @override
    def run(self) -> None:
        warned = False
        while True:
            try:
                self.notice = find_notice(self._asked)
            except Exception as error:
                # The next look may succeed; without the watch, the machine would go without a save.
                if not warned:
                    where = self._asked.file or self._asked.url or self._asked.command[0]
                    _log.warning("train.preemption: a look at %s failed, and is repeated: %r", where, error)
                    warned = True
            if self.notice is not None:
                break
            if self._done.wait(self._asked.every_s):
                return
        while not self._deliver() and not self._done.wait(_DELIVER_S):
            pass

    def close(self) -> None:
        """Stop looking."""
        self._done.set()
