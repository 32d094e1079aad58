"""Crashed runs run again: two automations of Prefect's server for one deployment, and the end of the tries.

A run is Crashed when its process ended without a word: the worker sees the exit code, `trainflow status` the dead
process. The first automation puts such a run back into the queue. The second one covers a worker or machine that is
gone, too: a run whose heartbeat falls silent is set to Crashed. The crashes of a run are counted when it starts again;
the last one that is allowed ends it as Failed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainer_lib.errors import InfrastructureError

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient

CRASHES = "TRAINFLOW_CRASH_RETRIES"
"""Variable of a run's process: how many of its crashes are followed by another try."""

HEARTBEAT_S = 30
# Four beats: a busy machine may miss one.
_SILENT = timedelta(seconds=4 * HEARTBEAT_S)
# A crash counts when the run was at work; one that never began would only crash again, at once and for ever.
_LONGEST = timedelta(days=60)
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed", "Paused", "Suspended", "AwaitingRetry")


def run_environment(retries: int) -> dict[str, str]:
    """The variables with which the runs of such a deployment start."""
    return {CRASHES: str(retries), "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)} if retries else {}


def set_retries(client: SyncPrefectClient, deployment_id: UUID, name: str, retries: int, *, heartbeats: bool) -> None:
    """Create, replace or remove the automations of a deployment.

    Args:
        name: of the deployment.
        retries: how often a crashed run runs again; 0 removes the automations.
        heartbeats: whether its runs send heartbeats.
    """
    wanted = _automations(deployment_id, name, heartbeats=heartbeats) if retries else []
    known = set(_names(name))
    for found in client.read_automations():
        if found.name in known:
            client.delete_automation(found.id)
    for automation in wanted:
        client.create_automation(automation)


def require_another_try(environ: dict[str, str] | os._Environ[str] | None = None) -> None:
    """In the body of a flow: end a run that has crashed more often than it may.

    Raises:
        InfrastructureError: it has.
    """
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
        crashes = sum(state.is_crashed() for state in client.read_flow_run_states(run.id))
    if crashes > allowed:
        raise InfrastructureError(
            f"This run has crashed {crashes} times, and is not tried again.",
            field="--retry-crashed",
            value=allowed,
            remedy="Read its logs, then start another run: it continues from the last commit.",
        )


def _names(name: str) -> tuple[str, str]:
    return f"trainflow: crashed runs of pipeline/{name} run again", f"trainflow: silent runs of pipeline/{name} crash"


def _automations(deployment_id: UUID, name: str, *, heartbeats: bool) -> list[Any]:
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    crashed, silent = _names(name)
    runs = {
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {
            "prefect.resource.id": f"prefect.deployment.{deployment_id}",
            "prefect.resource.role": "deployment",
        },
        "for_each": {"prefect.resource.id"},
        "threshold": 1,
    }
    again = AutomationCore(
        name=crashed,
        description="Made by `trainflow deploy --retry-crashed`.",
        trigger=EventTrigger(
            **runs,  # type: ignore[arg-type]
            after={"prefect.flow-run.Running"},
            expect={"prefect.flow-run.Crashed"},
            posture=Posture.Reactive,
            within=_LONGEST,
        ),
        actions=[
            ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message="It crashed.", force=True)
        ],
    )
    if not heartbeats:
        return [again]
    beat = "prefect.flow-run.heartbeat"
    watch = AutomationCore(
        name=silent,
        description="Made by `trainflow deploy --retry-crashed`.",
        trigger=EventTrigger(
            **runs,  # type: ignore[arg-type]
            after={beat},
            expect={beat, *(f"prefect.flow-run.{state}" for state in _ENDS)},
            posture=Posture.Proactive,
            within=_SILENT,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED, name="Crashed", message="Its heartbeat fell silent.", force=True
            )
        ],
    )
    return [again, watch]
