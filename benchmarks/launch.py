"""What a launch costs: one and two workers that do nothing, started as interpreters and forked from a warm parent.

    python -m benchmarks.launch --size full --save

Each launch is whole, from the call to its result, and its recipe imports torch. The two ways alternate with
``python -c "import torch"``, and everything is reported as a multiple of that as well. Processor seconds count every
process of a launch; those of a parent's start are reported by themselves. Wanted: a forked launch of two workers at
most 0.5 times an import of torch, in wall and processor seconds.
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
from trainer_lib.launch import LaunchConfig, launch, warm
from trainer_lib.launch.warm import SWITCH
from trainer_lib.protocol.requests import PrepareRequest, RecipeFile

SIZES = {"smallest": 1, "full": 9}  # rounds, after one that warms the file cache
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
    for processes in (1, 2):
        ways[f"started, {processes}"] = functools.partial(start, processes, "0")
        ways[f"forked, {processes}"] = functools.partial(start, processes, "1")
    taken: dict[str, dict[str, list[float]]] = {name: {"wall_s": [], "cpu_s": []} for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
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
        "parent": start_parent(),
    }


def import_torch() -> None:
    """Import torch in a new interpreter."""
    subprocess.run([sys.executable, "-c", "import torch"], check=True)


def start(processes: int, way: str) -> None:
    """Launch workers that prepare one row. `way` is the value of the switch: "0" starts them, "1" forks them."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.py")
        recipe.write_text(RECIPE, encoding="utf-8")
        config = LaunchConfig(kind="process" if processes == 1 else "torchrun", processes=processes, threads=1)
        asked = PrepareRequest(output=str(Path(folder, "out")), recipe=RecipeFile(str(recipe), folder))
        launch(asked, config, env={SWITCH: way}, on_line=lambda line: None, on_event=lambda event: None)


def start_parent() -> dict[str, float]:
    """Start a new warm parent; return its processor seconds until it can fork, and the MB that it alone holds."""
    warm.close()
    before = cpu_seconds()
    start(2, "1")
    [parent] = [each for each in psutil.Process().children() if "warm_parent" in " ".join(each.cmdline()[:5])]
    found = {"first_launch_cpu_s": cpu_seconds() - before, "private_mb": parent.memory_full_info().uss / 1e6}
    warm.close()
    return found


def cpu_seconds() -> float:
    """Processor seconds of everything that this process has started: ended children, and living ones with theirs."""
    ended = os.times()
    living = [each.cpu_times() for each in psutil.Process().children()]
    own = ended.children_user + ended.children_system
    return own + sum(each.user + each.system + each.children_user + each.children_system for each in living)


if __name__ == "__main__":
    main()
