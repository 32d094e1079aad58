"""What workers answer: one result for each verb, and the prepared split that a result holds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer_lib.storage import FileEntry

OUTCOMES = "outcomes"
"""Folder in the result of evaluate: what the model got right and wrong, a JSON file for each split."""
STATISTICS = "statistics.json"
"""File in the result of prepare-data by sources: split -> column -> statistics (`data.statistics`)."""


@dataclass(frozen=True)
class PreparedSplit:
    """One split as prepare-data leaves it.

    Attributes:
        rows: number of rows.
        shards: paths of its Arrow files below the stage's folder, in the order of the rows.
        columns: name -> type of each column.
        lengths: rows of each file; empty: all but the last have as many as the first.
    """

    rows: int
    shards: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class PrepareResult:
    """Files written, the splits they hold, what the recipe notes for its model, and what may be wrong with the rows."""

    files: tuple[FileEntry, ...]
    splits: dict[str, PreparedSplit]
    info: dict[str, Any]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainResult:
    """A finished training.

    Attributes:
        files: those of the exported model, below `model/`.
        metrics: as the Trainer returns them.
        global_step: optimizer steps, those before a resume included.
        global_samples: training samples seen, likewise.
        world_size: processes.
        resumed_from: optimizer step that training continued from; None: it began at the start.
        checkpoints: names of the committed checkpoints, newest first.
        parameters: number of the model's parameters.
        peak_bytes: the largest memory of a process (`trainer_lib.base.memory.read_peak_bytes`).
        device: what each process trained on, as its driver names it.
        mfu: model FLOPs utilization of the last attempt, from 0 to 1; None where the device's peak is not known.
        micro_batch: samples that a process was allowed at a time; a step may have had fewer.
    """

    files: tuple[FileEntry, ...]
    metrics: dict[str, Any]
    global_step: int
    global_samples: int
    world_size: int
    resumed_from: int | None
    checkpoints: tuple[str, ...]
    parameters: int
    peak_bytes: int | None = None
    device: str | None = None
    mfu: float | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class EvaluateResult:
    """Files written, and the metrics: split -> name -> value.

    Attributes:
        needs_all_rows: why a worker that was asked for ranges has measured none, as a clause; None: it has.
    """

    files: tuple[FileEntry, ...]
    metrics: dict[str, dict[str, float]]
    needs_all_rows: str | None = None


@dataclass(frozen=True)
class CheckpointMetrics:
    """What an evaluation of a checkpoint gave, by the names that the Trainer logs (`eval_loss`), and its step."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class PredictResult:
    """What one of the workers did: Parquet files that it wrote, and rows in them; others may have written the rest."""

    parts: int
    rows: int


@dataclass(frozen=True)
class MergeResult:
    """Files written: the weights with the adapters merged in, and the configuration that loads them."""

    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class ScoreResult:
    """What one of the workers did: files that it wrote, and rows in them; others may have written the rest."""

    parts: int
    rows: int


@dataclass(frozen=True)
class CompareResult:
    """Differences between two trainings in the order of time, and what was compared (counts by name)."""

    differences: tuple[dict[str, Any], ...]
    compared: dict[str, Any]


@dataclass(frozen=True)
class FileDifference:
    """How far the numbers of two files are apart.

    Attributes:
        path: of the file, below its folder.
        values: numbers in it.
        different: how many of them differ.
        largest: the largest difference of a tensor's or a column's values, relative to its largest value.
        problem: what differs besides: names, shapes, texts; None: nothing.
    """

    path: str
    values: int = 0
    different: int = 0
    largest: float = 0.0
    problem: str | None = None


@dataclass(frozen=True)
class MeasureResult:
    """The differences of files, in the order in which they were asked for."""

    files: tuple[FileDifference, ...]


@dataclass(frozen=True)
class ImportResult:
    """An imported checkpoint.

    Attributes:
        step: optimizer step.
        url: where it is committed.
        parameters: parameters with optimizer state.
        files: number of files.
        bytes: their size.
        left_out: names in the source folder that were not imported.
        notes: sentences about what differs after resuming.
    """

    step: int
    url: str
    parameters: int
    files: int
    bytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
