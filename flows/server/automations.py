"""Crashed runs run again: automations of Prefect's server for one deployment, and the end of the tries.

A run is Crashed when its process ended without a word: the worker sees the exit code, `trainflow status` the dead
process. An automation puts such a run back into the queue. A worker reports a death twice, the second time after it
has looked for hooks of the flow, and that report would take the run out of the queue again. So the run first gets the
state CrashedAtWork, which no report replaces, and a second automation puts it into the queue some time later. A further
one covers a worker or machine that is gone, too: a run whose heartbeat falls silent is set to Crashed. The crashes of a
run are counted when it starts again; the last one that is allowed ends it as Failed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer_lib.errors import InfrastructureError

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.events.schemas.automations import AutomationCore

CRASHES = "TRAINFLOW_CRASH_RETRIES"
"""Variable of a run's process: how many of its crashes are followed by another try."""
# Set by `trainflow.flows.server.serving` for the processes of its runs; absent in those of a work pool's worker.
OWNER = "TRAINFLOW_SERVED_BY"
SERVER_FOLDER = "TRAINFLOW_SERVER_FOLDER"

HEARTBEAT_S = 30
# Four beats: a busy machine may miss one.
_SILENT = timedelta(seconds=4 * HEARTBEAT_S)
# A crash counts when the run had begun; one that never began would only crash again, at once and for ever.
_LONGEST = timedelta(days=60)
# A worker's second report comes seconds after the first one, on a busy machine ten.
_REPORTED = timedelta(seconds=20)
_CRASHED, _AT_WORK, _QUEUED = "Crashed", "CrashedAtWork", "AwaitingRetry"
_BEGINNINGS = (_QUEUED, "Scheduled", "Pending", "Running", "Cancelled", "Failed")
_ENDS = ("Completed", "Failed", "Cancelled", _CRASHED, "Paused", "Suspended", _QUEUED)


def run_environment(retries: int) -> dict[str, str]:
    """The variables with which the runs of such a deployment start."""
    return {CRASHES: str(retries), "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)} if retries else {}


def set_retries(deployment_id: Any, name: str, retries: int, *, by_worker: bool) -> None:
    """Create, replace or remove (for 0 retries) the automations of the deployment `name`.

    Args:
        by_worker: whether a pool's worker starts its runs; they send heartbeats, those of `serve` do not.
    """
    from prefect.client.orchestration import get_client

    known = set(_names(name))
    with get_client(sync_client=True) as client:
        for automation in client.read_automations():
            if automation.name in known:
                client.delete_automation(automation.id)
        for wanted in _automations(deployment_id, name, by_worker=by_worker) if retries else []:
            client.create_automation(wanted)


def require_another_try(environ: dict[str, str] | os._Environ[str] | None = None) -> None:
    """In the body of a flow: raise InfrastructureError in a run that has crashed more often than it may."""
    environ = os.environ if environ is None else environ
    allowed = int(environ.get(CRASHES) or 0)
    if not allowed:
        return
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.run_count <= allowed + 1:
        return
    with get_client(sync_client=True) as client:
        crashes = sum(state.name == _CRASHED for state in client.read_flow_run_states(run.id))
    if crashes > allowed:
        what = f"This run has crashed {crashes} times, and is not tried again."
        remedy = "Read its logs, then start another run: it continues from the last commit."
        raise InfrastructureError(what, field="--retry-crashed", value=allowed, remedy=remedy)


def _names(name: str) -> tuple[str, str, str]:
    run = f"runs of pipeline/{name}"
    return f"trainflow: crashed {run} run again", f"trainflow: crashed {run} wait", f"trainflow: silent {run} crash"


def _automations(deployment_id: UUID, name: str, *, by_worker: bool) -> list[AutomationCore]:
    again, wait, silent = _names(name)
    make = partial(_automation, deployment_id)
    crashes = partial(make, after="Running", expect=(_CRASHED,), within=_LONGEST)
    if not by_worker:
        return [crashes(again, _QUEUED, "It crashed.")]
    rests = partial(make, after=_AT_WORK, expect=_BEGINNINGS, within=_REPORTED, is_absence=True)
    beat = "heartbeat"
    falls_silent = partial(make, after=beat, expect=(beat, *_ENDS), within=_SILENT, is_absence=True)
    return [
        crashes(wait, _AT_WORK, "It crashed, and runs again soon."),
        rests(again, _QUEUED, "It crashed."),
        falls_silent(silent, _CRASHED, "Its heartbeat fell silent."),
    ]


def _automation(
    deployment_id: UUID,
    name: str,
    state: str,
    message: str,
    *,
    after: str,
    expect: Sequence[str],
    within: timedelta,
    is_absence: bool = False,
) -> AutomationCore:
    """Give a run of the deployment a state when an event comes some time after another one, or does not come."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    kind = StateType.SCHEDULED if state == _QUEUED else StateType.CRASHED
    return AutomationCore(
        name=name,
        description="Made by `trainflow deploy --retry-crashed`.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={
                "prefect.resource.id": f"prefect.deployment.{deployment_id}",
                "prefect.resource.role": "deployment",
            },
            for_each={"prefect.resource.id"},
            threshold=1,
            after={f"prefect.flow-run.{after}"},
            expect={f"prefect.flow-run.{expected}" for expected in expect},
            posture=Posture.Proactive if is_absence else Posture.Reactive,
            within=within,
        ),
        actions=[ChangeFlowRunState(state=kind, name=state, message=message, force=True)],
    )
