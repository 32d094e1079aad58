"""`make chaos` with ten faults: real SIGKILLs, real files, and in the end the very same state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT


def test_ten_kills_cost_no_more_than_a_save_interval_and_not_a_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--count", "10", "--peer-count", "0", "--save", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("*-chaos-*.json")
    ours = json.loads(path.read_text())["ours"]
    assert ours["kills"] == 10
    assert ours["starts_that_crashed"] == 0 and ours["steps_trained_again_at_most"] <= 2
    assert ours["runs_equal_in_everything"] == ours["runs_finished"] > 0
