"""A command on a terminal of its own: a pseudo-terminal, as a user's window is one."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Sequence


class Terminal:
    """A command that writes to a terminal of 100 columns; `close` it."""

    def __init__(self, command: Sequence[str], **env: str) -> None:
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **env}
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
        )
        os.close(theirs)
        self._written = b""

    @property
    def output(self) -> str:
        """Return everything that was written so far."""
        return self._written.decode(errors="replace")

    @property
    def text(self) -> str:
        """Return what was written, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output)

    def wait_for(self, pattern: str, timeout: float = 90) -> None:
        """Wait until what was written matches."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.text):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} was not written:\n{self.text}"
            assert self._read(left), f"The command ended without {pattern!r}:\n{self.text}"

    def wait(self, timeout: float = 120) -> int:
        """Wait for the end, and return the exit code."""
        deadline = time.monotonic() + timeout
        while self._read(deadline - time.monotonic()):
            assert time.monotonic() < deadline, self.text
        return self._process.wait(30)

    def close(self) -> None:
        """End the command if it is still running."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)

    def _read(self, timeout: float) -> bool:
        """Read what comes next; return False once the other side is closed."""
        if not select.select([self._ours], [], [], max(0.0, timeout))[0]:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            return False
        self._written += data
        return bool(data)


def on_a_terminal(command: Sequence[str], **env: str) -> tuple[str, int]:
    """Run a command on a terminal to its end: everything that it wrote there, and its exit code."""
    terminal = Terminal(command, **env)
    try:
        code = terminal.wait()
        return terminal.output, code
    finally:
        terminal.close()
