"""What an earlier deployment of the same name has planned never runs, and what nobody serves is paused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flows._server import SERVED_TAG
from flows.engine import prefect_api, server_folder
from flows.serving import Schedule, _deployment, _forget_planned_runs
from flows.spec import load_spec
from tests.support import toy


def test_plans_of_a_serve_that_died_are_forgotten_and_its_schedule_is_paused(tmp_path: Path) -> None:
    spec = load_spec(toy.project(tmp_path), ["name=orphaned"])
    with prefect_api() as url:
        from prefect.client.orchestration import get_client
        from prefect.states import Scheduled

        assert server_folder(url) is not None
        _deployment(spec, "orphaned", Schedule(interval_s=3600).prefect(), tags=[SERVED_TAG]).apply()
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("pipeline/orphaned")
            late = datetime.now(UTC) - timedelta(hours=1)
            asked_for = client.create_flow_run_from_deployment(deployment.id, state=Scheduled(scheduled_time=late))
            assert _paused(client) is False

    with prefect_api(), get_client(sync_client=True) as client:  # a new server: who served is gone
        assert _paused(client) is True
        _deployment(spec, "orphaned", Schedule(interval_s=3600).prefect(), tags=[SERVED_TAG]).apply()
        _forget_planned_runs("orphaned")
        _forget_planned_runs("never deployed")
        assert [run.id for run in client.read_flow_runs(limit=200) if run.deployment_id == deployment.id] == [
            asked_for.id
        ], "a run that somebody asked for is kept"
        client.delete_deployment(deployment.id)


def _paused(client: Any) -> bool:
    return bool(client.read_deployment_by_name("pipeline/orphaned").paused)
