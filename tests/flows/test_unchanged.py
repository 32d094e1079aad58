"""A run for which nothing is left to do: found without an engine, and only where nothing at all is left."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.flow_engine import FlowRunEngine
from prefect.states import Running

from flows import pipeline as module
from flows.heartbeat import read_signs
from flows.past_runs import read_record, run_folder, write_record
from flows.pipeline import run_pipeline
from flows.results import PipelineResult
from flows.spec.spec import PipelineSpec, load_spec
from flows.stages import all_stages
from flows.unchanged import result_if_unchanged
from tasks.stage import manifest as _manifests
from tests.support.command import trainflow
from tests.support.runs import ALL, IN_PROCESS, broken, ran
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store

GONE = replace(Holder.this_process(30.0), started="1")

# Ends with 3 if anything of Prefect, MLflow or torch was imported.
PROGRAM = """
import sys
from flows.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code in (0, None), end.code
sys.exit(3 if {"prefect", "mlflow", "torch"} & set(sys.modules) else 0)
"""


def spec_of(folder: Path, *overrides: str) -> PipelineSpec:
    return load_spec(folder / "pipeline.yaml", (*IN_PROCESS, "tracking.enabled=true", *overrides))


def files(folder: Path) -> dict[str, bytes]:
    """What lies in a project's storage, without the folders of signs of life, which are empty again."""
    return {str(path): path.read_bytes() for path in sorted((folder / "store").rglob("*")) if path.is_file()}


def sign_of_a_dead_process(storage: str, run_id: str, flow_run: uuid.UUID | None = None) -> Store:
    """Leave the sign of a process that died at a run; returns the run's folder."""
    folder = run_folder(storage, run_id)
    about = {"holder": asdict(GONE), "flow_run_id": str(flow_run) if flow_run else None}
    folder.write_bytes("alive/before.json", json.dumps(about).encode())
    return folder


def test_it_needs_no_engine_and_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(folder)
    # A server that is not there: any request to it fails.
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    result = result_if_unchanged(spec_of(folder))
    assert result is not None
    assert result.ok
    assert [(each.stage, each.status) for each in result.stages] == [(stage.name, "cached") for stage in all_stages()]
    assert all(each.manifest and each.reason.startswith("committed ") for each in result.stages)
    assert result.mlflow_run_id
    assert result.report_url
    assert Path(result.report_url).exists()
    assert files(folder) == before


def test_the_command_loads_neither_prefect_nor_mlflow(folder: Path) -> None:
    words = ["run", str(folder / "pipeline.yaml"), *IN_PROCESS, "tracking.enabled=true", "--json"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert {stage["status"] for stage in answer["stages"]} == {"cached"}
    assert Path(answer["places"]["model"], "model.safetensors").exists()
    assert done.stderr.count("cached: committed") == len(ALL)


def test_a_change_is_refused_by_a_server_that_is_not_there(folder: Path) -> None:
    words = [*IN_PROCESS, "tracking.enabled=true", "train.args.learning_rate=0.2"]
    done = trainflow("run", folder / "pipeline.yaml", *words, env={"PREFECT_API_URL": "http://127.0.0.1:9/api"})
    assert done.code != 0
    assert "127.0.0.1:9" in done.err
    assert "Traceback" not in done.err


def damage_the_model(folder: Path) -> None:
    [weights] = folder.glob("store/stages/train/*/model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")


def forget_the_end(folder: Path) -> None:
    [record] = (folder / "store" / "runs").glob("*/run.json")
    write_record(Store.open(str(record.parent)), {**read_record(Store.open(str(record.parent))), "status": "RUNNING"})


@pytest.mark.parametrize(
    "spoil",
    [
        damage_the_model,
        lambda folder: shutil.rmtree(folder / "store" / "stages" / "predict"),
        lambda folder: shutil.rmtree(folder / "store" / "hub"),
        forget_the_end,
        lambda folder: shutil.rmtree(folder / "store" / "runs"),
        lambda folder: broken(folder, "def compute_metrics(p):", "def compute_metrics(p):\n    p = p"),
    ],
    ids=["the model", "predictions", "publication", "the end", "the run", "the metric"],
)
def test_anything_that_is_left_to_do_is_left_to_a_run(folder: Path, spoil: Callable[[Path], object]) -> None:
    _manifests._verified.clear()
    spoil(folder)
    assert result_if_unchanged(spec_of(folder)) is None


@pytest.mark.parametrize(
    "override",
    ["train.args.seed=5", "register.name=toy", "evaluate.require={test_error: '< 0'}", "tracking.enabled=false"],
)
def test_a_wish_that_is_not_met_yet_is_left_to_a_run(folder: Path, override: str) -> None:
    assert result_if_unchanged(spec_of(folder), force=["train"]) is None
    found = result_if_unchanged(spec_of(folder, override))
    # Without MLflow nothing more is wanted than what is there.
    assert (found is None) == (override != "tracking.enabled=false")


@pytest.mark.usefixtures("prefect_server")
def test_after_a_death_prefect_learns_of_it_once_and_the_next_command_needs_no_engine(folder: Path) -> None:
    from prefect import flow

    @flow(name="pipeline")
    def pipeline() -> None: ...

    with get_client(sync_client=True) as client:
        dead = client.create_flow_run(pipeline)
        client.set_flow_run_state(dead.id, Running(), force=True)
        client.update_flow_run_labels(dead.id, {f"trainflow.{name}": value for name, value in asdict(GONE).items()})
        spec = spec_of(folder)
        complete = result_if_unchanged(spec)
        assert complete is not None
        run = sign_of_a_dead_process(spec.storage, complete.pipeline_key[:16], dead.id)
        assert result_if_unchanged(spec) is None
        assert run_pipeline(spec).ok
        assert client.read_flow_run(dead.id).state_name == "Crashed"
    assert read_signs(run) == []
    assert result_if_unchanged(spec) is not None


@pytest.mark.usefixtures("prefect_server")
def test_the_sign_goes_once_prefect_knows_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(folder, "predict.enabled=false", "publish.enabled=false")
    signs: list[int] = []
    set_state_as_before = FlowRunEngine.set_state

    def set_state(engine: Any, state: Any, force: bool = False) -> Any:
        if state.is_final():
            signs.extend(len(read_signs(each)) for each in runs())
        return set_state_as_before(engine, state, force)

    def runs() -> list[Store]:
        return [run_folder(spec.storage, name) for name in Store.open(spec.storage).child("runs").children()]

    monkeypatch.setattr(FlowRunEngine, "set_state", set_state)
    assert ran(module.run_pipeline(spec)) == set()
    assert sum(signs) == 1, "a process that is killed now leaves a sign"
    assert sum(len(read_signs(each)) for each in runs()) == 0


@pytest.mark.usefixtures("prefect_server")
def test_the_sign_stays_where_prefect_did_not_learn_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(folder)
    flow = module.pipeline

    def without_answer(*arguments: Any, **named: Any) -> PipelineResult:
        flow(*arguments, **named)
        raise httpx.ConnectError("the server is gone")

    monkeypatch.setattr(module, "pipeline", without_answer)
    with caplog.at_level(logging.WARNING):
        result = module.run_pipeline(spec)
    assert result.ok
    assert "did not learn how the run ended" in caplog.text
    assert len(read_signs(run_folder(spec.storage, result.pipeline_key[:16]))) == 1
