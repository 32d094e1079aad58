"""What a sweep says while it is at work."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.cli import sweep
from tasks.sweep_settings import SweepSettings


def test_how_long_the_other_trials_will_take_is_told_once_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("flows.cli.sweep.time.monotonic", lambda: now[0])
    settings = SweepSettings.model_validate(
        {"space": {"train.args.seed": [0, 1, 2]}, "objective": "eval_loss", "direction": "minimize", "trials": 20}
    )
    display = sweep.SweepDisplay(Console(file=io.StringIO()), settings, quiet=True)
    display({"event": "planned", "missing": 3})  # 17 had ended when the command began
    display({"event": "began", "trial": 17, "values": {"train.args.seed": 0}})
    assert "left" not in display.work()
    now[0] += 90
    display({"event": "ended", "trial": 17, "state": "complete", "objective": [0.5]})
    display({"event": "began", "trial": 18, "values": {"train.args.seed": 1}})
    assert display.work() == "1 ended in 1 min 30 s, 3 min 00 s left; trial 18 begins"
    for trial in (18, 19):
        display({"event": "ended", "trial": trial, "state": "pruned", "reason": "worse than others"})
    assert "left" not in display.work()
