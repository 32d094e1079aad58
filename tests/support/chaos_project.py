"""The projects that `benchmarks.chaos_pipeline` runs, each copied into the folder of a case."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

RECIPE = '''
"""Three classes of noisy points and a classifier that is easy to resume wrongly: dropout, BatchNorm, a schedule."""

import os
import random
import time


def prepare(options, out):
    out.info["classes"] = 3
    return {"train": points(options["rows"], 0), "validation": points(8, 1), "test": points(20, 2)}


def points(count, seed):
    draw = random.Random(seed)
    for number in range(count):
        x = [draw.gauss(0, 1) for _ in range(6)]
        yield {"row_id": number, "x": x, "labels": max(range(3), key=lambda at: x[at])}


def build_model(options, data):
    import torch

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(6, options["width"])
            self.norm = torch.nn.BatchNorm1d(options["width"])
            self.dropout = torch.nn.Dropout(options["dropout"])
            self.head = torch.nn.Linear(options["width"], data.info["classes"])

        def forward(self, x, labels=None):
            time.sleep(float(os.environ.get("CHAOS_FORWARD_S", "0")))  # there is time to be killed
            logits = self.head(self.dropout(torch.relu(self.norm(self.body(x.float())))))
            if labels is None:
                return {"logits": logits}
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    return Classifier()


def compute_metrics(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}
'''

SPEC = """
name: small
recipe: recipe.py
storage: store
prepare:
  options: {rows: 48}
  launch: {kind: process, processes: 1, threads: 1, grace_s: 5}
train:
  eval_split: validation
  model: {width: 8, dropout: 0.2}
  args:
    seed: 1
    max_steps: 12
    per_device_train_batch_size: 4
    global_batch_size: 8
    learning_rate: 1.0e-2
    lr_scheduler_type: cosine
    warmup_steps: 2
    logging_steps: 1
    eval_strategy: steps
    eval_steps: 4
    save_steps: 2
    save_total_limit: 2
    use_cpu: true
  launch: {processes: 1, threads: 1, grace_s: 5}
evaluate:
  splits: [validation, test]
  launch: {kind: process, processes: 1, threads: 1, grace_s: 5}
predict:
  split: test
  rows_per_file: 8
  launch: {kind: process, processes: 1, threads: 1, grace_s: 5}
"""

FORWARD_S = "0.02"


@dataclass(frozen=True)
class Project:
    """A pipeline to run.

    Attributes:
        overrides: settings of every command.
        steps: optimizer steps after which it saves; the last one is the end of the training.
    """

    name: str
    overrides: Sequence[str]
    steps: tuple[int, ...]

    def copy_to(self, folder: Path) -> Path:
        """Write recipe and spec into `folder`, and return the spec's path."""
        if self.name == "digits":
            shutil.copytree(ROOT / "examples" / "digits", folder, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(parents=True)
            (folder / "recipe.py").write_text(textwrap.dedent(RECIPE))
            (folder / "pipeline.yaml").write_text(textwrap.dedent(SPEC))
        (folder / "pyproject.toml").write_text(f"[project]\nname = '{self.name}'\n")
        return folder / "pipeline.yaml"


PROJECTS = {
    "small": Project("small", (), tuple(range(2, 13, 2))),
    "digits": Project(
        "digits",
        (
            "train.args.num_train_epochs=4",
            "train.args.save_steps=10",
            "train.args.eval_steps=20",
            "train.args.logging_steps=5",
            "train.launch.grace_s=5",
            "train.launch.threads=1",
            "prepare.launch.grace_s=5",
        ),
        (10, 20, 30, 40, 50, 60, 70, 80),
    ),
}
