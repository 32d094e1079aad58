"""What an earlier deployment of the same name has planned never runs, and a deployment without a server is paused."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flows.server.api import prefect_api, server_folder
from flows.server.embedded import SERVED_TAG
from flows.server.run_process import OWNER, SERVER_FOLDER
from flows.server.schedule import Schedule
from flows.server.serving import _deployment, _forget_planned_runs
from flows.spec.spec import PipelineSpec, load_spec
from tests.support import toy
from tests.support.prefect_home import make_home
from tests.support.repository import ROOT


def test_plans_of_a_serve_that_died_are_forgotten_and_its_schedule_is_paused(
    tmp_path: Path, prefect_database: Path
) -> None:
    toy.project(tmp_path / "project")
    make_home(tmp_path / "prefect", prefect_database)
    command(tmp_path, "serve_and_die")
    command(tmp_path, "find_it_paused")


def test_importing_the_entrypoint_of_served_runs_does_nothing() -> None:
    spec = {"name": "toy", "recipe": "recipe.py"}
    code = (
        "import logging, os\n"
        "before = os.getsid(0)\n"
        "from prefect.flows import load_flow_from_entrypoint\n"
        "served = load_flow_from_entrypoint('flows.deployed.pipeline', use_placeholder_flow=False)\n"
        "from flows.pipeline import pipeline\n"
        "print(os.getsid(0) == before, logging.getLogger('prefect.flow_runs').filters)\n"
        "print(served.name == pipeline.name, served.parameters == pipeline.parameters, served.fn is pipeline.fn)\n"
        f"print(served.validate_parameters(dict(spec={spec!r}))['spec'].name)\n"
    )
    # The folder does not exist: an import that opened the server's lock would fail.
    env = {**os.environ, OWNER: "1", SERVER_FOLDER: "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True []\nTrue True False\ntoy\n", done.stdout + done.stderr


def command(folder: Path, name: str) -> None:
    """Run a function of this file as a command of its own: this process may hold on to the session's server."""
    code = f"from tests.flows.test_serving import {name}; {name}()"
    kept = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    env = {**kept, "PREFECT_HOME": str(folder / "prefect"), "SERVED_PROJECT": str(folder / "project")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=150)


def serve_and_die() -> None:
    """Deploy as `trainflow serve` does, plan a run by hand, and end without a word."""
    with prefect_api() as url, _client() as client:
        from prefect.states import Scheduled

        assert server_folder(url) is not None
        _deployment(_spec(), "orphaned", Schedule(interval_s=3600).prefect(), tags=[SERVED_TAG]).apply()
        late = datetime.now(UTC) - timedelta(hours=1)
        client.create_flow_run_from_deployment(_served(client).id, state=Scheduled(scheduled_time=late), name="wanted")
        assert _served(client).paused is False


def find_it_paused() -> None:
    """On a new server: who served is gone."""
    with prefect_api(), _client() as client:
        assert _served(client).paused is True
        _deployment(_spec(), "orphaned", Schedule(interval_s=3600).prefect(), tags=[SERVED_TAG]).apply()
        _forget_planned_runs("orphaned")
        _forget_planned_runs("never deployed")
        left = [run.name for run in client.read_flow_runs(limit=200)]
        assert left == ["wanted"], "a run that somebody asked for is kept"


def _spec() -> PipelineSpec:
    return load_spec(Path(os.environ["SERVED_PROJECT"]) / "pipeline.yaml", ["name=orphaned"])


def _client() -> Any:
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def _served(client: Any) -> Any:
    return client.read_deployment_by_name("pipeline/orphaned")
