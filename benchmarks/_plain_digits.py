"""The training of examples/digits alone: one process, a plain loop, no checkpoint and no record. The peer of `startup`.

    python -m benchmarks._plain_digits EPOCHS

Data, model, batches and metrics are the recipe's; optimizer, schedule, clipping and the places of evaluation those of
its spec. It evaluates and predicts at the end, as the pipeline does.
"""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trainer_lib import EvalPrediction

RECIPE = Path(__file__).resolve().parents[1] / "examples/digits/recipe.py"
BATCH, WARM_UP, EVALUATE_EVERY = 64, 40, 60


def main(epochs: int) -> None:
    """Train, evaluate, predict, and print the accuracy on the test split."""
    recipe: Any = SimpleNamespace(**runpy.run_path(str(RECIPE)))
    torch.manual_seed(0)
    info: dict[str, Any] = {}
    options = {"validation": 0.1, "test": 0.2, "seed": 0}
    splits = {name: list(rows) for name, rows in recipe.prepare(options, SimpleNamespace(info=info)).items()}
    model = recipe.build_model({"width": 32, "dropout": 0.2}, SimpleNamespace(info=info))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    rows, step = splits["train"], 0
    steps = epochs * math.ceil(len(rows) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: _cosine(at, steps))
    for _ in range(epochs):
        model.train()
        order = torch.randperm(len(rows)).tolist()
        for first in range(0, len(rows), BATCH):
            loss = model(**recipe.collate([rows[row] for row in order[first : first + BATCH]]))["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % EVALUATE_EVERY == 0:
                _evaluate(recipe, model, splits["validation"])
                model.train()
    for name in ("validation", "test", "test"):  # two evaluations, and the prediction
        metrics = _evaluate(recipe, model, splits[name])
    print(f"accuracy {metrics['accuracy']:.4f}")


def _cosine(step: int, steps: int) -> float:
    if step < WARM_UP:
        return step / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


@torch.no_grad()
def _evaluate(recipe: Any, model: torch.nn.Module, rows: list[dict[str, Any]]) -> dict[str, float]:
    model.eval()
    logits = []
    for first in range(0, len(rows), BATCH):
        logits.append(model(**recipe.collate(rows[first : first + BATCH]))["logits"].numpy())
    labels = np.array([row["label"] for row in rows])
    found: dict[str, float] = recipe.compute_metrics(EvalPrediction(np.concatenate(logits), labels))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
