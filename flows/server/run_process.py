"""The process of one run that Prefect's runner or worker started: what it does before the pipeline begins.

A served run ends with the process that serves it. Prefect's runner, when it is killed, leaves its runs behind with a
server that is gone; so a run asks the kernel for a SIGTERM at its parent's end (Linux only), and keeps the embedded
server alive until it has reported how it ended.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
from pathlib import Path

from trainer_lib import guard
from trainflow.flows.records.ending import expect_until_exit
from trainflow.flows.server import embedded
from trainflow.tasks.stage.progress import masked_api_logs, quiet_failures

# Set by `trainflow.flows.server.serving` for the processes of its runs; absent in those of a work pool's worker.
OWNER = "TRAINFLOW_SERVED_BY"
SERVER_FOLDER = "TRAINFLOW_SERVER_FOLDER"


def prepare_run_process() -> None:
    """Tie this process to the one that serves it; log without secrets and without tracebacks of typed failures."""
    if OWNER in os.environ:
        _end_with(int(os.environ[OWNER]))
    if SERVER_FOLDER in os.environ:
        _keep_server(Path(os.environ[SERVER_FOLDER]))
    expect_until_exit()
    # Prefect logs a failure after the flow has returned, so the filter is not removed with the flow.
    quiet = contextlib.ExitStack()
    quiet.enter_context(quiet_failures())
    quiet.enter_context(masked_api_logs())
    atexit.register(quiet.close)


def _end_with(owner: int) -> None:
    """Receive SIGTERM when the process `owner`, our parent, ends."""
    os.setsid()  # the terminal's Ctrl-C goes to the owner alone: it signals us once, and waits for us
    guard.prctl(guard.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != owner:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)


def _keep_server(folder: Path) -> None:
    """Count as a client of the embedded server in `folder` until this process ends."""
    descriptor = os.open(folder / embedded.CLIENTS_LOCK, os.O_RDWR)  # never closed: the lock lives with the process
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
