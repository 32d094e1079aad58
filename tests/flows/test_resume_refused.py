"""A resume that cannot be says what is there and what to do, and leaves it as it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.spec.spec import load_spec
from tasks.stage import manifest as _manifests
from tasks.stage import progress
from tests.support.runs import IN_PROCESS, ran, run
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.commit import COMMIT
from trainer_lib.errors import NewerVersionError, TrainflowError
from trainer_lib.storage import Store

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


@pytest.mark.parametrize("content", ["{torn", "[]", "x" * (2 << 20)])
def test_a_ledger_that_cannot_be_read_is_named_and_the_stage_goes_on(folder: Path, train: Path, content: str) -> None:
    (train / COMMIT).unlink()
    (train / "attempts" / "0001.end.json").write_text(content)
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


def test_an_mlflow_run_that_was_deleted_is_made_again(folder: Path) -> None:
    from mlflow import MlflowClient

    from flows.pipeline import run_pipeline

    spec = load_spec(folder / "pipeline.yaml", (*IN_PROCESS, "tracking.enabled=true"))
    first = run_pipeline(spec)
    client = MlflowClient(first.tracking_uri)
    client.delete_run(first.mlflow_run_id or "")
    shutil.rmtree(folder / "store" / "stages" / "predict")
    again = run_pipeline(spec)
    again.raise_for_error()
    assert ran(again) == {"predict"}
    assert again.mlflow_run_id != first.mlflow_run_id
