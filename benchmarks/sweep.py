"""Survival of a sweep, and its cost besides its trainings.

    python -m benchmarks.sweep --size full --save

Four questions, each answered by `trainflow sweep`. `pruned` trains the small language model of `examples/stdlib_lm`
(the smallest size leaves it out); the others train a network whose steps take a fixed time, as on a device that the
processor waits for:

- `killed`: a sweep whose command is killed (SIGKILL) again and again. Wanted: as many results as trials, no training
  committed twice, and the spec of the best trial finds its training committed and reaches the same number.
- `throughput`: trials per minute with two slots, divided by that with one.
- `pruned`: the share of the optimizer steps that successive halving saves, and whether the best trial is the same. The
  sweep without a pruner is the second one: it proposes the same values, and goes on with the trainings that the first
  ended.
- `cost`: seconds of a trial beside its training: the time between the ends of two trials, less the training itself.

`--only NAME` measures one of them.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._result import arguments, publish
from trainer_lib.storage import Store
from trainflow.flows.records.results import flat_metrics
from trainflow.flows.spec.spec_file import read_spec_file
from trainflow.tasks.stage.retry import Ledger

# size: trials, kills, steps of a training, seconds of a step
SIZES = {"smallest": (2, 1, 4, 0.05), "medium": (8, 3, 20, 0.1), "full": (20, 5, 40, 0.1)}
# size: trials and steps of a training with which throughput is measured: it is to outlast what a trial costs beside it
LONGER = {"smallest": (2, 4), "medium": (4, 60), "full": (8, 300)}
LIBRARY = Path(__file__).parent.parent / "examples" / "stdlib_lm" / "quick.yaml"
LIBRARY_TRIALS = {"medium": 4, "full": 7}
# The first decision comes after 30 of 120 steps: before, the learning rate rises, and tells nothing of the end.
LIBRARY_ARGS = {"eval_steps": 15, "save_steps": 15}
LIBRARY_PRUNER = "{kind: asha, after: 2}"
TRAINFLOW = [sys.executable, "-c", "from trainflow.flows.cli.main import main; main()"]
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


def write_spec(folder: Path, trials: int, steps: int, step_s: float, save_steps: int = 2, **sweep: Any) -> Path:
    """Write a project into `folder`, and return its spec."""
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text(RECIPE)
    rate = {"low": 1e-4, "high": 1.0, "log": True}
    args = {"max_steps": steps, "global_batch_size": 8, "save_steps": save_steps, "logging_steps": 2, "use_cpu": True}
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


def command(verb: str, spec: Path, *overrides: str) -> dict[str, Any]:
    """Run a command to its end, and return what it prints."""
    words = [*TRAINFLOW, verb, str(spec), *overrides, "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
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


def throughput(folder: Path, longer: tuple[int, int], step_s: float) -> dict[str, float]:
    """Time the same trials with one slot and with two."""
    trials, steps = longer
    seconds = {}
    for slots in (1, 2):
        spec = write_spec(folder / str(slots), trials, steps, step_s, save_steps=50, parallel=slots)
        seconds[slots] = float(command("sweep", spec)["seconds"])
    return {
        "trials": trials,
        "training_s": steps * step_s,
        "one_slot_s": seconds[1],
        "two_slots_s": seconds[2],
        "ratio": seconds[1] / seconds[2],
    }


def pruned(folder: Path, trials: int) -> dict[str, Any]:
    """Run the same trials of the language model with successive halving, and then without."""
    spec, _ = read_spec_file(LIBRARY)
    spec |= {
        "recipe": str(LIBRARY.with_name("recipe.py")),
        "storage": str(folder / "store"),
        "evaluate": {"splits": ["validation"], "options": {"sample_tokens": 1, "prompts": []}},
        "sweep": {
            "space": {
                "train.args.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
                "train.args.warmup_steps": [5, 20, 40],
                "train.args.weight_decay": [0.0, 0.1],
            },
            "objective": "validation_bits_per_byte",
            "direction": "minimize",
            "trials": trials,
            "sampler": "random",
        },
    }
    spec["train"]["args"] |= LIBRARY_ARGS
    spec["train"]["launch"] = {"kind": "process", "processes": 1, "threads": 1}
    folder.mkdir(parents=True)
    path = folder / "pipeline.json"
    path.write_text(json.dumps(spec))
    ended = command("sweep", path, "sweep.name=asha", f"sweep.pruner={LIBRARY_PRUNER}")
    whole = command("sweep", path, "sweep.name=whole")
    reached = {trial["number"]: trial["objective"][0] for trial in whole["trials"]}
    return {
        "trials": trials,
        "pruned": sum(trial["state"] == "pruned" for trial in ended["trials"]),
        "steps": [sum(trial["steps"] for trial in each["trials"]) for each in (ended, whole)],
        "saved_share": ended["saved_share"] or 0.0,
        "best": [each["best"] for each in (ended, whole)],
        "best_is_equal": ended["best"] == whole["best"],
        "bits_per_byte": [reached[each["best"][0]] for each in (ended, whole)],
        "bits_per_byte_of_all": sorted(reached.values()),
        "seconds": [ended["seconds"], whole["seconds"]],
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
    chosen = arguments(__doc__, list(SIZES), only=("killed", "throughput", "pruned", "cost"))
    name, size = chosen.size, SIZES[chosen.size]
    measures: dict[str, Callable[[Path], dict[str, Any]]] = {
        "throughput": lambda folder: throughput(folder, LONGER[name], size[3]),
        "cost": lambda folder: cost(folder, size),
        "killed": lambda folder: killed(folder, size),
        "pruned": lambda folder: pruned(folder, LIBRARY_TRIALS[name]) if name in LIBRARY_TRIALS else {},
    }
    result: dict[str, Any] = {"trials": size[0], "steps": size[2], "step_s": size[3]}
    with tempfile.TemporaryDirectory() as temporary:
        for each, measure in measures.items():
            if chosen.only in (None, each):
                result[each] = measure(Path(temporary) / each)
                print(each, json.dumps(result[each]), file=sys.stderr, flush=True)
                shutil.rmtree(Path(temporary) / each, ignore_errors=True)
    publish("sweep" if chosen.only is None else f"sweep_{chosen.only}", name, result, chosen.save)


if __name__ == "__main__":
    main()
