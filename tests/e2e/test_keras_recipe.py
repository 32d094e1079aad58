"""A recipe whose model is a Keras model goes through every stage, on one process and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.command import trainflow
from tests.support.toy import SPEC, project

pytestmark = pytest.mark.needs("keras")

RECIPE = '''
"""A line through noisy points, in Keras."""

import keras


def prepare(options, out):
    return {"train": points(int(options.get("rows", 64)), 0), "test": points(16, 1)}


def points(count, seed):
    import random

    draw = random.Random(seed)
    for _ in range(count):
        x = draw.uniform(-1, 1)
        yield {"x": [x], "labels": [2.0 * x + 0.1 * draw.gauss(0, 1)]}


def build_model(options, data):
    layers = [keras.layers.Input((1,)), keras.layers.Dense(1)]
    model = keras.Sequential(layers[options.get("first", 0) :])
    model.compile(loss="mse")
    return model


def compute_metrics(p):
    return {"error": float(abs(p.predictions - p.label_ids).mean())}
'''


@pytest.mark.parametrize(("launch", "processes"), [("in_process", 1), ("torchrun", 2)])
def test_every_stage_runs(launch: str, processes: int, tmp_path: Path) -> None:
    """In one process the same code builds four models, whose layers Keras numbers on and on."""
    spec = project(tmp_path, recipe=RECIPE, spec=SPEC.replace("max_steps: 8", "max_steps: 40"))
    how = [f"train.launch.kind={launch}", "prepare.launch.kind=in_process"]
    how += [] if launch == "in_process" else [f"train.launch.processes={processes}"]
    ran = trainflow("run", spec, *how, "--json")
    assert ran.code == 0, ran.err
    stages = {stage["stage"]: stage for stage in json.loads(ran.out)["stages"]}
    assert {stage["status"] for stage in stages.values()} == {"ran"}
    metrics = stages["evaluate"]["manifest"]["metrics"]["test"]
    assert metrics["error"] < 0.5 and metrics["loss"] < 0.5
    parts = sorted((tmp_path / "store" / "stages" / "predict").rglob("*.parquet"))
    assert sum(pq.read_table(part).num_rows for part in parts) == 16


def test_a_model_that_is_not_built_is_refused(tmp_path: Path) -> None:
    spec = project(tmp_path, recipe=RECIPE, spec=SPEC)
    ran = trainflow("run", spec, "train.model.first=1")
    assert ran.code == 2
    assert "is not built" in ran.err + ran.out and "Input layer" in ran.err + ran.out
