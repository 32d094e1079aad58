"""A run for which nothing is left to do, and `trainflow resume`: a run goes on, also where only its storage is."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.flow_engine import FlowRunEngine
from prefect.states import Running

from tests.support import toy
from tests.support.command import Cli, python
from tests.support.recorded import leave_sign
from tests.support.runs import ALL, IN_PROCESS, broken, ran, run, succeeded
from trainer_lib.base.yaml_text import parse_yaml
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.errors import ConfigError, NewerVersionError, TrainflowError
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT
from trainflow.flows import pipeline as module
from trainflow.flows.cli.commands.execution import _choose_unfinished
from trainflow.flows.pipeline import run_pipeline
from trainflow.flows.planning.plan import Plan
from trainflow.flows.records.past_runs import (
    PastRun,
    describe_changes,
    list_runs,
    read_record,
    run_folder,
    write_record,
)
from trainflow.flows.records.prefect_runs import OwnFlowRun, own_flow_run
from trainflow.flows.records.recorded_spec import read_recorded_spec
from trainflow.flows.records.results import PipelineResult
from trainflow.flows.run_stages import result_if_unchanged
from trainflow.flows.runs.run_status import find_still_forced, read_signs, require_sources
from trainflow.flows.spec.spec import PipelineSpec, load_spec
from trainflow.flows.stages import all_stages
from trainflow.tasks.stage import progress

GONE = replace(Holder.this_process(30.0), started="1")

# Ends with 3 if anything of Prefect, MLflow or torch was imported.
PROGRAM = """
import sys
from trainflow.flows.cli.main import main
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
    done = python("-c", PROGRAM, *words)
    answer = json.loads(done.stdout)
    assert {stage["status"] for stage in answer["stages"]} == {"cached"}
    assert Path(answer["places"]["model"], "model.safetensors").exists()
    assert done.stderr.count("cached: committed") == len(ALL)


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
        tag = f"trainflow-process={GONE.machine}|{GONE.pid}|{GONE.started}|{GONE.since}"
        client.update_flow_run(dead.id, tags={tag})
        spec = spec_of(folder)
        complete = result_if_unchanged(spec)
        assert complete is not None
        run = run_folder(spec.storage, complete.pipeline_key[:16])
        leave_sign(run, GONE, name="before", flow_run_id=str(dead.id))
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
    assert ran(run_pipeline(spec)) == set()
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
        result = run_pipeline(spec)
    assert result.ok
    assert "did not learn how the run ended" in caplog.text
    assert len(read_signs(run_folder(spec.storage, result.pipeline_key[:16]))) == 1


# -- resume -----------------------------------------------------------------------------------------------------------

READS = "    from pathlib import Path\n    out.info['table'] = Path(out.sources[0]).read_text()\n"
FAILS = '    import os\n    if "REPAIRED" not in os.environ:\n        raise ValueError("not yet")\n'


def project(folder: Path, storage: Path) -> Path:
    """A project that reads a source and fails in evaluate; the path of its spec."""
    recipe = toy.RECIPE.replace("    rows = int(", f"{READS}    rows = int(")
    recipe = recipe.replace('    return {"error"', f'{FAILS}    return {{"error"')
    spec = toy.SPEC.replace("storage: store", f"storage: {storage}").replace("tracking: {enabled: false}", "")
    spec = spec.replace("prepare:\n", "prepare:\n  sources: [data/table.csv]\n").replace(
        "kind: process", "kind: in_process"
    )
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "table.csv").write_text("7")
    return toy.project(folder, recipe=recipe, spec=f"{spec}\nroot: .\n")


def test_a_run_goes_on_on_a_machine_that_has_its_storage_alone(tmp_path: Path, prefect_server: str, cli: Cli) -> None:
    storage, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    spec = project(tmp_path / "project", storage)
    elsewhere.mkdir()
    env = {"HOME": str(elsewhere), "XDG_CACHE_HOME": str(elsewhere / "cache")}
    overrides = ("train.args.learning_rate=2e-2", "predict.enabled=false")
    assert "not yet" in str(run_pipeline(load_spec(spec, overrides)).error)
    (tmp_path / "project").rename(tmp_path / "gone")
    [failed] = list_runs(str(storage))
    kept = storage / "runs" / failed.id / "source" / "recipe.py"
    sound = kept.read_text()

    kept.write_text(sound + "# changed\n")
    with pytest.raises(ConfigError, match=r"recipe\.py is not as it was kept"):
        read_recorded_spec(str(storage), failed, print)
    kept.write_text(sound)
    nothing = cli("resume", cwd=elsewhere)
    assert nothing.code == 2
    assert "neither a single spec nor .trainflow" in nothing.err

    done = cli("resume", "--storage", storage, "--json", cwd=elsewhere, env={**env, "REPAIRED": "1"}).ok()
    assert f"The recipe is the one that the run kept: {elsewhere / 'cache'}" in done.err
    assert "Changed since" not in done.err
    answer = json.loads(done.out)
    assert [each["status"] for each in answer["stages"]] == ["cached", "cached", "ran", "skipped", "ran"]
    [finished] = list_runs(str(storage))
    assert (finished.id, finished.status) == (failed.id, "FINISHED")
    assert finished.mlflow_run_id == failed.mlflow_run_id == answer["mlflow_run_id"]
    # Where the project is, the next run reads it, and not the copy.
    kept_spec: Any = parse_yaml((kept.parents[1] / "spec.yaml").read_text())
    assert kept_spec["recipe"] == str(spec.parent / "recipe.py")
    refusals = {finished.id[:7]: "has finished", "train.args.seed=1": "takes no overrides", "x": "No run"}
    for word, answer in refusals.items():
        with pytest.raises(ConfigError, match=answer) as caught:
            _choose_unfinished(str(storage), word, print)
        assert caught.value.field == "RUN"
        assert caught.value.remedy


def recorded(folder: Path) -> tuple[PastRun, PipelineSpec, list[str]]:
    """The newest run, its spec on this machine, and the warnings."""
    storage, said = str(folder / "store"), list[str]()
    past = list_runs(storage)[0]
    return past, read_recorded_spec(storage, past, said.append), said


def test_a_changed_recipe_is_named_and_the_keys_decide(folder: Path) -> None:
    sound = (folder / "recipe.py").read_text()
    broken(folder, 'return {"error"', 'return {"error": 1 / 0, "e"')
    overrides = ("train.args.learning_rate=1e-2", "tracking.enabled=true")
    assert run(folder, *overrides).error is not None
    past, spec, said = recorded(folder)
    assert said == []
    plan = Plan.of(spec)
    assert plan.pipeline_key[:16] == past.id
    record = folder / "store" / "runs" / past.id / "spec.yaml"  # of a time when there were more settings
    record.write_text(record.read_text().replace("evaluate:\n", "evaluate:\n  rows_per_range: 10000\n"))
    assert Plan.of(recorded(folder)[1]).pipeline_key == plan.pipeline_key
    assert describe_changes(spec.storage, past, plan.early_keys) == []
    (folder / "recipe.py").write_text(sound.replace("Linear(1, 1)", "Linear(1, 1, bias=True)"))
    edited = Plan.of(read_recorded_spec(spec.storage, past, said.append))
    changed = [str(each) for each in describe_changes(spec.storage, past, edited.early_keys)]
    assert [text.partition(" (")[0] for text in changed] == ["build_model changed", "compute_metrics changed"]
    (folder / "recipe.py").write_text(sound)
    result = run_pipeline(read_recorded_spec(str(folder / "store"), past, said.append))
    assert ran(result) == {"evaluate", "predict", "push-to-hub"}


def test_a_source_that_is_not_here_counts_as_it_was_and_is_needed_only_to_prepare(
    tmp_path: Path, prefect_server: str
) -> None:
    folder = tmp_path / "project"
    overrides = ("tracking.enabled=false", "evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false")
    run_pipeline(load_spec(project(folder, folder / "store"), overrides)).raise_for_error()
    shutil.rmtree(folder / "data")
    past, spec, _ = recorded(folder)
    plan = Plan.of(spec)
    assert all(reason.hit for reason in plan.reasons.values())
    require_sources(plan)
    Store.open(folder / "store").child("stages").delete_tree("prepare-data")
    with pytest.raises(ConfigError, match="does not exist") as unknown:
        read_recorded_spec(str(folder / "store"), past, print)
    assert unknown.value.field == "prepare.sources"


def test_a_record_without_a_spec_is_refused_with_another_way(folder: Path) -> None:
    storage = str(folder / "store")
    past = list_runs(storage)[0]
    path = folder / "store" / "runs" / past.id / "spec.yaml"
    path.write_text("name: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recorded_spec(storage, past, print)
    path.unlink()
    with pytest.raises(ConfigError, match="gone from the storage") as gone:
        read_recorded_spec(storage, past, print)
    assert "trainflow run SPEC" in str(gone.value.remedy)


def test_a_forced_stage_that_had_not_begun_is_still_forced(folder: Path) -> None:
    assert ran(run(folder, "tracking.enabled=true", force=["evaluate"])) == {"evaluate"}
    [path] = folder.glob("store/runs/*/run.json")
    record = json.loads(path.read_bytes())
    assert record["force"] == ["evaluate"]
    del record["stages"]["evaluate"]
    del record["seal"]
    path.write_text(json.dumps({**record, "status": "KILLED"}))
    past, spec, _ = recorded(folder)
    assert find_still_forced(past, Plan.of(spec)) == ["evaluate"], "its result is the one to discard"
    shutil.rmtree(folder / "store" / "stages" / "evaluate")
    assert find_still_forced(past, Plan.of(spec)) == [], "it had started: it goes on"
    both = replace(past, force=("prepare-data", "train"), stages={})
    assert find_still_forced(both, Plan.of(spec)) == ["prepare-data", "train"]
    assert find_still_forced(replace(both, stages={"prepare-data": "1", "train": "2"}), Plan.of(spec)) == []


def test_a_retry_of_a_flow_run_forces_only_what_had_not_begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = (folder / "recipe.py").read_text()
    broken(folder, 'return {"error"', 'return {"error": 1 / 0, "e"')
    began = datetime.now(UTC)
    forced = ["train", "evaluate", "push-to-hub"]
    assert run(folder, "tracking.enabled=true", force=forced).error is not None
    (folder / "recipe.py").write_text(sound)

    @contextmanager
    def retried() -> Iterator[OwnFlowRun]:
        with own_flow_run() as flow_run:
            flow_run.began = began
            yield flow_run

    monkeypatch.setattr(module, "own_flow_run", retried)
    again = run(folder, "tracking.enabled=true", force=forced)
    assert "train" not in ran(again)
    assert {"evaluate", "push-to-hub"} <= ran(again)


# -- what cannot go on says what is there and what to do --------------------------------------------------------------

TRAINING = ("evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false")


@pytest.fixture
def train(folder: Path) -> Path:
    """The folder of the finished train stage."""
    [found] = (folder / "store" / "stages" / "train").iterdir()
    return found


def as_newer_version(commit: Path) -> None:
    """Rewrite a commit file as a later trainflow may write it: another format, a field more, sealed again."""
    record = {**json.loads(commit.read_text()), "format": 2, "more": "a field of tomorrow"}
    del record["seal"]
    record["seal"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    commit.write_text(json.dumps(record))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def failed(folder: Path, *overrides: str) -> TrainflowError:
    error = run(folder, *overrides, *TRAINING).error
    assert error is not None
    assert error.remedy
    return error


def test_a_checkpoint_of_a_newer_version_is_refused_and_kept(folder: Path, train: Path) -> None:
    (train / COMMIT).unlink()
    newest = list_checkpoints(Store.open(train / "checkpoints"))[0]
    as_newer_version(Path(newest.url) / COMMIT)
    before = contents(train / "checkpoints")
    error = failed(folder)
    assert type(error) is NewerVersionError
    assert error.field == f"{newest.url}/{COMMIT}"
    assert "format 2, which a newer trainflow wrote; this one reads up to 1" in error.message
    assert "Update trainflow" in str(error.remedy)
    assert contents(train / "checkpoints") == before
    shutil.rmtree(newest.url)
    assert ran(run(folder, *TRAINING)) == {"train"}


def test_a_result_of_a_newer_version_is_refused_and_kept(folder: Path, train: Path) -> None:
    as_newer_version(train / COMMIT)
    before = contents(train)
    error = failed(folder)
    assert type(error) is NewerVersionError
    assert error.exit_code == 2
    assert contents(train) == before


def test_a_format_that_damage_made_is_damage(folder: Path, train: Path) -> None:
    commit = train / COMMIT
    commit.write_text(commit.read_text().replace('"format": 1', '"format": 3'))
    assert ran(run(folder, *TRAINING)) == {"train"}


def test_a_ledger_that_cannot_be_read_is_named_and_the_stage_goes_on(folder: Path, train: Path) -> None:
    (train / COMMIT).unlink()
    (train / "attempts" / "0001.end.json").write_text("{torn")  # tests/unit/tasks/test_retry.py has other contents
    warnings: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            warnings.append(event["message"])

    with progress.subscribe(listen):
        succeeded(folder, *TRAINING)
    [told] = [warning for warning in warnings if "earlier attempts" in warning]
    assert f"0001.end.json in {train / 'attempts'}" in told


@pytest.mark.parametrize("name", ["attempts", "checkpoints"])
def test_a_file_in_the_place_of_a_folder_is_named(folder: Path, train: Path, name: str) -> None:
    (train / COMMIT).unlink()
    shutil.rmtree(train / name)
    (train / name).write_text("in the way")
    error = failed(folder, "train.retries=0")
    assert str(train / name) in str(error.field)
    assert "A file is in the place of a folder" in error.message
    assert "move that file away" in str(error.remedy)
