"""A run's plan and its outcome, next to the run's record.

    <storage>/runs/<id>/plan.json      {"format": 1, "planned": {…}, "actual": {…}}

`trainflow plan` writes the first half, the run that follows the second. Either may be missing: a run that was not
planned, a plan that was not run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer_lib.base.durations import describe_bytes, describe_seconds
from trainer_lib.base.json_text import parse_record
from trainer_lib.errors import StorageError
from trainer_lib.storage import Store
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.manifest import StageManifest

FILE = "plan.json"
_BYTES = 1 << 20
COMPARED = {"seconds": "s", "peak_bytes": "bytes", "steps": "", "samples": "", "checkpoint_bytes": "bytes"}
"""Compared quantity of a stage -> its unit."""


@dataclass(frozen=True)
class Comparison:
    """One number of one stage, as planned and as it came.

    Attributes:
        quantity: a name in `COMPARED`.
        unit: "s", "bytes" or "" for a count.
        planned, actual: None where it is not known.
    """

    stage: str
    quantity: str
    unit: str
    planned: float | None
    actual: float | None

    @property
    def difference(self) -> float | None:
        """Actual over planned, minus one; None if a number is not known."""
        if self.planned is None or self.actual is None or not self.planned:
            return None
        return self.actual / self.planned - 1

    def in_words(self) -> dict[str, str]:
        """The cells of a table: stage, what, planned, actual, difference."""
        what = {"seconds": "time", "peak_bytes": "peak memory", "checkpoint_bytes": "checkpoint"}.get(self.quantity)
        return {
            "stage": self.stage,
            "what": what or self.quantity,
            "planned": self._shown(self.planned),
            "actual": self._shown(self.actual),
            "difference": "" if self.difference is None else f"{self.difference:+.1%}",
        }

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "difference": self.difference}

    def _shown(self, value: float | None) -> str:
        if value is None:
            return ""
        if self.unit == "s":
            return describe_seconds(value)
        return describe_bytes(int(value)) if self.unit == "bytes" else f"{value:,.0f}"


def read_plan_record(folder: Store) -> dict[str, Any]:
    """The record in a run's folder; empty where there is none, or one that cannot be read."""
    try:
        record = parse_record(folder.read_if_exists(FILE, limit=_BYTES))
    except StorageError:
        return {}
    return record if record.get("format") == 1 else {}


def compare(record: Mapping[str, Any]) -> list[Comparison]:
    """Plan and outcome side by side; empty unless there are both."""
    planned, actual = (_stages(record.get(half)) for half in ("planned", "actual"))
    return [
        Comparison(stage, name, unit, planned[stage].get(name), actual[stage].get(name))
        for stage in planned
        if stage in actual
        for name, unit in COMPARED.items()
        if planned[stage].get(name) is not None and actual[stage].get(name) is not None
    ]


def write_half(folder: Store, half: str, content: Mapping[str, Any]) -> None:
    """Write one half of the record, "planned" or "actual", and keep the other.

    Raises:
        StorageError: it cannot be written.
    """
    record = {"format": 1, **read_plan_record(folder), half: dict(content)}
    folder.replace(FILE, json.dumps(record, indent=1).encode())


def actual_of(manifest: StageManifest, seconds: float) -> dict[str, Any]:
    """The outcome of a stage that ran `seconds`."""
    facts, found = manifest.facts, dict[str, Any](seconds=seconds)
    if isinstance(facts, TrainFacts):
        found |= {
            "peak_bytes": facts.peak_bytes,
            "steps": facts.global_step,
            "samples": facts.global_samples,
            "processes": facts.world_size,
            "checkpoint_bytes": _newest_checkpoint_bytes(manifest, facts),
            # Only a part of the training was timed.
            **({"seconds": None, "resumed_from": facts.resumed_from} if facts.resumed_from is not None else {}),
        }
    return found


def _newest_checkpoint_bytes(manifest: StageManifest, facts: TrainFacts) -> int | None:
    if not facts.checkpoints:
        return None
    try:
        folder = manifest.store().child("checkpoints", facts.checkpoints[0])
        return sum(file.size for file in folder.list())
    except StorageError:
        return None


def _stages(half: object) -> dict[str, Mapping[str, Any]]:
    stages = half.get("stages") if isinstance(half, Mapping) else None
    return {str(name): stage for name, stage in (stages or {}).items() if isinstance(stage, Mapping)}
