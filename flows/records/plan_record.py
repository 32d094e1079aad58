"""The plan of a run next to what came of it.

    <storage>/runs/<id>/plan.json      what `trainflow plan` promised of train: {"format": 1, "seconds": …, "steps": …}

What came of it is in the run's record and in the result of train.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trainer_lib.base.durations import describe_bytes, describe_seconds
from trainer_lib.base.json_text import parse_record
from trainer_lib.errors import StorageError
from trainer_lib.storage import Store
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.manifest import StageManifest, look_up_in

FILE = "plan.json"
HEAD = ("train", "planned", "came", "difference")
_BYTES = 1 << 20
_WORDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "seconds": ("time", describe_seconds),
    "peak_bytes": ("peak memory", describe_bytes),
    "steps": ("steps", "{:,}".format),
    "samples": ("samples", "{:,}".format),
    "checkpoint_bytes": ("checkpoint", describe_bytes),
}
"""Quantity -> its name and form for people."""


def write_plan(folder: Store, planned: Mapping[str, float | None]) -> None:
    """Keep what was planned in a run's folder. Raises StorageError."""
    folder.replace(FILE, json.dumps({"format": 1, **planned}).encode())


def compare_with_plan(folder: Store, storage: str, outcome: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of quantity, planned, actual and difference; none of a run that was not planned, or did not train.

    Args:
        outcome: of train, as in the run's record.
    """
    key = outcome.get("key")
    if outcome.get("status") != "ran" or not isinstance(key, str):
        return []
    try:
        planned = parse_record(folder.read_if_exists(FILE, limit=_BYTES))
        manifest = look_up_in(storage, "train", key) if planned else None
        if manifest is None or not isinstance(manifest.facts, TrainFacts):
            return []
        actual = _actual_of(manifest, manifest.facts, outcome.get("seconds"))
    except StorageError:
        return []
    pairs = {name: (planned.get(name), actual[name]) for name in _WORDS}
    return [
        {"quantity": name, "planned": one, "actual": other, "difference": other / one - 1}
        for name, (one, other) in pairs.items()
        if isinstance(one, int | float) and one and other is not None
    ]


def comparison_cells(compared: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of `compare_with_plan` for people, below `HEAD`."""
    cells: list[tuple[str, ...]] = []
    for row in compared:
        what, form = _WORDS[row["quantity"]]
        cells.append((what, form(row["planned"]), form(row["actual"]), f"{row['difference']:+.1%}"))
    return cells


def _actual_of(manifest: StageManifest, facts: TrainFacts, seconds: float | None) -> dict[str, float | None]:
    size = None
    if facts.checkpoints:
        size = sum(file.size for file in manifest.store().child("checkpoints", facts.checkpoints[0]).list())
    return {
        "seconds": None if facts.resumed_from is not None else seconds,  # only a part of it was timed
        "peak_bytes": facts.peak_bytes,
        "steps": facts.global_step,
        "samples": facts.global_samples,
        "checkpoint_bytes": size or None,
    }
