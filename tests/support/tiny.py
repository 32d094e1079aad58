"""A recipe that is cheap to train and easy to resume wrongly (dropout, a ragged last batch), and its requests."""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any, TypeVar

from tests.support.distributed import run_distributed
from tests.support.launched import request
from trainer_lib import recipes
from trainer_lib.launch.base import launch
from trainer_lib.launch.settings.config import LaunchConfig
from trainer_lib.protocol.requests import PreparedData, PrepareResult, Request
from trainer_lib.worker.process.session import Events, Work

R = TypeVar("R")

RECIPE = """
import os
import time

import numpy as np
import torch
from torch import nn


def prepare(options, out):
    generator = np.random.default_rng(0)
    out.info["width"] = 6
    out.write_file("note.txt", b"hello")

    def rows(count):
        for _ in range(count):
            x = generator.normal(size=6).astype(np.float32)
            yield {"x": x, "label": int(x.sum() > 0)}

    return {"train": rows(90), "test": rows(25)}


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, x, labels=None):
        time.sleep(float(os.environ.get("STEP_S", "0")))
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {
            "loss": nn.functional.cross_entropy(logits, labels), "logits": logits
        }


def build_model(options, data):
    assert data.read_file("note.txt") == b"hello"
    assert data.splits["test"] == 25
    return Net(data.info["width"])


def collate(rows):
    if os.environ.get("BAD_RANK") == os.environ.get("RANK", "0"):
        raise ValueError("this rank cannot collate")
    batch = {"x": torch.from_numpy(np.stack([row["x"] for row in rows]))}
    return {**batch, "labels": torch.tensor([row["label"] for row in rows])}


def compute_metrics(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


def after_evaluate(model, data, options):
    assert not model.training
    return {"metrics": {"weights": float(sum(p.abs().sum() for p in model.parameters()))},
            "files": {"note.txt": b"seen"}}
"""

ARGS: dict[str, Any] = {"seed": 3, "num_train_epochs": 3, "global_batch_size": 8, "learning_rate": 0.01}
ARGS |= {"logging_steps": 10, "save_steps": 6, "save_total_limit": 2, "use_cpu": True}


def prepare(asked: Request[PrepareResult]) -> PreparedData:
    """What a request prepares (in this process), as requests describe it."""
    result = run(asked, kind="in_process")
    return PreparedData(asked.output, result.splits, result.info, result.files)


def prepared(folder: Path) -> PreparedData:
    """The recipe's data, prepared below `folder` (in this process), as requests describe it."""
    return prepare(request(folder, RECIPE, output=str(folder / "data"), shard_rows=40))


def train_request(folder: Path, data: PreparedData, output: str, **args: Any) -> Any:
    more = {"data": data, "model": {}, "args": {**ARGS, **args}, "train_split": "train", "eval_split": None}
    return request(folder, RECIPE, "train", output=output, **more)


def run(asked: Request[R], env: dict[str, str] | None = None, **config: Any) -> R:
    return launch(
        asked,
        LaunchConfig(**{"grace_s": 20.0, **config}),
        env={"OMP_NUM_THREADS": "1", **(env or {})} if config.get("kind") != "in_process" else env or {},
        on_line=lambda line: None,
        on_event=lambda event: None,
    )


def on_ranks(asked: Request[R], world_size: int = 2) -> R:
    """The result of a request that forked ranks carry out, as so many workers would."""
    result: R = run_distributed(_on_rank, world_size, asked)[0]
    return result


def _on_rank(asked: Request[Any]) -> Any:
    assert asked.recipe is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recipe = recipes.load(asked.recipe.path, asked.recipe.root, needs=asked.functions)
    work = Work(asked, recipe, rank, world_size, Events(Path(asked.output), rank, lambda event: None))
    return importlib.import_module(f"{asked.home}.{asked.verb}").run(work)


def heard(asked: Request[R]) -> tuple[R, list[dict[str, Any]]]:
    """The result of a request in this process, and its events."""
    events: list[dict[str, Any]] = []
    config = LaunchConfig(kind="in_process")
    return launch(asked, config, env={}, on_line=lambda line: None, on_event=events.append), events


def weights(output: str) -> str:
    """The digest of an exported model."""
    return hashlib.sha256(Path(output, "model", "model.safetensors").read_bytes()).hexdigest()
