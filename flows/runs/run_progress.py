"""How far the stages of a run are, and when they are likely to end.

The stage at work says so itself; for those that follow, the time that they took in the newest run of the pipeline that
recorded it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trainflow.flows.records.past_runs import PastRun
from trainflow.flows.runs.run_status import RunStatus


@dataclass(frozen=True)
class StageProgress:
    """One stage of a run.

    Attributes:
        state: ran, cached, failed, skipped, running or waiting.
        seconds: how long it took, or has been running; None: not known.
        share: how much of it is done, from 0 to 1; None: not known.
        eta_s: seconds until it ends; of a waiting stage how long it will take; None: not known.
        text: where it is.
    """

    stage: str
    state: str
    seconds: float | None = None
    share: float | None = None
    eta_s: float | None = None
    text: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return dict(vars(self))


def describe_progress(status: RunStatus, runs: Sequence[PastRun]) -> list[StageProgress]:
    """The stages of a run that is at work, in their order.

    Args:
        runs: every recorded run, the newest first.
    """
    run, sign = status.run, status.sign
    before = _earlier_seconds(run, runs)
    outcomes = run.record.get("outcomes") or {}
    found = []
    for name in run.record.get("planned") or sorted(run.stages):
        if sign is not None and name == sign.stage and name not in run.stages:
            seconds = _since(sign.since)
            guess = before.get(name)
            left = sign.eta_s if sign.eta_s is not None else None if guess is None else max(guess - (seconds or 0), 0.0)
            found.append(StageProgress(name, "running", seconds, sign.share, left, sign.progress))
        elif name in run.stages:
            outcome = outcomes.get(name) or {}
            found.append(StageProgress(name, str(outcome.get("status") or "done"), outcome.get("seconds"), 1.0))
        else:
            found.append(StageProgress(name, "waiting", eta_s=before.get(name)))
    return found


def estimate_rest(stages: Sequence[StageProgress]) -> float | None:
    """Seconds until the run ends; None where a stage gives no estimate."""
    open_ones = [each.eta_s for each in stages if each.state in ("running", "waiting")]
    known = [eta_s for eta_s in open_ones if eta_s is not None]
    return sum(known) if open_ones and len(known) == len(open_ones) else None


def _earlier_seconds(run: PastRun, runs: Sequence[PastRun]) -> dict[str, float]:
    """Stage -> how long it took in the newest run of the pipeline that ran it."""
    found: dict[str, float] = {}
    for other in runs:
        outcomes = other.record.get("outcomes") if other.name == run.name else None
        for name, outcome in (outcomes or {}).items():
            if isinstance(outcome, dict) and outcome.get("status") == "ran":
                found.setdefault(name, float(outcome.get("seconds") or 0.0))
    return found


def _since(text: str | None) -> float | None:
    try:
        return max((datetime.now(UTC) - datetime.fromisoformat(text or "")).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None
