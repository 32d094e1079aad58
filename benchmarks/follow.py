"""Time that evaluations block a training: inside of it, and by `trainflow follow`.

    python -m benchmarks.follow --size full --save

Both train the same network on the CPU with one thread and save at the same steps, as `trainflow run`, each into a
storage of its own. One evaluates a split inside the training at each save; beside the other runs `trainflow follow`
with one thread of its own, so the machine needs two cores. The two take turns.

Reported, over all rounds (median and quartiles), from the training's own account of its time: seconds per checkpoint
that it is blocked by evaluations and saves (`blocked`, `evaluated`, `saved`), the ratio of the two medians, and
milliseconds per step of the training itself, because the follower shares the machine's memory and caches. Whether each
checkpoint that was evaluated beside the training got the metrics of the evaluation inside it, bit for bit
(`equal_bits`), and how many there were.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._result import arguments, publish, spread
from trainer_lib.storage import Store
from trainflow.tasks.stage.retry import Ledger

# size: rows of the split, steps, steps between two saves, rounds
SIZES = {"smallest": (2_000, 30, 10, 1), "medium": (30_000, 100, 20, 2), "full": (150_000, 400, 50, 5)}
TRAINFLOW = [sys.executable, "-c", "from trainflow.flows.cli.main import main; main()"]

RECIPE = """
def prepare(options, out):
    return {"train": rows(2048, 0), "validation": rows(int(options["rows"]), 1)}


def rows(count, seed):
    import numpy as np

    draw = np.random.default_rng(seed)
    for _ in range(count):
        x = draw.normal(size=32).astype(np.float32)
        yield {"x": x, "label": int(x.sum() > 0)}


def build_model(options, data):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            wide, end = torch.nn.Linear(512, 512), torch.nn.Linear(512, 2)
            self.layers = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.ReLU(), wide, torch.nn.ReLU(), end)

        def forward(self, x, labels=None):
            logits = self.layers(x)
            if labels is None:
                return {"logits": logits}
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    return Net()


def collate(rows):
    import numpy as np
    import torch

    labels = torch.tensor([row["label"] for row in rows])
    return {"x": torch.from_numpy(np.stack([row["x"] for row in rows])), "labels": labels}


def compute_metrics(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}
"""

SPEC = """
name: follow
recipe: recipe.py
prepare: {{options: {{rows: {rows}}}, launch: {{kind: process, processes: 1}}}}
train:
  eval_split: validation
  args:
    seed: 1
    use_cpu: true
    max_steps: {steps}
    per_device_train_batch_size: 64
    per_device_eval_batch_size: 256
    save_steps: {every}
    logging_steps: {every}
  launch: {{kind: process, processes: 1, threads: 1}}
evaluate: {{enabled: false}}
predict: {{enabled: false}}
publish: {{enabled: false}}
tracking: {{enabled: false}}
"""


def run(folder: Path, storage: str, every: int | None) -> dict[str, Any]:
    """Train once; `every`: evaluate inside, at so many steps; None: beside."""
    inside = [] if every is None else ["train.args.eval_strategy=steps", f"train.args.eval_steps={every}"]
    words = ["pipeline.yaml", f"storage={storage}", *inside]
    follower = None
    if every is None:
        follower = subprocess.Popen(
            [*TRAINFLOW, "follow", *words, "--every", "0.5"], cwd=folder, stdout=subprocess.DEVNULL
        )
    try:
        subprocess.run([*TRAINFLOW, "run", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        if follower is not None and follower.wait(3600) != 0:
            raise RuntimeError("The follower failed.")
    finally:
        if follower is not None and follower.poll() is None:
            follower.kill()
    [stage] = (folder / storage / "stages" / "train").iterdir()
    [(_, end)] = Ledger(Store.open(stage)).records()
    return {"spent": end["spent"], "metrics": _metrics(stage)}


def _metrics(stage: Path) -> dict[int, dict[str, float]]:
    """Step -> what was measured, inside or beside."""
    records = [json.loads(path.read_text()) for path in (stage / "follow").glob("*.json")]
    found = {int(record["step"]): record["metrics"] for record in records}
    history = json.loads((stage / "history.json").read_text())
    found |= {int(entry["step"]): entry for entry in history if "eval_loss" in entry}
    names = ("eval_loss", "eval_accuracy")
    return {step: {name: metrics[name] for name in names} for step, metrics in found.items()}


def main() -> None:
    """Measure, and report."""
    options = arguments(__doc__, list(SIZES))
    rows, steps, every, rounds = SIZES[options.size]
    results: dict[str, list[dict[str, Any]]] = {"inside": [], "beside": []}
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="trainflow-follow-") as name:
        folder = Path(name)
        (folder / "recipe.py").write_text(RECIPE)
        (folder / "pipeline.yaml").write_text(SPEC.format(rows=rows, steps=steps, every=every))
        for number in range(rounds):
            for kind, at in (("inside", every), ("beside", None)):
                results[kind].append(run(folder, f"{kind}-{number}", at))
    saves = steps // every
    pairs = [
        (inside["metrics"].get(step), metrics)
        for inside, beside in zip(results["inside"], results["beside"], strict=True)
        for step, metrics in beside["metrics"].items()
    ]
    times = {kind: _times([each["spent"] for each in found], saves, steps) for kind, found in results.items()}
    publish(
        "follow",
        options.size,
        {
            "rows": rows,
            "checkpoints": saves,
            **times,
            "blocked_beside_to_inside": times["beside"]["blocked"]["median"] / times["inside"]["blocked"]["median"],
            "evaluated_beside": len(pairs),
            "equal_bits": all(one == other for one, other in pairs),
        },
        options.save,
    )


def _times(spent: list[dict[str, float]], saves: int, steps: int) -> dict[str, Any]:
    return {
        "blocked": spread([(each["evaluated"] + each["saved"]) / saves for each in spent]),
        "evaluated": spread([each["evaluated"] / saves for each in spent]),
        "saved": spread([each["saved"] / saves for each in spent]),
        "step_ms": spread([1000 * each["trained"] / steps for each in spent]),
    }


if __name__ == "__main__":
    main()
