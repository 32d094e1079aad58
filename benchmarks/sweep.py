"""What a sweep survives, and what it costs beside its trainings.

    python -m benchmarks.sweep --size full --save

Four questions, each answered by `trainflow sweep` on a small network whose steps take a fixed time:

- `killed`: a sweep whose command is killed (SIGKILL) again and again. Wanted: as many results as trials, no training
  committed twice, and the spec of the best trial finds its training committed and reaches the same number.
- `throughput`: trials per minute with two slots, divided by that with one.
- `pruned`: the share of the optimizer steps that successive halving saves, and whether the best trial is the same.
- `cost`: seconds of a trial beside its training: the time between the ends of two trials, less the training itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._result import arguments, publish
from flows.results import flat_metrics
from tasks.stage.retry import Ledger
from trainer_lib.storage import Store

# size: trials, kills, steps of a training, seconds of a step
SIZES = {"smallest": (3, 1, 6, 0.05), "medium": (8, 3, 20, 0.1), "full": (20, 5, 40, 0.1)}
TRAINFLOW = [sys.executable, "-c", "from flows.cli.main import main; main()"]
SWEEP = "bench-sweep"

RECIPE = """
def prepare(options, out):
    return {"train": rows(256, 0), "validation": rows(64, 1)}


def rows(count, seed):
    import random

    draw = random.Random(seed)
    for _ in range(count):
        x = draw.uniform(-1, 1)
        yield {"x": [x], "labels": [2.0 * x]}


def build_model(options, data):
    import time
    import torch

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, x, labels=None):
            if self.training:
                time.sleep(options["step_s"])
            y = self.linear(x.float())
            return {"logits": y} if labels is None else {"loss": ((y - labels) ** 2).mean(), "logits": y}

    return Line()


def compute_metrics(p):
    return {"error": float(abs(p.predictions - p.label_ids).mean())}
"""


def write_spec(folder: Path, trials: int, steps: int, step_s: float, **sweep: Any) -> Path:
    """Write a project into `folder`, and return its spec."""
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text(RECIPE)
    rate = {"low": 1e-4, "high": 1.0, "log": True}
    args = {"max_steps": steps, "global_batch_size": 8, "save_steps": 2, "logging_steps": 2, "use_cpu": True}
    evaluated = {"eval_strategy": "steps", "eval_steps": max(1, steps // 9)}
    launch = {"kind": "process", "processes": 1, "threads": 1}
    spec = {
        "name": "bench",
        "recipe": "recipe.py",
        "storage": "store",
        "prepare": {"launch": launch},
        "train": {
            "args": {**args, **evaluated},
            "model": {"step_s": step_s},
            "eval_split": "validation",
            "launch": launch,
        },
        "evaluate": {"splits": ["validation"]},
        "predict": {"enabled": False},
        "publish": {"enabled": False},
        "sweep": {
            "space": {"train.args.learning_rate": rate},
            "objective": "validation_error",
            "direction": "minimize",
            "trials": trials,
            "sampler": "random",
            **sweep,
        },
    }
    path = folder / "pipeline.json"
    path.write_text(json.dumps(spec))
    return path


def command(verb: str, spec: Path) -> dict[str, Any]:
    """Run a command to its end, and return what it prints."""
    done = subprocess.run([*TRAINFLOW, verb, str(spec), "--json"], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def killed(folder: Path, size: tuple[int, int, int, float]) -> dict[str, Any]:
    """Kill a sweep several times, let it end, and count what is there."""
    trials, kills, steps, step_s = size
    spec = write_spec(folder, trials, steps, step_s)
    store = folder / "store"
    for _ in range(kills):
        before = _checkpoints(store)
        with subprocess.Popen([*TRAINFLOW, "sweep", str(spec), "--quiet"], start_new_session=True) as process:
            while process.poll() is None and _checkpoints(store) < before + 2:
                time.sleep(0.05)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
    result = command("sweep", spec)
    ends = [
        [end.get("outcome") for _, end in Ledger(Store.open(str(each))).records()]
        for each in (store / "stages" / "train").iterdir()
    ]
    [best] = result["best"]
    again = command("run", store / "sweeps" / SWEEP / "best.yaml")
    stages = {stage["stage"]: stage for stage in again["stages"]}
    reached = flat_metrics(stages["evaluate"]["manifest"]["metrics"])["validation_error"]
    return {
        "kills": kills,
        "results": sum(trial["state"] == "complete" for trial in result["trials"]),
        "trainings": len(ends),
        "committed_twice": sum(each.count("committed") > 1 for each in ends),
        "best_is_cached": stages["train"]["status"] == "cached",
        "best_is_equal": [reached] == result["trials"][best]["objective"],
    }


def _checkpoints(store: Path) -> int:
    return len(list(store.glob("stages/train/*/checkpoints/*/COMMIT.json")))


def throughput(folder: Path, size: tuple[int, int, int, float]) -> dict[str, float]:
    """Time the same trials with one slot and with two."""
    trials, _, steps, step_s = size
    seconds = {}
    for slots in (1, 2):
        spec = write_spec(folder / str(slots), trials, steps, step_s, parallel=slots)
        seconds[slots] = float(command("sweep", spec)["seconds"])
    return {
        "one_slot_s": seconds[1],
        "two_slots_s": seconds[2],
        "ratio": seconds[1] / seconds[2],
    }


def pruned(folder: Path, size: tuple[int, int, int, float]) -> dict[str, Any]:
    """Run the same trials with and without successive halving."""
    trials, _, steps, step_s = size
    found = {}
    for pruner in (None, "asha"):
        spec = write_spec(folder / str(pruner), trials, steps, step_s, pruner=pruner)
        found[pruner] = command("sweep", spec)
    return {
        "saved_share": found["asha"]["saved_share"] or 0.0,
        "best_is_equal": found["asha"]["best"] == found[None]["best"],
    }


def cost(folder: Path, size: tuple[int, int, int, float]) -> dict[str, float]:
    """The seconds of a trial, and of its training alone."""
    trials, _, steps, step_s = size
    result = command("sweep", write_spec(folder, trials, steps, step_s))
    # The first trial of a slot also prepares the data and loads what the others use.
    took = [float(trial["seconds"]) for trial in result["trials"][1:]]
    return {"trial_s": statistics.median(took), "beside_training_s": statistics.median(took) - steps * step_s}


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    size = SIZES[chosen.size]
    result: dict[str, Any] = {"trials": size[0], "steps": size[2], "step_s": size[3]}
    with tempfile.TemporaryDirectory() as name:
        for measure in (killed, throughput, pruned, cost):
            result[measure.__name__] = measure(Path(name) / measure.__name__, size)
            shutil.rmtree(Path(name) / measure.__name__)
    publish("sweep", chosen.size, result, chosen.save)


if __name__ == "__main__":
    main()
