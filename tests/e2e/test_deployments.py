"""Schedules that fire by themselves and train: served by one process, and deployed to a server, a pool and a worker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.support import police, toy
from tests.support.command import Cli, command_words, python, running, trainflow
from tests.support.prefect_home import embedded_servers, make_home
from tests.support.prefect_server import Server, wait_for
from tests.support.repository import ROOT
from tests.support.runs import IN_PROCESS
from tests.support.sweeps import SLOW_RECIPE
from trainflow.flows.records.past_runs import list_runs
from trainflow.flows.server.api import prefect_api
from trainflow.flows.server.membership import server_folder
from trainflow.flows.server.schedule import Schedule
from trainflow.flows.server.serving import OWNER, SERVER_FOLDER, _deployment, _forget_planned_runs
from trainflow.flows.spec.spec import PipelineSpec, load_spec, parse_spec

# prepare and train: what a schedule has to show, in the least time.
SHORT = ("evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false", "tracking.enabled=false")
ENDLESS = (*SHORT, "train.args.max_steps=5000", "train.args.save_steps=5000")


@pytest.fixture
def deploy(server: Server, cli: Cli, prefect_server: str) -> Iterator[Cli]:
    """The command, in this process, on the operator's server."""
    with temporary_settings({PREFECT_API_URL: server.environ["PREFECT_API_URL"]}):
        yield partial(cli, "deploy")


def trained(store: Path) -> list[Path]:
    """Committed train stages."""
    return list(store.glob("stages/train/*/COMMIT.json"))


def training() -> list[psutil.Process]:
    """Runs of this test session, their workers, and what supervises those."""
    marks = ("trainer_lib", "prefect.engine")
    return [process for process in police.session_processes() if any(mark in _line(process) for mark in marks)]


def _line(process: psutil.Process) -> str:
    return " ".join(command_words(process))


def has_begun(store: Path) -> bool:
    """Whether a worker is training."""
    attempted = any(store.glob("stages/train/*/attempts/0001.json"))
    return attempted and any("trainer_lib.worker" in _line(process) for process in training())


# --------------------------------------------------------------------------------------------------------------- serve
def test_a_served_schedule_fires_and_trains_and_a_killed_serve_leaves_no_run_behind(
    tmp_path: Path, prefect_database: Path
) -> None:
    spec = toy.project(tmp_path / "project", recipe=SLOW_RECIPE)
    home = make_home(tmp_path / "prefect", prefect_database)
    env = {"TMPDIR": str(tmp_path), "PREFECT_HOME": str(home)}
    with running("serve", spec, *ENDLESS, "--interval", "5", log=tmp_path / "log", env=env) as serving:
        serving.wait_for("Serving pipeline/toy: every 5 s")
        wait_for("training", lambda: has_begun(tmp_path / "project" / "store"))
        assert embedded_servers(home)
        serving.process.kill()
        wait_for("the end of everything it had started", lambda: not training() and not embedded_servers(home), 60)


# -------------------------------------------------------------------------------------------------------------- deploy
@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Server]:
    server = Server(make_home(tmp_path_factory.mktemp("server"), prefect_database))
    try:
        server.serve()
        server.start("prefect", "worker", "start", "--pool", "main", "--type", "process")
        wait_for("the pool, which its worker makes", lambda: server.api("POST", "work_pools/filter", {}))
        yield server
    finally:
        server.stop()


@pytest.mark.timeout(400)
def test_a_deployed_schedule_fires_again_and_again_on_a_worker_and_trains(
    server: Server, deploy: Cli, tmp_path: Path
) -> None:
    spec = toy.project(tmp_path / "project")
    deployed = deploy(spec, *SHORT, *IN_PROCESS, "--pool", "main", "--interval", "8").ok()
    assert "Deployed pipeline/toy to the work pool main: every 8 s." in deployed.out
    wait_for("the second start", lambda: len(server.runs("toy", "PENDING", "RUNNING", "COMPLETED")) > 1, 240)
    server.api("PATCH", f"deployments/{server.deployment('toy')['id']}", {"paused": True})  # no third one
    wait_for("two runs that complete", lambda: len(server.runs("toy", "COMPLETED")) > 1, 240)
    assert {run["auto_scheduled"] for run in server.runs("toy", "COMPLETED")} == {True}
    # The worker's log has what a terminal shows at the end of each run.
    summaries = ("  train         ran ", "  train         cached")
    wait_for("a summary of each run", lambda: all(line in server.log.read_text() for line in summaries))
    [commit] = trained(tmp_path / "project" / "store")
    assert (commit.parent / "model" / "model.safetensors").exists()
    server.api("DELETE", f"deployments/{server.deployment('toy')['id']}")
    wait_for("the end of what had started", lambda: not training(), 90)


@pytest.mark.timeout(300)
def test_a_failed_run_is_retried_through_prefect_and_only_what_failed_runs(
    server: Server, deploy: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    declared = "from pathlib import Path\nfrom typing import TypedDict\n\nclass Model(TypedDict):\n    repaired: Path\n"
    recipe = toy.RECIPE.replace("\n\ndef prepare", f"\n{declared}\n\ndef prepare", 1)
    head, reads = "def build_model(options: Model, data):\n", "    options['repaired'].read_text()\n"
    recipe = recipe.replace("def build_model(options, data):\n", head + reads)
    spec = toy.project(
        folder, recipe=recipe, spec=f"{toy.SPEC}\n".replace("train:\n", "train:\n  model: {repaired: r}\n")
    )
    store, repaired = folder / "store", folder / "r"
    ways = (*SHORT, *IN_PROCESS)
    assert deploy(spec, *ways, "--pool", "main", "--name", "retried").code == 0
    run = server.run("retried")
    wait_for("the failure", lambda: server.runs("retried", "FAILED"))
    repaired.write_text("now")
    # What the button "Retry" in the UI sends.
    server.api("POST", f"flow_runs/{run}/set_state", {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}})
    [completed] = wait_for("the same run to complete", lambda: server.runs("retried", "COMPLETED"))
    assert (completed["id"], completed["run_count"]) == (run, 2)
    assert attempts(store, "prepare-data") == 1
    assert attempts(store, "train") == 2
    assert [past.status for past in list_runs(str(store))] == ["FINISHED"]

    # A run of `trainflow run` has no deployment, so a worker cannot take it up: Prefect's command line runs it itself.
    repaired.unlink()
    again = trainflow("run", spec, *ways, "train.args.learning_rate=1e-2", env=server.environ, cwd=tmp_path)
    assert again.code == 10, again.err
    [failed] = server.api("POST", "flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["FAILED"]}}}})
    repaired.write_text("now")
    server.prefect("flow-run", "retry", failed["id"], "--entrypoint", "trainflow.flows.deployed.pipeline")
    assert server.api("GET", f"flow_runs/{failed['id']}")["state"]["type"] == "COMPLETED"
    assert len(trained(store)) == 2
    assert {past.status for past in list_runs(str(store))} == {"FINISHED"}


@pytest.mark.timeout(500)
def test_a_run_whose_process_is_killed_crashes_and_runs_again_on_its_worker(
    server: Server, deploy: Cli, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    held = f"import pathlib, time\n            while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
    recipe = toy.RECIPE.replace("            y = self.linear(", f"            {held}            y = self.linear(")
    store, spec = tmp_path / "project" / "store", toy.project(tmp_path / "project", recipe=recipe)
    retried = ("--pool", "main", "--name", "killed", "--retry-crashed", "1")
    deploy(spec, *SHORT, *retried).ok()
    run = server.run("killed")
    wait_for("training", lambda: has_begun(store))
    [process] = [each for each in training() if "prefect.engine" in _line(each)]
    process.kill()
    go.touch()
    [completed] = wait_for("the same run to complete", lambda: server.runs("killed", "COMPLETED"), 300)
    assert (completed["id"], completed["run_count"]) == (run, 2)
    states = [state["name"] for state in server.api("GET", f"flow_run_states/?flow_run_id={run}")]
    assert [state for state in states if state not in ("Scheduled", "Pending", "Submitting")] == [
        # The worker reports the death twice; the second report takes the run out of no queue.
        *("Running", "Crashed", "CrashedAtWork", "AwaitingRetry", "Running", "Completed")
    ]
    assert (attempts(store, "prepare-data"), attempts(store, "train")) == (1, 2)
    assert [past.status for past in list_runs(str(store))] == ["FINISHED"]
    wait_for("the end of what had started", lambda: not training(), 90)


def test_new_data_starts_one_run_of_what_is_served(server: Server, tmp_path: Path) -> None:
    data, spec = tmp_path / "data", toy.project(tmp_path / "project")
    data.mkdir()
    watching = ("--name", "watched", "--watch", data, "--watch-every", "1")

    def notes() -> list[Path]:
        return list((tmp_path / "project" / "store" / "watch").glob("*.json"))

    # tests/unit/flows/test_server.py starts it again.
    with running("serve", spec, *SHORT, *watching, log=tmp_path / "log", env=server.environ) as serving:
        serving.wait_for(f"Watching {data}: new data there starts a run.")
        wait_for("the first look", notes)
        (data / "1.csv").write_text("1\n")
        serving.wait_for(f"New data under {data}: the run ")
        wait_for("its end", lambda: server.runs("watched", "COMPLETED"), 240)
        assert serving.stop() == 0, serving.output
    [run] = server.runs("watched", "COMPLETED")
    assert "new-data" in run["tags"]
    # The folder is none of prepare.sources, so in no key.
    assert run["parameters"]["force"] == ["prepare-data"]
    [note] = notes()
    assert json.loads(note.read_text())["started"] == 1


def attempts(store: Path, stage: str) -> int:
    return len([path for path in store.glob(f"stages/{stage}/*/attempts/*.json") if not path.stem.endswith(".end")])


def test_deploying_needs_a_pool(server: Server, deploy: Cli, tmp_path: Path) -> None:
    spec = toy.project(tmp_path)
    absent = deploy(spec, "--pool", "other")
    assert absent.code == 2
    assert "prefect work-pool create --type process other" in absent.err
    server.prefect("work-pool", "create", "--type", "docker", "containers")
    image = ("--pool", "containers", "--image", "registry.example/toy:1", "--job-variable", "mem_limit=2g")
    deploy(spec, *image, "--name", "boxed", "--limit-runs", "1").ok()
    deployment = server.deployment("boxed")
    variables = deployment["job_variables"]
    assert (variables["image"], variables["mem_limit"]) == ("registry.example/toy:1", "2g")
    assert deployment["global_concurrency_limit"]["limit"] == 1


def test_the_example_file_deploys_the_digits_every_night(server: Server) -> None:
    server.prefect("work-pool", "create", "--type", "process", "trainflow")
    server.prefect("deploy", "--prefect-file", "deployments/prefect.yaml", "--all")
    deployment = server.deployment("digits-nightly")
    assert deployment["entrypoint"] == "flows/pipeline.py:pipeline"
    assert [schedule["schedule"]["cron"] for schedule in deployment["schedules"]] == ["0 3 * * *"]
    wait_for("planned runs", lambda: server.runs("digits-nightly", "SCHEDULED"))
    folders = {"root", "folder"}
    example = load_spec(ROOT / "examples" / "digits" / "pipeline.yaml").model_dump(mode="json", exclude=folders)
    written = parse_spec(deployment["parameters"]["spec"]).model_dump(mode="json", exclude=folders)
    written |= {name: os.path.normpath(ROOT / written[name]) for name in ("recipe", "storage")}
    assert written == example


# -- what an earlier serve of the same name left ----------------------------------------------------------------------
def test_plans_of_a_serve_that_died_are_forgotten(tmp_path: Path, prefect_database: Path) -> None:
    toy.project(tmp_path / "project")
    make_home(tmp_path / "prefect", prefect_database)
    command(tmp_path, "serve_and_die")
    command(tmp_path, "serve_again")


def test_importing_the_entrypoint_of_served_runs_does_nothing() -> None:
    spec = {"name": "toy", "recipe": "recipe.py"}
    code = (
        "import logging, os\n"
        "before = os.getsid(0)\n"
        "from prefect.flows import load_flow_from_entrypoint\n"
        "served = load_flow_from_entrypoint('trainflow.flows.deployed.pipeline', use_placeholder_flow=False)\n"
        "from trainflow.flows.pipeline import pipeline\n"
        "print(os.getsid(0) == before, logging.getLogger('prefect.flow_runs').filters)\n"
        "print(served.name == pipeline.name, served.parameters == pipeline.parameters, served.fn is pipeline.fn)\n"
        f"print(served.validate_parameters(dict(spec={spec!r}))['spec'].name)\n"
    )
    # The folder does not exist: an import that opened the server's lock would fail.
    env = {OWNER: "1", SERVER_FOLDER: "/nonexistent"}
    assert python("-c", code, env=env).stdout == "True []\nTrue True False\ntoy\n"


def command(folder: Path, name: str) -> None:
    """Run a function of this file as a command of its own: this process may hold on to the session's server."""
    code = f"from tests.e2e.test_deployments import {name}; {name}()"
    python("-c", code, env={"PREFECT_HOME": str(folder / "prefect"), "SERVED_PROJECT": str(folder / "project")})


def serve_and_die() -> None:
    """Deploy as `trainflow serve` does, plan a run by hand, and end without a word."""
    with prefect_api() as url, _client() as client:
        from prefect.states import Scheduled

        assert server_folder(url) is not None
        _deployment(_spec(), "orphaned", Schedule(interval_s=3600).prefect()).apply()
        late = datetime.now(UTC) - timedelta(hours=1)
        client.create_flow_run_from_deployment(_served(client).id, state=Scheduled(scheduled_time=late), name="wanted")


def serve_again() -> None:
    """On a new server: who served is gone."""
    with prefect_api(), _client() as client:
        _deployment(_spec(), "orphaned", Schedule(interval_s=3600).prefect()).apply()
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
