"""How many calls an optimizer step makes: a number that does not depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.step_overhead import MOST_CALLS
from tests.support.repository import ROOT

# In a process of its own: once any model was compiled, torch wraps the optimizers of a process in calls of its own.
SCRIPT = """
import json
from benchmarks.step_overhead import by_trainer, count_calls
print(json.dumps([count_calls(by_trainer, 1) for _ in range(2)]))
"""


def test_a_step_makes_few_calls_and_the_same_number_on_every_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first["all"] <= MOST_CALLS
    assert second == first
