"""`trainflow resume`: a run goes on, also where only its storage is; one that cannot is left as it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flows import pipeline as _pipeline
from flows.cli.resume import _choose
from flows.past_runs import PastRun, describe_changes, list_runs
from flows.pipeline import run_pipeline
from flows.plan import Plan
from flows.prefect_runs import OwnFlowRun, own_flow_run
from flows.recorded_spec import read_recorded_spec
from flows.resumption import require_sources
from flows.spec.spec import PipelineSpec, load_spec
from flows.still_forced import find_still_forced
from tasks.stage import manifest as _manifests
from tasks.stage import progress
from tests.support import toy
from tests.support.command import Cli
from tests.support.runs import broken, ran, run
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.commit import COMMIT
from trainer_lib.errors import ConfigError, NewerVersionError, TrainflowError
from trainer_lib.storage import Store
from trainer_lib.yaml_text import parse_yaml

READS = "    from pathlib import Path\n    out.info['table'] = Path(out.sources[0]).read_text()\n"
FAILS = '    import os\n    if "REPAIRED" not in os.environ:\n        raise ValueError("not yet")\n'


def project(folder: Path, storage: Path) -> Path:
    """A project that reads a source and fails in evaluate; the path of its spec."""
    recipe = toy.RECIPE.replace("    rows = int(", f"{READS}    rows = int(").replace(
        '    return {"error"', f'{FAILS}    return {{"error"'
    )
    spec = toy.SPEC.replace("storage: store", f"storage: {storage}").replace("tracking: {enabled: false}", "")
    spec = spec.replace("prepare:\n", "prepare:\n  sources: [data/table.csv]\n")
    spec = spec.replace("{kind: process, processes: 1}", "in_process")
    spec = spec.replace("{kind: process, processes: 1, threads: 1}", "in_process")
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

    done = cli("resume", "--storage", storage, "--json", cwd=elsewhere, env={**env, "REPAIRED": "1"})
    assert done.code == 0, done.out + done.err
    assert f"The recipe is the one that the run kept: {elsewhere / 'cache'}" in done.err
    assert "Changed since" not in done.err
    answer = json.loads(done.out)
    assert {each["stage"]: each["status"] for each in answer["stages"]} == {
        "prepare-data": "cached",
        "train": "cached",
        "evaluate": "ran",
        "predict": "skipped",
        "push-to-hub": "ran",
    }
    [finished] = list_runs(str(storage))
    assert (finished.id, finished.status) == (failed.id, "FINISHED")
    assert finished.mlflow_run_id == failed.mlflow_run_id == answer["mlflow_run_id"]
    # Where the project is, the next run reads it, and not the copy.
    assert load_spec_text(storage, finished)["recipe"] == str(spec.parent / "recipe.py")
    for word, answer in (
        (finished.id[:7], "has finished"),
        ("train.args.seed=1", "with the settings"),
        ("x", "No run"),
    ):
        with pytest.raises(ConfigError, match=answer) as caught:
            _choose(str(storage), word, print)
        assert caught.value.field == "RUN"
        assert caught.value.remedy


def load_spec_text(storage: Path, past: PastRun) -> dict[str, object]:
    found: dict[str, object] = parse_yaml((storage / "runs" / past.id / "spec.yaml").read_text())
    return found


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
    result = run_pipeline(load_spec(project(folder, folder / "store"), overrides))
    result.raise_for_error()
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
    done = run(folder, "tracking.enabled=true", force=["evaluate"])
    assert ran(done) == {"evaluate"}
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
    started = replace(both, stages={"prepare-data": "1", "train": "2"})
    assert find_still_forced(started, Plan.of(spec)) == []


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

    monkeypatch.setattr(_pipeline, "own_flow_run", retried)
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
    _manifests._verified.clear()


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
    _manifests._verified.clear()
    assert ran(run(folder, *TRAINING)) == {"train"}


def test_a_ledger_that_cannot_be_read_is_named_and_the_stage_goes_on(folder: Path, train: Path) -> None:
    (train / COMMIT).unlink()
    (train / "attempts" / "0001.end.json").write_text("{torn")  # tests/unit/tasks/test_retry.py has other contents
    warnings: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            warnings.append(event["message"])

    with progress.subscribe(listen):
        result = run(folder, *TRAINING)
    result.raise_for_error()
    [told] = [warning for warning in warnings if "earlier attempts" in warning]
    assert f"0001.end.json in {train / 'attempts'}" in told


@pytest.mark.parametrize("name", ["attempts", "checkpoints"])
def test_a_file_in_the_place_of_a_folder_is_named(folder: Path, train: Path, name: str) -> None:
    (train / COMMIT).unlink()
    shutil.rmtree(train / name)
    (train / name).write_text("in the way")
    error = failed(folder, "train.retries=0")
    assert str(train / name) in str(error.field)
    assert "A file stands where a folder is needed" in error.message
    assert "move that file away" in str(error.remedy)
