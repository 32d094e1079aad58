"""The report of a sweep: a single HTML file that loads nothing, with every trial and the pictures of the study."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainflow.flows.records.sizes import describe_seconds
from trainflow.flows.reports.charts import number_text
from trainflow.flows.reports.report import load_template
from trainflow.flows.sweeps.sweep_result import SweepResult

SWEEP_REPORT = "report.html"
_PAGE = Path(__file__).parent / "sweep.html.j2"


def render_sweep(result: SweepResult, pictures: Sequence[tuple[str, bytes]]) -> str:
    """The report as HTML text.

    Args:
        pictures: title and SVG file of each.
    """
    axes = list(dict.fromkeys(name for trial in result.trials for name in trial.values))
    return load_template(_PAGE).render(
        result=result,
        axes=axes,
        rows=[_row(result, axes, trial.number) for trial in result.trials],
        counts=count_words(result),
        saved=None if result.saved_share is None else f"{100 * result.saved_share:.0f} %",
        pictures=[
            (title, f"data:image/svg+xml;base64,{base64.b64encode(image).decode()}") for title, image in pictures
        ],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def count_words(result: SweepResult) -> str:
    """``20 trials: 12 complete, 8 pruned``; with how many there are to be, while they are fewer."""
    states = ("complete", "pruned", "failed", "running", "waiting")
    parts = [f"{count} {state}" for state in states if (count := result.count(state))]
    there = len(result.trials)
    of = "" if there == result.wanted else f" of {result.wanted}"
    return f"{there}{of} trial{'' if there == 1 and not of else 's'}" + (f": {', '.join(parts)}" if parts else "")


def value_text(value: Any) -> str:
    """A value of a trial, for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _row(result: SweepResult, axes: Sequence[str], number: int) -> dict[str, Any]:
    trial = result.trial(number)
    steps, most = trial.notes.get("steps"), trial.notes.get("max_steps")
    seconds = trial.notes.get("seconds")
    return {
        "number": number,
        "state": trial.state,
        "is_best": number in result.best,
        "objective": [number_text(value) for value in trial.objective or [None] * len(result.objective)],
        "values": [value_text(trial.values[name]) if name in trial.values else "" for name in axes],
        "steps": "" if steps is None else f"{steps}/{most}" if most not in (None, steps) else str(steps),
        "time": "" if seconds is None else describe_seconds(float(seconds)),
        "run": trial.notes.get("run_name") or trial.notes.get("run") or "",
        "link": f"../../runs/{trial.notes['run']}/report.html" if trial.notes.get("run") else None,
        "reason": trial.notes.get("reason") or "",
    }
