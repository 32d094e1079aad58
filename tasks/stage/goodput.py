"""Goodput: the share of a stage's time in which it made progress that was kept.

    trained     in optimizer steps whose work is in the result or in a checkpoint that a later attempt continued
    evaluated   in evaluations while training
    saved       waiting for checkpoints
    restored    reading a checkpoint and finding the position again
    lost        trained after the last save of an attempt that failed, and so trained again
    other       starting processes, loading, building the model, exporting, waiting between attempts

The goodput is *trained / all*. Source: Google Cloud, "Goodput: a metric to measure ML system efficiency" (2024), whose
program goodput this is: productive time over the time for which the resources were held.

Each attempt's worker reports what it has spent so far with its progress, and the stage keeps the newest report, and the
one of its newest save, in the record of the attempt's end. An attempt whose command was killed has no such record: its
time is not known and not counted; nor is the time for which an attempt waited for its devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainer_lib.base.durations import describe_seconds

KINDS = ("trained", "evaluated", "saved", "restored")  # a worker's report, in seconds since it began


@dataclass(frozen=True)
class Goodput:
    """Seconds of a stage, over all of its attempts that are recorded."""

    trained_s: float = 0.0
    evaluated_s: float = 0.0
    saved_s: float = 0.0
    restored_s: float = 0.0
    lost_s: float = 0.0
    all_s: float = 0.0
    unknown: int = 0

    @classmethod
    def of(cls, attempts: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Goodput:
        """Add up attempts, each as (record of its start, record of its end, which is empty without one).

        Of the newest attempt that failed, what was trained since its last save is lost; the next attempt, or the next
        command, trains it again.
        """
        sums = dict.fromkeys((*KINDS, "lost", "all"), 0.0)
        unknown = 0
        for start, end in attempts:
            if not end.get("ended") or not start.get("started"):
                unknown += 1
                continue
            spent = _numbers(end.get("spent"))
            for kind in KINDS:
                sums[kind] += spent.get(kind, 0.0)
            # While it waited for devices it held none.
            began, ended = (datetime.fromisoformat(str(time)) for time in (start["started"], end["ended"]))
            sums["all"] += max((ended - began).total_seconds() - float(end.get("waited") or 0.0), sum(spent.values()))
            if end.get("outcome") != "committed":
                kept = _numbers(end.get("kept")).get("trained", 0.0)
                lost = max(0.0, spent.get("trained", 0.0) - kept)
                sums["lost"] += lost
                sums["trained"] -= lost
        return cls(**{f"{name}_s": value for name, value in sums.items()}, unknown=unknown)

    @property
    def share(self) -> float | None:
        """Trained over all, from 0 to 1; None before an attempt has ended."""
        return self.trained_s / self.all_s if self.all_s > 0 else None

    @property
    def other_s(self) -> float:
        """The remaining time: start-up, waiting and what else is not counted above."""
        known = self.trained_s + self.evaluated_s + self.saved_s + self.restored_s + self.lost_s
        return max(0.0, self.all_s - known)

    def metrics(self) -> dict[str, float]:
        """The figures as metrics for MLflow; none before an attempt has ended."""
        if self.share is None:
            return {}
        seconds = {name: getattr(self, f"{name}_s") for name in (*KINDS, "lost", "other")}
        return {"goodput": self.share, **{f"time_{name}_s": value for name, value in seconds.items()}}

    def rows(self) -> list[tuple[str, str]]:
        """The figures in words; none before an attempt has ended."""
        if self.share is None:
            return []
        rows = [("goodput", f"{self.share:.1%} of {describe_seconds(self.all_s)}")]
        rows += [(name, describe_seconds(getattr(self, f"{name}_s"))) for name in (*KINDS, "lost", "other")]
        if self.unknown:
            rows.append(("not recorded", f"{self.unknown} attempt{'s' if self.unknown > 1 else ''} without an end"))
        return rows


def _numbers(record: Any) -> dict[str, float]:
    return {name: float(record[name]) for name in KINDS if name in record} if isinstance(record, Mapping) else {}
