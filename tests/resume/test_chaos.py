"""The harness of `make chaos-pipeline`: each check notices what it is there for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import _chaos_checks as checks
from benchmarks._chaos_cases import STAGES, Moment
from benchmarks._chaos_checks import Expected
from benchmarks._chaos_scene import has_come

POINTS = frozenset({("loss", 1, 0.5), ("loss", 2, 0.25)})


def commit(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    entries = []
    for name, data in files.items():
        (folder / name).write_bytes(data)
        entries.append({"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    (folder / "COMMIT.json").write_text(json.dumps({"files": entries}))


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A storage as an undisturbed run leaves it."""
    root = tmp_path / "store"
    for stage in STAGES:
        commit(root / "stages" / stage / "key", {"result": stage.encode()})
        lease = root / "stages" / stage / "key" / "lease"
        lease.mkdir()
        (lease / "00000001.json").write_text(json.dumps({"pid": os.getpid()}))
        (lease / "00000001.released").touch()
    commit(root / "hub" / "small" / "revisions" / "00001", {"model": b"weights"})
    return root


@pytest.fixture
def expected(storage: Path) -> Expected:
    return Expected.of(storage, POINTS)


def found(storage: Path, expected: Expected) -> list[str]:
    """The names of the checks that find something."""
    problems = checks.check_results(storage, expected) + checks.check_publication(storage, expected)
    return [problem.partition(":")[0] for problem in problems + checks.check_leases(storage)]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "results": lambda root: (root / "stages" / "train" / "key" / "result").write_bytes(b"other"),
    "results missing": lambda root: (root / "stages" / "predict" / "key" / "result").unlink(),
    "results none": lambda root: shutil.rmtree(root / "stages" / "evaluate" / "key"),
    "results two": lambda root: commit(root / "stages" / "train" / "other", {"result": b"train"}),
    "publication twice": lambda root: commit(root / "hub" / "small" / "revisions" / "00002", {"model": b"weights"}),
    "publication other": lambda root: commit(root / "hub" / "small" / "revisions" / "00002", {"model": b"others"}),
    "lease": lambda root: (root / "stages" / "train" / "key" / "lease" / "00000001.released").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_storage_that_is_not_as_it_must_be_is_noticed(damage: str, storage: Path, expected: Expected) -> None:
    DAMAGES[damage](storage)
    assert found(storage, expected) == [damage.split()[0]]


@pytest.mark.parametrize(("again", "problems"), [("7 s", []), ("2 s", ["publication"])])
def test_a_training_that_ran_again_may_be_published_again(storage: Path, again: str, problems: list[str]) -> None:
    revisions = storage / "hub" / "small" / "revisions"
    shutil.rmtree(revisions / "00001")
    commit(revisions / "00001", {"model": b"weights", "README.md": b"- Training time: 2 s"})
    expected = Expected.of(storage, POINTS)
    commit(revisions / "00002", {"model": b"weights", "README.md": f"- Training time: {again}".encode()})
    assert found(storage, expected) == problems


@pytest.mark.parametrize(
    ("points", "status", "problem"),
    [
        (sorted(POINTS), "FINISHED", None),
        (sorted(POINTS), "RUNNING", "a run is RUNNING"),
        ([("loss", 1, 0.5)], "FINISHED", "1 of 2 points are missing"),
        ([*sorted(POINTS), ("loss", 2, 0.25)], "FINISHED", "1 points came more than once"),
        ([*sorted(POINTS), ("loss", 3, 0.1)], "FINISHED", "1 points have other values"),
        ([*sorted(POINTS), ("train_runtime", 2, 9.0)], "FINISHED", None),
    ],
)
def test_the_points_in_mlflow_are_compared(
    points: list[tuple[str, int, float]], status: str, problem: str | None, tmp_path: Path
) -> None:
    connection = sqlite3.connect(tmp_path / "mlflow.db")
    connection.executescript(
        "CREATE TABLE experiments (experiment_id INTEGER, name TEXT);"
        "CREATE TABLE runs (run_uuid TEXT, status TEXT, experiment_id INTEGER);"
        "CREATE TABLE metrics (run_uuid TEXT, key TEXT, step INTEGER, value REAL);"
        "INSERT INTO experiments VALUES (1, 'case-3');"
    )
    connection.execute("INSERT INTO runs VALUES ('a', ?, 1)", (status,))
    connection.executemany("INSERT INTO metrics VALUES ('a', ?, ?, ?)", points)
    connection.commit()
    connection.close()
    problems = checks.check_mlflow(tmp_path / "mlflow.db", "case-3", POINTS, whole_curve=True)
    assert (problem is None and problems == []) or (problem is not None and problem in problems[0])


def test_moments_are_seen_in_files(tmp_path: Path) -> None:
    train = tmp_path / "stages" / "train" / "key"
    (train / "attempts").mkdir(parents=True)
    assert not has_come(tmp_path, Moment("train", "begin"))
    (train / "attempts" / "0001.json").touch()
    assert has_come(tmp_path, Moment("train", "begin"))
    saving = train / "checkpoints" / "checkpoint-4"
    saving.mkdir(parents=True)
    assert has_come(tmp_path, Moment("train", "save", 4)) and not has_come(tmp_path, Moment("train", "step", 4))
    assert has_come(tmp_path, Moment("train", "step", 2))  # it has been passed
    (saving / "COMMIT.json").touch()
    assert has_come(tmp_path, Moment("train", "step", 4)) and not has_come(tmp_path, Moment("train", "step", 6))
    assert has_come(tmp_path, Moment("", "start")) and not has_come(tmp_path, Moment("", "closing"))
