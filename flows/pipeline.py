"""The pipeline: prepare -> train -> evaluate -> predict -> publish.

    data ──> model ──> metrics
      │        ├─────> predictions
      └────────┴─────> hub

An arrow is a manifest: URLs, digests, metrics and typed facts. Which stages there are is written in
`trainflow.flows.stages`. A stage whose content key is committed and intact is not run again; whatever died, the same
call continues. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect import Flow
from prefect.client.schemas.objects import State
from prefect.states import Cancelled
from pydantic_core import to_jsonable_python
from typing_extensions import override

from trainer_lib.errors import Interrupted, StorageError, TrainflowError, first_line
from trainer_lib.storage import Store
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.ending import StopRequest, expect_ending, expected_ending
from trainflow.flows.records.past_runs import read_run
from trainflow.flows.records.prefect_runs import created_by_this_process, own_flow_run
from trainflow.flows.records.results import RUN_ID_CHARS, PipelineResult, tell_of_run
from trainflow.flows.records.run_logs import keep_logs
from trainflow.flows.reports.run_record import RunRecord, collect_history, run_artifacts
from trainflow.flows.run_stages import run_stages
from trainflow.flows.runs.run_status import beating, plan_of_try, read_status, sweep
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.prefect.prefect_client import wait_for_drawings
from trainflow.tasks.stage.progress import masked_api_logs, quiet_failures

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger(__name__)


class PipelineFlow(Flow[P, R]):
    """A Prefect flow whose parameters pydantic turns into JSON: Prefect imports FastAPI for it, a third of a second."""

    @override
    def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            return {name: to_jsonable_python(value) for name, value in parameters.items()}
        except ValueError:  # Prefect writes the name of its class in place of such a value
            return super().serialize_parameters(parameters)


def _as_flow(function: Callable[P, R]) -> PipelineFlow[P, R]:
    return PipelineFlow(
        function,
        name="pipeline",
        flow_run_name="{spec.name}",
        persist_result=False,
        # Prefect keeps the exception that ends a flow although no result is persisted, and by default as a pickle.
        result_serializer="json",
        validate_parameters=True,
    )


@_as_flow
def pipeline(
    spec: PipelineSpec,
    only: str | None = None,
    start: str | None = None,
    force: list[str] | None = None,
    from_run: str | None = None,
    debug: bool = False,
) -> PipelineResult | State[Any]:
    """Prepare data, train, evaluate, predict and publish, without the stages whose results are committed already.

    Args:
        spec: the whole pipeline; every field has a description with its unit.
        only: run this one stage; those before it must be committed.
        start: begin with this stage; those before it must be committed.
        force: stages whose committed result is discarded first.
        from_run: id of an earlier run that gives the stages before the first; by default its failed stage is the first.
        debug: keep the workers' run files, and show tracebacks.

    Returns:
        The `PipelineResult`; a cancelled run ends in the state Cancelled.

    Raises:
        TrainflowError: the failure that ended the run; its `partial_result` is the `PipelineResult` so far.
    """
    # Made before the plan: a spec that is refused here has a result, too.
    result = PipelineResult(spec.name, "", spec.storage)
    ending = expected_ending()
    try:
        with own_flow_run() as flow_run, _told(spec, result):
            choose = partial(Plan.of, spec, only=only, start=start, from_run=from_run, debug=debug)
            plan = plan_of_try(choose, force or (), flow_run.began)
            # Before the first stage: hours of training must not end at a read-only folder.
            Store.open(plan.spec.storage).ensure_writable(field="storage")
            plan.require_committed()
            with _recorded(plan, result) as record:
                flow_run.rename(result.run_name)
                ending.run_unless_pruned(lambda stop: run_stages(plan, record, stop))
                ending.close_undisturbed()
        ending.result = result
    except TrainflowError as error:
        ending.result, result.error, error.partial_result = result, error, result
        if isinstance(error, Interrupted):
            # Returned, not raised: Prefect would record a raised exception as Failed.
            return Cancelled(message=error.message, data=error)
        raise
    except KeyboardInterrupt as interrupt:
        if not ending.take_cancel(interrupt):
            raise
        return Cancelled(message="Interrupted (Ctrl-C).")
    return result


@contextlib.contextmanager
def _told(spec: PipelineSpec, result: PipelineResult) -> Iterator[None]:
    """After the block, send how it ended to where the spec says."""
    try:
        yield
    except (TrainflowError, KeyboardInterrupt) as error:
        result.error = error if isinstance(error, TrainflowError) else Interrupted("Stopped by a signal.")
        tell_of_run(spec.notify, result)
        raise
    tell_of_run(spec.notify, result)


@contextlib.contextmanager
def _recorded(plan: Plan, result: PipelineResult) -> Iterator[RunRecord]:
    """Inside the block, keep the run's record, sign of life, logs and report; afterwards, show Prefect how it ended."""
    record = RunRecord(plan, result)
    # Not before Prefect knows the end: a sign that a killed process leaves has its run marked as ended there.
    alive = beating(plan, at_end=expected_ending().do_afterwards)
    try:
        with alive, run_artifacts(record), record, keep_logs(record.folder), collect_history(record):
            yield record
    finally:
        wait_for_drawings()


def run_pipeline(
    spec: PipelineSpec,
    *,
    only: str | None = None,
    start: str | None = None,
    force: Sequence[str] = (),
    from_run: str | None = None,
    debug: bool = False,
    stop: StopRequest | None = None,
    delivers_later: bool = False,
    on_closing: Callable[[], None] = lambda: None,
) -> PipelineResult:
    """Run the flow in this process and return its result. Prefect needs an API (`flows.server.api.prefect_api`).

    A typed failure is not raised but held in `PipelineResult.error`, with the stages that did complete;
    `raise_for_error` raises it. `stop` ends the run early from another thread, as pruned; with `delivers_later` it does
    not wait for MLflow at its end; `on_closing` is called once a signal comes too late to stop anything. Ctrl-C and
    SIGTERM pass through, after the workers have been stopped and the MLflow run has been ended.
    """
    expected = expect_ending(stop, delivers_later=delivers_later, on_closing=on_closing)
    with expected as ending, masked_api_logs(), quiet_failures(not debug), created_by_this_process():
        try:
            state = pipeline(
                spec, only=only, start=start, force=list(force), from_run=from_run, debug=debug, return_state=True
            )
        except httpx.HTTPError as error:
            if ending.interrupt is not None:
                raise ending.interrupt from error
            if ending.result is None:
                raise
            _log.warning("Prefect's server did not learn how the run ended: %s", first_line(error))
            return ending.result
        except BaseException:
            ending.finish()
            raise
        ending.finish()
    if ending.interrupt is not None:
        raise ending.interrupt
    if ending.result is not None and ending.result.ok:
        _record_deaths(ending.result)
    # Three things come back: the result, the error that a Cancelled or Failed state holds, or a bug's exception.
    # Inside of a running event loop, as in a notebook, Prefect would give a coroutine instead.
    read: Any = state.result
    ended: Any = read(raise_on_failure=False, _sync=True)
    if isinstance(ended, TrainflowError) and isinstance(ended.partial_result, PipelineResult):
        return ended.partial_result
    if isinstance(ended, BaseException):
        raise ended
    result: PipelineResult = ended
    return result


def _record_deaths(result: PipelineResult) -> None:
    """Record in Prefect and the storage the ends of processes that died at this run before it was complete."""
    try:
        run = read_run(result.storage, result.pipeline_key[:RUN_ID_CHARS])
        status = None if run is None else read_status(result.storage, run)
        for warning in sweep(result.storage, [status]) if status is not None and status.unswept else ():
            _log.warning("%s", warning)
    except (StorageError, httpx.HTTPError) as error:  # `trainflow status` does it, too
        _log.debug("What dead processes left was not removed: %s", error)
