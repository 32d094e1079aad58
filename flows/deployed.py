"""The entrypoint of runs that Prefect starts in a process of their own: ``trainflow.flows.deployed.pipeline``.

Prefect servers keep this name with every deployment, so it stays the same wherever the code behind it moves.

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
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State

from trainer_lib import guard
from trainer_lib.errors import TrainflowError
from trainer_lib.secrets import mask
from trainflow.flows import pipeline as _plain
from trainflow.flows.cli.presentation import summary
from trainflow.flows.records.ending import expect_until_exit
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.server import embedded
from trainflow.flows.server.serving import OWNER, SERVER_FOLDER, require_another_try
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.stage.progress import masked_api_logs, quiet_failures


# The parameters are written out, not taken over by functools.wraps: Prefect resolves their types in this module.
@flow(name="pipeline", flow_run_name="{spec.name}", persist_result=False, result_serializer="json")
def pipeline(
    spec: PipelineSpec,
    only: str | None = None,
    start: str | None = None,
    force: list[str] | None = None,
    from_run: str | None = None,
    debug: bool = False,
) -> PipelineResult | State[Any]:
    """Prepare this process for a run that Prefect started, then run `trainflow.flows.pipeline.pipeline`.

    Args:
        spec: the whole pipeline; every field has a description with its unit.
        only: run this one stage; those before it must be committed.
        start: begin with this stage; those before it must be committed.
        force: stages whose committed result is discarded first.
        from_run: id of an earlier run that gives the stages before the first; by default its failed stage is the first.
        debug: keep the workers' run files, and show tracebacks.
    """
    prepare_run_process()
    require_another_try()
    try:
        # The plain function: a flow inside of a flow would be a run of its own.
        ended = _plain.pipeline.fn(spec, only=only, start=start, force=force, from_run=from_run, debug=debug)
    except TrainflowError as error:
        _log_summary(error.partial_result, spec)
        raise
    _log_summary(getattr(ended.data, "partial_result", None) if isinstance(ended, State) else ended, spec)
    return ended


def _log_summary(result: object, spec: PipelineSpec) -> None:
    """End the log of the run, which `serve`, the worker and Prefect's UI show, with the summary of a terminal."""
    if not isinstance(result, PipelineResult):
        return
    place = ["--storage", spec.storage]
    lines = summary(result, ["trainflow", "ui", *place], ["trainflow", "sync", *place])
    get_run_logger().info("%s", mask("\n".join(line.plain for line in lines).rstrip()))


def prepare_run_process() -> None:
    """Tie this process to the one that serves it; log without secrets and without tracebacks of typed failures."""
    if OWNER in os.environ:
        os.setsid()  # the terminal's Ctrl-C goes to the owner alone: it signals us once, and waits for us
        guard.prctl(guard.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ[OWNER]):  # it ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGTERM)
    if SERVER_FOLDER in os.environ:
        # A client of the embedded server until this process ends: never closed, the lock lives with the process.
        descriptor = os.open(Path(os.environ[SERVER_FOLDER]) / embedded.CLIENTS_LOCK, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    expect_until_exit()
    # Prefect logs a failure after the flow has returned, so the filter is not removed with the flow.
    quiet = contextlib.ExitStack()
    quiet.enter_context(quiet_failures())
    quiet.enter_context(masked_api_logs())
    atexit.register(quiet.close)
