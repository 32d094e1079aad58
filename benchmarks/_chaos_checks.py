"""Checks after a case of `benchmarks.chaos_pipeline`: each check reads files, databases and processes."""

from __future__ import annotations

import collections
import hashlib
import json
import re
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._chaos_cases import STAGES

Point = tuple[str, int, float]
# Speeds differ between any two runs, and so does the load of the machine.
_SPEEDS = ("_runtime", "_per_second")
_LOAD = "system/"
# So does where the time went; that it was logged, and once, is compared all the same.
_SHARES = re.compile(r"(?:^|/)(?:goodput|mfu|time_\w+_s)$")
# They name the MLflow run, and hold the digest of a card that says how long the training took.
_OF_ONE_RUN = {"lineage.json"}


@dataclass(frozen=True)
class Expected:
    """The results of an undisturbed run.

    Attributes:
        results: stage/folder -> path -> SHA-256 of every file of the result.
        publication: the same of the published revision.
        points: (key, step, value) of every metric in MLflow that is not a speed; where the time went has the value 0.
    """

    results: Mapping[str, Mapping[str, str]]
    publication: Mapping[str, str]
    points: frozenset[Point]

    @classmethod
    def of(cls, storage: Path, points: Iterable[Point]) -> Expected:
        """Read them from the storage of the undisturbed run."""
        results = {f"{stage}/{name}": files for stage in STAGES for name, files in _committed(storage, stage).items()}
        [publication] = _published(storage).values()
        return cls(results, publication, frozenset(points))


# -- the storage -------------------------------------------------------------------------------------------------------


def check_results(storage: Path, expected: Expected) -> list[str]:
    """Every stage has one committed result, under the expected key and with the expected bytes."""
    problems = []
    for stage in STAGES:
        wanted = {name: files for name, files in expected.results.items() if name.startswith(f"{stage}/")}
        found = {f"{stage}/{name}": files for name, files in _committed(storage, stage).items()}
        if set(found) != set(wanted):
            problems.append(f"results: {stage} is committed as {sorted(found)}, not as {sorted(wanted)}")
            continue
        for name, files in found.items():
            different = sorted(path for path in {*files, *wanted[name]} if files.get(path) != wanted[name].get(path))
            if different:
                problems.append(f"results: {name} differs in {', '.join(different[:3])}")
    return problems


def check_publication(storage: Path, expected: Expected) -> list[str]:
    """One intact revision is published, with the expected bytes; or one for each training, if it ran again."""
    found = _published(storage)
    intact = [name for name, files in found.items() if files == expected.publication]
    others = [set(files.values()) for name, files in found.items() if name not in intact]
    # Their cards differ then: each tells how long its training took.
    trainings = {card.read_text() for name in intact for card in storage.glob(f"hub/*/revisions/{name}/README.md")}
    harmless = len(found) == 1 or all(values & {"missing", "damaged"} for values in others)
    if harmless and len(intact) == max(1, len(trainings)):
        return []
    return [f"publication: {len(found)} revisions, {len(intact)} of them as expected"]


def check_leases(storage: Path) -> list[str]:
    """No lease is held: the newest of each folder is released, or its process is gone."""
    problems = []
    for folder in storage.glob("**/lease"):
        newest = max((path.stem for path in folder.glob("*.json")), default=None)
        if newest is None or (folder / f"{newest}.released").exists():
            continue
        try:
            holder = json.loads((folder / f"{newest}.json").read_bytes())
            alive = Path(f"/proc/{int(holder['pid'])}").exists()
        except (ValueError, KeyError, TypeError):
            continue  # a damaged one holds nothing
        if alive:
            problems.append(f"lease: {folder.relative_to(storage)} is held by the living process {holder['pid']}")
    return problems


def check_spool(folders: Iterable[Path]) -> list[str]:
    """No point waits in a spool."""
    left = [path for folder in folders for path in folder.glob("*-*") if path.is_dir()]
    return [f"MLflow: {len(left)} sessions wait in the spool, {left[0].name} first"] if left else []


def _committed(storage: Path, stage: str) -> dict[str, dict[str, str]]:
    """Folder -> path -> SHA-256 of the bytes that are there, for every committed folder of a stage."""
    return {commit.parent.name: _digests(commit) for commit in (storage / "stages" / stage).glob("*/COMMIT.json")}


def _published(storage: Path) -> dict[str, dict[str, str]]:
    return {commit.parent.name: _digests(commit) for commit in storage.glob("hub/*/revisions/*/COMMIT.json")}


def _digests(commit: Path) -> dict[str, str]:
    try:
        entries = {entry["path"]: entry["sha256"] for entry in json.loads(commit.read_bytes())["files"]}
    except (ValueError, KeyError, TypeError):
        return {"COMMIT.json": "damaged"}
    return {path: _digest(commit.parent / path, sha256) for path, sha256 in entries.items()}


def _digest(path: Path, committed: str) -> str:
    if not path.is_file():
        return "missing"
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != committed:
        return "damaged"
    if path.name in _OF_ONE_RUN:
        return "intact"
    if path.name == "README.md":  # how long the training took, and the digests of what says so, are its own
        lines = [line for line in path.read_text().splitlines() if not line.startswith("- Training time:")]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return found


# -- MLflow ------------------------------------------------------------------------------------------------------------


def read_points(database: Path, experiment: str) -> dict[str, tuple[str, list[Point]]]:
    """Return run id -> (status, points) of every run of an experiment, as `Expected.points`."""
    query = "SELECT run_uuid, status FROM runs JOIN experiments USING (experiment_id) WHERE experiments.name = ?"
    found = {}
    for run, status in _ask(database, query, experiment):
        rows = _ask(database, "SELECT key, step, value FROM metrics WHERE run_uuid = ?", run)
        points = [
            (key, int(step), 0.0 if _SHARES.search(key) else float(value))
            for key, step, value in rows
            if not key.endswith(_SPEEDS) and not key.startswith(_LOAD)
        ]
        found[run] = (status, points)
    return found


def check_mlflow(database: Path, experiment: str, expected: frozenset[Point], *, whole_curve: bool) -> list[str]:
    """One FINISHED run, whose points are the expected ones, each once: all of them (`whole_curve`), or some."""
    runs = read_points(database, experiment)
    if not runs:
        return ["MLflow: there is no run"] if whole_curve else []
    problems = [f"MLflow: {len(runs)} runs"] if len(runs) > 1 else []
    for status, points in runs.values():
        if status != "FINISHED":
            problems.append(f"MLflow: a run is {status}")
        counts = collections.Counter((key, step) for key, step, _ in points)
        for wrong, what in (
            (sorted(point for point, count in counts.items() if count > 1), "points came more than once"),
            (sorted(set(points) - expected), "points have other values"),
            (sorted(expected - set(points)) if whole_curve else [], f"of {len(expected)} points are missing"),
        ):
            if wrong:
                problems.append(f"MLflow: {len(wrong)} {what}, {wrong[0]} first")
    return problems


def check_registry(database: Path, name: str, *, whole: bool) -> list[str]:
    """The model has one version, which is the champion; if it need not be there (`whole`), there may be none."""
    versions = [version for (version,) in _ask(database, "SELECT version FROM model_versions WHERE name = ?", name)]
    query = "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = 'champion'"
    champions = [int(version) for (version,) in _ask(database, query, name)]
    if (len(versions) == 1 and champions == versions) or not (versions or whole):
        return []
    return [f"MLflow: the champion is {champions}, the versions are {versions}"]


# -- Prefect -----------------------------------------------------------------------------------------------------------


def check_prefect(home: Path, folder: Path, *, has_worked: bool) -> list[str]:
    """Every flow run that a command of this folder made has ended.

    Args:
        has_worked: whether a command had something to do; one that only looks makes no flow run.
    """
    query = "SELECT state_type FROM flow_run WHERE parameters LIKE ?"
    states = [state for (state,) in _ask(home / "prefect.db", query, f"%{folder}/%")]
    open_ones = [state for state in states if state not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")]
    if open_ones:
        return [f"Prefect: {len(open_ones)} of {len(states)} flow runs stay {open_ones[0]}"]
    return [] if states or not has_worked else ["Prefect: there is no flow run"]


def _ask(database: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60)
    try:
        return list(connection.execute(query, values))
    finally:
        connection.close()
