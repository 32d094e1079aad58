"""The entrypoint of runs that Prefect starts in a process of their own: ``trainflow.flows.deployed.pipeline``.

Prefect servers keep this name with every deployment, so it stays the same wherever the code behind it moves.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State

from trainer_lib.errors import TrainflowError
from trainer_lib.secrets import mask
from trainflow.flows import pipeline as _plain
from trainflow.flows.cli.presentation import summary
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.server.automations import require_another_try
from trainflow.flows.server.run_process import prepare_run_process
from trainflow.flows.spec.spec import PipelineSpec


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
