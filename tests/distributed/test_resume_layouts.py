"""Train under one layout of processes, stop, go on under any other: the same samples, the same weights to rounding;
under the same layout, to the bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_distributed
from tests.support.tiny_models import llama, lm_rows
from tests.support.toys import Augmented, classification_rows
from tests.support.training import LOGGED, losses, train_in_parts, trainer
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.errors import NotReproducibleError
from trainer_lib.storage import Store

PLAN = {"up": "colwise", "down": "rowwise"}
#: Name -> processes, and arguments.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "replicas": (2, {}),
    "whole": (2, {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}),
    "tensor": (2, {"parallelism": {"tensor": 2, "plan": PLAN}}),
    "rows": (4, {"fsdp": "full_shard"}),
    "groups": (4, {"fsdp": "hybrid_shard", "fsdp_config": {"hybrid_group_size": 2}}),
    "tensor-rows": (4, {"parallelism": {"shard": 2, "tensor": 2, "plan": PLAN}}),
    "tensor-replicas": (4, {"parallelism": {"replicate": 2, "tensor": 2, "plan": PLAN}}),
}
#: Layouts before and after a stop: the same one, and the next; `test_blocks.py` reads the tensors of every pair.
PAIRS = [*zip(LAYOUTS, LAYOUTS, strict=True), *itertools.pairwise([*LAYOUTS, "one"])]
RUN: dict[str, Any] = {"num_train_epochs": 2, "global_batch_size": 6, "per_device_train_batch_size": 2, **LOGGED}
ROWS = classification_rows(20)
STOP = 3


class Layers(nn.Module):
    """A pair of layers that can be divided, a norm that stays whole, and sizes that do not divide by four."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.head = nn.Linear(6, 10), nn.Linear(10, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.down(torch.relu(self.up(x)))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Halt(TrainerCallback):
    """Saves and stops after a step; notes the samples of each, without the fillers of ranks that have none."""

    def __init__(self, step: int | None, data: Augmented) -> None:
        self.step, self.data = step, data
        self.samples: list[list[int]] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        read = iter(self.data.read)
        counts = self.trainer._trainflow.run.weights.items
        taken = [rows if count else [] for count in counts for rows in [list(itertools.islice(read, count or 1))]]
        self.samples.append(sorted(itertools.chain.from_iterable(taken)))
        self.data.read.clear()
        control.should_training_stop = control.should_save = state.global_step == self.step


def run(folder: str, layout: str, source: str | None, stop: int | None) -> dict[str, Any]:
    """One training, from the checkpoint of a layout if one is named."""
    torch.manual_seed(0)
    data = Augmented(ROWS)
    halt = Halt(stop, data)
    given = LAYOUTS[layout][1]
    target = f"{folder}/{layout}" if stop else f"{folder}/{layout}-after-{source}"
    one = trainer(target, data, model=Layers(), callbacks=[halt], **RUN, **given)
    halt.trainer = one
    one.train(resume_from_checkpoint=f"{folder}/{source}/checkpoint-{STOP}" if source else None)
    state = one._trainflow.engine.strategy.model_state(one.model_wrapped)
    return {
        "samples": halt.samples,
        "share": one._trainflow.world.comm.data_parallel.rank,
        "losses": losses(one),
        "state": {name: value for name, value in state.items() if not value.is_meta},
    }


def several(folder: str, jobs: list[tuple[str, str | None, int | None]]) -> list[dict[str, Any]]:
    return [run(folder, *job) for job in jobs]


def on_ranks(folder: Path, jobs: list[tuple[str, str | None, int | None]]) -> list[list[dict[str, Any]]]:
    """The jobs on as many processes as their layouts need; for each job, what every rank found."""
    results: dict[int, list[dict[str, Any]]] = {}
    for world in sorted({LAYOUTS[layout][0] for layout, _, _ in jobs}):
        numbers = [number for number, job in enumerate(jobs) if LAYOUTS[job[0]][0] == world]
        chosen = [jobs[number] for number in numbers]
        if world == 1:
            ranks = [several(str(folder), chosen)]
        else:
            ranks = run_distributed(several, world, str(folder), chosen, timeout_s=250)
        results |= {number: [rank[place] for rank in ranks] for place, number in enumerate(numbers)}
    return [results[number] for number in range(len(jobs))]


def together(ranks: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of each step, of every share of the data once; ranks of one share have the same."""
    shares: dict[int, list[list[int]]] = {}
    for rank in ranks:
        assert shares.setdefault(rank["share"], rank["samples"]) == rank["samples"]
    return [sorted(itertools.chain.from_iterable(step)) for step in zip(*shares.values(), strict=True)]


Found = Mapping[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def unstopped(folder: Path) -> Found:
    """Every layout without a stop."""
    return dict(zip(LAYOUTS, on_ranks(folder, [(name, None, None) for name in LAYOUTS]), strict=True))


@pytest.fixture(scope="module")
def stopped(folder: Path, unstopped: Found) -> Found:
    """Every layout until the stop, which leaves a checkpoint."""
    return dict(zip(LAYOUTS, on_ranks(folder, [(name, None, STOP) for name in LAYOUTS]), strict=True))


@pytest.fixture(scope="module")
def resumed(folder: Path, stopped: Found) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(before, after) -> what the ranks after the stop found."""
    return dict(zip(PAIRS, on_ranks(folder, [(after, before, None) for before, after in PAIRS]), strict=True))


def test_every_layout_trains_like_one_process(unstopped: Found) -> None:
    [alone] = unstopped["one"]
    for name, ranks in unstopped.items():
        assert together(ranks) == together([alone]), name
        assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        for key, value in alone["state"].items():
            torch.testing.assert_close(ranks[0]["state"][key], value, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}")


def test_resumed_under_another_layout_it_ends_alike(
    unstopped: Found, stopped: Found, resumed: dict[tuple[str, str], list[dict[str, Any]]]
) -> None:
    """The samples of both parts are those of one process, none lost, none twice; so are losses and weights."""
    [alone] = unstopped["one"]
    for (before, after), ranks in resumed.items():
        pair = f"{before} -> {after}"
        assert together(stopped[before]) + together(ranks) == together([alone]), pair
        assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5), pair
        for key, value in alone["state"].items():
            torch.testing.assert_close(ranks[0]["state"][key], value, rtol=1e-4, atol=1e-6, msg=f"{pair}: {key}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_under_the_same_layout_it_ends_alike_to_the_bit(
    name: str, unstopped: Found, resumed: dict[tuple[str, str], list[dict[str, Any]]]
) -> None:
    whole, parts = unstopped[name][0], resumed[name, name][0]
    assert parts["losses"] == whole["losses"]
    assert parts["state"].keys() == whole["state"].keys()
    assert all(torch.equal(value, whole["state"][key]) for key, value in parts["state"].items())


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
        state = one._trainflow.engine.strategy.model_state(one.model_wrapped)
        measured = [row["eval_loss"] for row in one.state.log_history if "eval_loss" in row]
        weights = {name: value.clone() for name, value in state.items() if not value.is_meta}
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


class Disturb(Halt):
    """Changes a value that all ranks should have alike, on the last of them, before the save."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        comm = self.trainer._trainflow.comm
        if comm.rank == comm.world_size - 1:
            weight: Any = self.trainer.model.norm.weight
            with torch.no_grad():
                (weight.to_local() if hasattr(weight, "to_local") else weight)[0] += 1
        super().on_step_end(args, state, control, **kwargs)


def disturbed(folder: str, **given: Any) -> list[str]:
    disturb = Disturb(1, Augmented(ROWS))
    one = trainer(folder, disturb.data, model=Layers(), callbacks=[disturb], **RUN, **given)
    disturb.trainer = one
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
    call = functools.partial(disturbed, **settings, **given)
    [first, *others] = run_distributed(call, world, str(tmp_path))
    assert others == [first] * (world - 1)
    [message] = first
    assert "'model/norm.weight'" in message
    assert place in message
