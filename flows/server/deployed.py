"""The entrypoint of runs that Prefect starts in a process of their own: the pipeline, leaving nothing behind.

A served run ends with the process that serves it. Prefect's runner, killed, would leave it behind with a server that is
gone; so it asks the kernel for a SIGTERM at its parent's end (Linux), and keeps the embedded server alive until it has
reported how it ended.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

from flows.pipeline import pipeline
from flows.server import embedded as _server
from flows.server.serving import OWNER, SERVER_FOLDER
from tasks.stage.progress import quiet_failures
from trainer_lib import guard

__all__ = ["pipeline"]


def _follow(owner: int) -> None:
    os.setsid()  # the terminal's Ctrl-C is for the one that serves us: it tells us once, and waits
    guard.prctl(guard.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != owner:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGTERM)


def _keep_server(folder: Path) -> None:
    descriptor = os.open(folder / _server.CLIENTS_LOCK, os.O_RDWR)  # open for life
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


if OWNER in os.environ:
    _follow(int(os.environ[OWNER]))
if SERVER_FOLDER in os.environ:
    _keep_server(Path(os.environ[SERVER_FOLDER]))
_quiet = quiet_failures()
_quiet.__enter__()  # for the life of the process: Prefect logs a failure after the flow has returned
