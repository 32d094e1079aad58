"""A checkpoint that is evaluated beside its training gets the numbers of an evaluation inside it, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import request
from tests.support.tiny import ARGS, RECIPE, prepared, run
from trainer_lib.errors import DamagedError
from trainer_lib.requests import CheckpointMetrics, PreparedData

# Collator and model draw, also in an evaluation, which continues from the training's random numbers.
DRAWING = RECIPE.replace(
    'torch.from_numpy(np.stack([row["x"] for row in rows]))',
    'torch.from_numpy(np.stack([row["x"] for row in rows])) * (1 + torch.rand(1))',
).replace("self.layers(x)", "self.layers(x) + torch.rand(1)[0] * x[:, :2]")
TIMINGS = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def train(folder: Path, recipe: str, data: PreparedData, **args: Any) -> dict[int, dict[str, float]]:
    """Train with evaluations; returns what they logged, by step."""
    given = {**ARGS, "num_train_epochs": 1, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, **args}
    more = {"data": data, "model": {}, "args": given, "train_split": "train", "eval_split": "test"}
    run(request(folder, recipe, "train", output=str(folder / "train"), **more), kind="in_process")
    history = json.loads((folder / "train" / "history.json").read_text())
    return {entry["step"]: _measured(entry) for entry in history if "eval_loss" in entry}


def beside(folder: Path, recipe: str, data: PreparedData, step: int, **args: Any) -> CheckpointMetrics:
    asked = request(
        folder,
        recipe,
        "evaluate_checkpoint",
        output=str(folder / "follow"),
        data=data,
        args={**ARGS, **args},
        checkpoint=str(folder / "train" / "checkpoints" / f"checkpoint-{step}"),
        eval_split="test",
    )
    return run(asked, kind="in_process")  # type: ignore[no-any-return]


def _measured(entry: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if name not in (*TIMINGS, "step")}


@pytest.mark.parametrize(
    "args", [{}, {"bf16": True, "per_device_eval_batch_size": 7}], ids=["float32", "bfloat16, a ragged last batch"]
)
def test_the_numbers_are_those_of_an_evaluation_inside_training(args: dict[str, Any], tmp_path: Path) -> None:
    data = prepared(tmp_path / "prepared")
    inside = train(tmp_path, DRAWING, data, **args)
    assert set(inside) >= {4, 8}
    for step in (8, 12) if 12 in inside else (4, 8):
        found = beside(tmp_path, DRAWING, data, step, **args)
        assert found.step == step
        assert _measured(found.metrics) == inside[step]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    data = prepared(tmp_path / "prepared")
    train(tmp_path, RECIPE, data)
    weights = tmp_path / "train" / "checkpoints" / "checkpoint-8" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DamagedError, match="digest") as error:
        beside(tmp_path, RECIPE, data, 8)
    assert "checkpoint-8/model.safetensors" in str(error.value.field)
