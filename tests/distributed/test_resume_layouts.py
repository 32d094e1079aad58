"""A copy of a weight that differs ends the save of a layout; trainings in float8 resume to the bit."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_distributed
from tests.support.tiny_models import llama, lm_rows
from tests.support.toys import classification_rows
from tests.support.training import LOGGED, losses, train_in_parts, trainer, whole_state
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.errors import NotReproducibleError
from trainer_lib.storage import Store

PLAN = {"up": "colwise", "down": "rowwise"}
#: Name -> processes, and arguments.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (2, {}),
    "tensor-replicas": (4, {"parallelism": {"replicate": 2, "tensor": 2, "plan": PLAN}}),
}
RUN: dict[str, Any] = {"num_train_epochs": 2, "global_batch_size": 6, "per_device_train_batch_size": 2, **LOGGED}
ROWS = classification_rows(20)


class Layers(nn.Module):
    """A pair of layers that can be divided, a norm that stays whole, and sizes that do not divide by four."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.head = nn.Linear(6, 10), nn.Linear(10, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.down(torch.relu(self.up(x)))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


FLOAT8: dict[str, dict[str, Any]] = {"replicas": {}, "shards": {"fsdp": "full_shard auto_wrap"}}


def _in_float8(path: str, given: dict[str, Any]) -> Trainer:
    more = {"max_steps": 4, "bf16": True, "eval_strategy": "steps", "eval_steps": 2, **LOGGED}
    rows, model = lm_rows(22, ragged=False), llama(hidden_size=64, intermediate_size=128)
    return trainer(path, rows, model=model, eval_dataset=rows[:4], **more, **given)


def in_float8(folder: str, stop: int | None) -> dict[str, Any]:
    """Losses and weights of trainings in float8 that are measured; with `stop`, they are stopped there and resumed."""
    import accelerate

    recipes = {"tensorwise": accelerate.utils.AORecipeKwargs(), "rowwise": "rowwise"}
    out = {}
    for (layout, given), (recipe, fp8) in itertools.product(FLOAT8.items(), recipes.items()):
        one = train_in_parts(functools.partial(_in_float8, f"{folder}/{layout} {recipe}", {"fp8": fp8, **given}), stop)
        assert one.args.fp8 == recipe
        measured = [row["eval_loss"] for row in one.state.log_history if "eval_loss" in row]
        weights = {name: value.clone() for name, value in whole_state(one).items()}
        out[f"{layout}, {recipe}"] = losses(one), measured, weights
    return out


@pytest.mark.needs("torchao")
def test_float8_is_resumed_to_the_bit_in_replicas_and_shards(tmp_path: Path) -> None:
    through = run_distributed(in_float8, 2, str(tmp_path / "through"), None, timeout_s=150)[0]
    again = run_distributed(in_float8, 2, str(tmp_path / "again"), 2, timeout_s=150)[0]
    for name, (whole, measured, weights) in through.items():
        assert (whole, measured) == again[name][:2], name
        assert all(torch.equal(value, again[name][2][key]) for key, value in weights.items()), name
    assert len({str(whole) for whole, *_ in through.values()}) == len(through), "each recipe has its own rounding"


class Disturb(TrainerCallback):
    """Changes a value that all ranks should have alike, on the last of them, before the save."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if args.process_index == args.world_size - 1:
            weight: Any = model.norm.weight
            with torch.no_grad():
                (weight.to_local() if hasattr(weight, "to_local") else weight)[0] += 1
        control.should_training_stop = control.should_save = True


def disturbed(folder: str, **given: Any) -> list[str]:
    one = trainer(folder, ROWS, model=Layers(), callbacks=[Disturb()], **RUN, **given)
    with pytest.raises(NotReproducibleError) as caught:
        one.train()
    return [caught.value.message, *(info.name for info in list_checkpoints(Store.open(folder)))]


ZERO: dict[str, Any] = {"deepspeed": {"zero_optimization": {"stage": 2}}, "bf16": True}


@pytest.mark.parametrize(
    ("layout", "given", "place"),
    [
        ("tensor-replicas", {}, "rank 3 (tensor=1, replicate=1)"),
        ("replicas", {}, "between rank 0 (replicate=0) and rank 1 (replicate=1)"),
        ("replicas", {"save_async": True}, "rank 1 (replicate=1)"),
        pytest.param("replicas", ZERO, "rank 1 (replicate=1)", marks=pytest.mark.needs("deepspeed")),
    ],
)
def test_a_copy_that_differs_ends_the_save(layout: str, given: dict[str, Any], place: str, tmp_path: Path) -> None:
    world, settings = LAYOUTS[layout]
    [first, *others] = run_distributed(functools.partial(disturbed, **settings, **given), world, str(tmp_path))
    assert others == [first] * (world - 1)
    [message] = first
    assert "'model/norm.weight'" in message
    assert place in message
