"""A small project: a recipe and a spec that are read without torch and run in seconds."""

from __future__ import annotations

import textwrap
from pathlib import Path

RECIPE = '''
"""A line through noisy points."""


def prepare(options, out):
    out.info["slope"] = 2.0
    rows = int(options.get("rows", 64))
    return {"train": points(rows, 0), "test": points(16, 1)}


def points(count, seed):
    import random

    draw = random.Random(seed)
    for _ in range(count):
        x = draw.uniform(-1, 1)
        yield {"x": [x], "labels": [2.0 * x + 0.1 * draw.gauss(0, 1)]}


def build_model(options, data):
    import torch

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, x, labels=None):
            y = self.linear(x)
            if labels is None:
                return {"logits": y}
            return {"loss": ((y - labels) ** 2).mean(), "logits": y}

    return Line()


def compute_metrics(p):
    return {"error": float(abs(p.predictions - p.label_ids).mean())}
'''

SPEC = """
name: toy
recipe: recipe.py
storage: store
prepare:
  options: {rows: 64}
  launch: {kind: process, processes: 1}
train:
  args:
    seed: 1
    max_steps: 8
    global_batch_size: 8
    learning_rate: 5e-2
    save_steps: 4
    logging_steps: 2
  launch: {kind: process, processes: 1, threads: 1}
evaluate: {splits: [test]}
predict: {split: test, rows_per_file: 10}
publish: {enabled: true}
tracking: {enabled: false}
"""


def project(folder: Path, *, recipe: str = RECIPE, spec: str = SPEC) -> Path:
    """Write a project into `folder` and return the path of its spec."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text("[project]\nname = 'toy'\n")
    (folder / "recipe.py").write_text(textwrap.dedent(recipe))
    path = folder / "pipeline.yaml"
    path.write_text(textwrap.dedent(spec))
    return path
