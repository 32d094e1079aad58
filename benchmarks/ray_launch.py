"""Ray next to torchrun: the cost of a launch and a step, and the time lost with a machine.

    python -m benchmarks.ray_launch --size full --save        (needs the extra `ray`)

The cluster is a real one of two raylets on this machine, up before anything is timed. Both ways start their workers
as interpreters. Start: from the call of a launch of two processes to their first training step. Step: the time between
two steps of a model that computes next to nothing. Loss: from SIGKILL of a raylet with all that it runs, after which a
new one is added, or of a worker of torchrun, to the first step of the next workers. Wanted: at most 5 s more for a
start, and nothing more for a step.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._result import arguments, publish, spread
from tests.support import tiny
from tests.support.engine_launch import Launch
from tests.support.ray_cluster import VARIABLES, RayCluster
from tests.support.repository import ROOT
from trainer_lib.errors import MissingExtraError
from trainer_lib.protocol.requests import PreparedData

SIZES = {"smallest": (1, 60), "full": (5, 400)}  # rounds, steps
RECIPE = (
    tiny.RECIPE
    + """

def callbacks(options):
    from trainer_lib import TrainerCallback

    class Times(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.is_world_process_zero:
                with open(options["log"], "a") as log:
                    log.write(f"{os.getpid()} {time.time()}\\n")

    return [Times()]
"""
)


class Step(NamedTuple):
    """The end of a step: by which process, and when."""

    pid: int
    at: float


def read_steps(log: Path) -> list[Step]:
    """Return the steps so far."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [Step(int(pid), float(at)) for pid, at in (line.split() for line in lines if line.count(" ") == 1)]


def wait_for_steps(log: Path, started: Launch, count: int, *, not_by: int = 0) -> list[Step]:
    """Wait for steps of other processes than one."""
    while len(found := [step for step in read_steps(log) if step.pid != not_by]) < count:
        if started.has_ended:
            started.join()
            raise AssertionError("The training ended early.")
        time.sleep(0.005)
    return found


class Trainings:
    """Trainings of one recipe, by torchrun or on the cluster."""

    def __init__(self, folder: Path, cluster: RayCluster) -> None:
        self._folder = folder
        self._cluster = cluster
        self._data: PreparedData = tiny.prepared(folder / "prepared")
        self._number = 0
        self._machines = [0, 1]

    def start(self, way: str, steps: int, **env: str) -> tuple[Launch, Path]:
        """Start a training of two processes; return it with the log of its steps."""
        self._number += 1
        folder = self._folder / str(self._number)
        asked = tiny.train_request(folder, self._data, str(folder / "train"), max_steps=steps, save_steps=10)
        (folder / "recipe.py").write_text(RECIPE)
        log = folder / "steps.txt"
        asked.options["log"] = str(log)
        on_ray = {"engine": "ray", "address": self._cluster.address, "nodes": 2, "join_timeout_s": 120.0}
        config: dict[str, Any] = on_ray if way == "ray" else {"kind": "torchrun", "processes": 2}
        return Launch(asked, env, threads=1, max_restarts=1, **{"processes": 1, **config}), log

    def whole(self, way: str, steps: int) -> tuple[float, float]:
        """Train; return the seconds to the first step, and those of a step."""
        began = time.time()
        started, log = self.start(way, steps)
        first = wait_for_steps(log, started, 1)[0].at - began
        started.join(300)
        times = [step.at for step in read_steps(log)]
        return first, statistics.median(b - a for a, b in itertools.pairwise(times[5:]))

    def lost(self, way: str) -> float:
        """Kill half of a training; return the seconds to the first step of the next workers."""
        started, log = self.start(way, 300, STEP_S="0.02")
        before = wait_for_steps(log, started, 25)[-1].pid
        killed = time.time()
        if way == "ray":
            self._cluster.tell("kill", self._machines.pop(0))
            self._cluster.tell("add", 1)
            self._machines.append(self._machines[-1] + 1)
        else:
            os.kill(before, signal.SIGKILL)
        after = wait_for_steps(log, started, 1, not_by=before)[0].at
        started.stop.set()
        started.failure()
        return after - killed


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, tuple(SIZES))
    if find_spec("ray") is None:
        missing = MissingExtraError("This benchmark needs the package ray.", field="engine", extra="ray")
        if chosen.size != "smallest":
            raise SystemExit(str(missing))
        print(f"Not measured. {missing}")  # continuous integration runs every benchmark, and has no Ray
        return
    rounds, steps = SIZES[chosen.size]
    os.environ.update({**VARIABLES, "PYTHONPATH": str(ROOT)})
    result: dict[str, Any] = {way: {"start_s": [], "step_s": [], "loss_s": []} for way in ("torchrun", "ray")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = RayCluster(1, 1)
        try:
            trainings = Trainings(folder, cluster)
            for _ in range(rounds):
                for way, taken in result.items():
                    first, step = trainings.whole(way, steps)
                    taken["start_s"].append(first)
                    taken["step_s"].append(step)
                    taken["loss_s"].append(trainings.lost(way))
        finally:
            cluster.close()
    added = [a - b for a, b in zip(result["ray"]["start_s"], result["torchrun"]["start_s"], strict=True)]
    shown = {way: {name: spread(values) for name, values in taken.items()} for way, taken in result.items()}
    publish("ray_launch", chosen.size, {**shown, "added_to_a_start_s": spread(added)}, chosen.save)


if __name__ == "__main__":
    main()
