"""The cost of a launch: one worker that does nothing, one that waited for its launch, and two.

    python -m benchmarks.launch --size full --save

Each launch is whole, from the call to its result, and its recipe imports torch. The ways alternate with
``python -c "import torch"``, and everything is reported as a multiple of that as well. Processor seconds count every
process of a launch; a worker that waits has spent most of them before.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks._result import arguments, publish, spread
from trainer_lib.launch import warm
from trainer_lib.launch.base import launch
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.requests import PrepareRequest, RecipeFile

SIZES = {"smallest": 1, "full": 9}  # rounds, after one that warms the file cache
WAIT_S = 10.0
RECIPE = """
import torch

def prepare(options, out):
    return {"train": [{"x": 1}]}

def build_model(options, data):
    raise NotImplementedError
"""


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, tuple(SIZES))
    publish("launch", options.size, measure(SIZES[options.size]), options.save)


def measure(rounds: int) -> dict[str, Any]:
    """Time alternating launches."""
    ways: dict[str, Callable[[], object]] = {"import torch": import_torch}
    ways |= {str(processes): functools.partial(start, processes) for processes in (1, 2)}
    ways["waited"] = functools.partial(start, 1)
    taken: dict[str, dict[str, list[float]]] = {name: {"wall_s": [], "cpu_s": []} for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            if name == "waited":
                warm.expect([("prepare", config(1))])
                time.sleep(WAIT_S)
            wall, cpu = time.perf_counter(), cpu_seconds()
            way()
            if number:
                taken[name]["wall_s"].append(time.perf_counter() - wall)
                taken[name]["cpu_s"].append(cpu_seconds() - cpu)
    quietest = {name: {unit: min(values) for unit, values in each.items()} for name, each in taken.items()}
    one = quietest["import torch"]
    return {
        "quietest": quietest,
        "times_import_torch": {
            name: {unit: round(value / one[unit], 3) for unit, value in each.items()} for name, each in quietest.items()
        },
        "spread": {name: {unit: spread(values) for unit, values in each.items()} for name, each in taken.items()},
    }


def import_torch() -> None:
    """Import torch in a new interpreter."""
    subprocess.run([sys.executable, "-c", "import torch"], check=True)


def config(processes: int) -> LaunchConfig:
    """Return the settings of a launch."""
    return LaunchConfig(kind="process" if processes == 1 else "torchrun", processes=processes, threads=1)


def start(processes: int) -> None:
    """Launch workers that prepare one row."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.py")
        recipe.write_text(RECIPE, encoding="utf-8")
        asked = PrepareRequest(output=str(Path(folder, "out")), recipe=RecipeFile(str(recipe), folder))
        launch(asked, config(processes), env={}, on_line=lambda line: None, on_event=lambda event: None)


def cpu_seconds() -> float:
    """Processor seconds of everything that this process has started: ended children, and living ones with theirs."""
    ended = os.times()
    living = [each.cpu_times() for each in psutil.Process().children()]
    own = ended.children_user + ended.children_system
    return own + sum(each.user + each.system + each.children_user + each.children_system for each in living)


if __name__ == "__main__":
    main()
