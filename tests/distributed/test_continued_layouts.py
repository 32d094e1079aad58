"""A training in a layout is stopped, and continues in the same one to the bit, and in others to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.test_layouts import HEADS, MODELS, RAGGED, mixtral, mixture, qwen
from tests.support.distributed import loaded, run_distributed
from tests.support.tiny_models import llama, lm_rows
from tests.support.training import StopAt, losses, trainer
from trainer_lib.errors import Preempted

ROWS = lm_rows(22)
#: The last of three steps of an epoch has 6 rows; a training that is stopped at the second continues past it.
LONGER: dict[str, Any] = {**RAGGED, "max_steps": 4}


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded(*(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "qwen3", "mixtral"))):
        yield


RESUMED: dict[str, dict[str, int]] = {
    "tensor": {"tensor": 2},
    "shards of tensor": {"shard": 2, "tensor": 2},
    "replicas of tensor": {"replicate": 2, "tensor": 2},
    "sequence": {"sequence": 2},
    "replicas of sequence": {"replicate": 2, "sequence": 2},
    "shards of sequence": {"shard": 2, "sequence": 2},
    "sent": {"expert": 2},
    "sent in shards": {"shard": 2, "expert": 2},
}


def resumed(folder: str, layouts: Mapping[str, dict[str, int]]) -> dict[str, list[Any]]:
    """Losses and weights of a training with dropout, and of one that continues from its checkpoint."""
    out: dict[str, list[Any]] = {}
    for name, sizes in layouts.items():
        given: dict[str, Any] = {**LONGER, "parallelism": sizes, "save_steps": 2}
        made = mixture if "expert" in sizes else llama
        for source, saves in ((None, "steps"), (f"{folder}/{name} steps/checkpoint-2", "no")):
            model = made(**HEADS, attention_dropout=0.2)
            one = trainer(f"{folder}/{name} {saves}", ROWS, model=model, save_strategy=saves, **given)
            one.train(resume_from_checkpoint=source)
            state = one._trainflow.engine.strategy.local_state(one.model_wrapped)
            out.setdefault(name, []).append((losses(one), {key: _local(value) for key, value in state.items()}))
    return out


#: Models and layouts in which others save one rank's part, or nothing, or resume with another state.
MOVED: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "experts": (mixtral, {"shard": 4}),
    "experts in copies": (mixtral, {"replicate": 2, "shard": 2}),
    "tied in both": (qwen, {"shard": 2, "tensor": 2}),
    "tied over all": (qwen, {"tensor": 4}),
}


def saved(folder: str) -> None:
    for name, (model, sizes) in MOVED.items():
        one = trainer(f"{folder}/{name}", ROWS, model=model(), **LONGER, parallelism=sizes, callbacks=[StopAt(2)])
        with pytest.raises(Preempted):
            one.train()


def test_every_expert_and_tied_weight_is_saved_and_trains_on_as_on_one_process(tmp_path: Path) -> None:
    run_distributed(saved, 4, str(tmp_path), timeout_s=120)
    for name, (model, _) in MOVED.items():
        whole = trainer(tmp_path / "whole" / name, ROWS, model=model(), **LONGER)
        whole.train()
        moved = trainer(tmp_path / name, ROWS, model=model(), **LONGER)
        moved.train(resume_from_checkpoint=True)
        assert losses(moved) == pytest.approx(losses(whole), rel=2e-6), name
        state = moved.model.state_dict()
        for key, value in whole.model.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-3, atol=2e-5, msg=f"{name}: {key}")


def _local(value: Any) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def test_a_training_continues_to_the_bit_in_its_layout(tmp_path: Path) -> None:
    for world in (2, 4):
        layouts = {name: sizes for name, sizes in RESUMED.items() if math.prod(sizes.values()) == world}
        for rank in run_distributed(resumed, world, str(tmp_path / str(world)), layouts, timeout_s=240):
            for name, (through, again) in rank.items():
                assert through[0] == again[0], name
                assert all(torch.equal(value, again[1][key]) for key, value in through[1].items()), name


def continued(
    folder: str, sizes: dict[str, int] | None, source: str | None, stop: int | None, model: str
) -> list[float]:
    """Losses of a training, stopped or from a checkpoint of another layout."""
    given: dict[str, Any] = {**LONGER, "parallelism": sizes, "save_strategy": "steps", "save_steps": 2}
    one = trainer(folder, ROWS, model=MODELS[model](), **given)
    if stop:
        one.add_callback(StopAt(stop))
        with pytest.raises(Preempted):
            one.train()
    else:
        one.train(resume_from_checkpoint=source)
    return losses(one)


#: A model, and the layout that it is stopped in.
CONTINUED: dict[str, tuple[str, dict[str, int]]] = {
    "sent": ("mixtral", {"expert": 2}),
    "sequence": ("llama", {"sequence": 2}),
    "tensor": ("llama", {"tensor": 2}),
}


def continued_on_two(folder: str) -> dict[str, list[list[float]]]:
    """The losses from one process's checkpoint on, and from that of the layout on under shards."""
    found = {}
    for name, (model, sizes) in CONTINUED.items():
        continued(f"{folder}/{name}/divided", sizes, None, 2, model)
        alone, divided = (f"{folder}/{name}/{part}/checkpoint-2" for part in ("alone", "divided"))
        found[name] = [
            continued(f"{folder}/{name}/alone divided", sizes, alone, None, model),
            continued(f"{folder}/{name}/shards", {"shard": 2}, divided, None, model),
        ]
    return found


def test_a_training_continues_under_another_layout(tmp_path: Path) -> None:
    expected = {}
    for name, (model, _) in CONTINUED.items():
        expected[name] = continued(str(tmp_path / name / "through"), None, None, None, model)
        continued(str(tmp_path / name / "alone"), None, None, 2, model)
    ranks = run_distributed(continued_on_two, 2, str(tmp_path), timeout_s=120)
    for name, (model, _) in CONTINUED.items():
        source = str(tmp_path / name / "divided" / "checkpoint-2")
        whole = continued(str(tmp_path / name / "divided alone"), None, source, None, model)
        for found in [whole, *(one for rank in ranks for one in rank[name])]:
            assert found == pytest.approx(expected[name], rel=2e-6), name
