"""Answers of workers that a command asks by itself, beside the stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MeasureRowsResult:
    """Metrics of a model on labelled rows.

    Attributes:
        rows: number of rows.
        digest: SHA-256 of the labels and what was read beside them: two results of one digest are of the same rows.
        metrics: name -> value, and `<name>_low` and `<name>_high`.
        resampled: name -> its value on each resample, the same resamples for every model.
        outcomes: as `summarize_outcomes` has them, with inputs; None where they were not asked for, or of another kind.
    """

    rows: int
    digest: str
    metrics: dict[str, float]
    resampled: dict[str, tuple[float, ...]]
    outcomes: dict[str, Any] | None = None


@dataclass(frozen=True)
class ExportResult:
    """Files of an exported model, and the greatest difference of its outputs of some rows, relative to the largest."""

    files: tuple[str, ...]
    rows: int
    apart: float


@dataclass(frozen=True)
class CompareResult:
    """Differences between two trainings in the order of time, and what was compared (counts by name)."""

    differences: tuple[dict[str, Any], ...]
    compared: dict[str, Any]


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
