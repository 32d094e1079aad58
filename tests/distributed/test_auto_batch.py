"""Micro-batches among several processes: memory that runs out on one of them, `accelerator_config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_distributed
from tests.support.toys import Classifier, classification_rows
from tests.support.training import final_state, trainer
from trainer_lib import Trainer, distributed
from trainer_lib.errors import OutOfMemoryError

ROWS = classification_rows(22)


class HungryRank(Classifier):
    """Runs out of memory on rank 1 alone, in forward or in backward, above `room` samples. Has a buffer that drifts."""

    seen: torch.Tensor

    def __init__(self, room: int, where: str) -> None:
        super().__init__()
        self.room, self.where = room, where
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        rank = distributed.current().rank
        if self.training:
            self.seen.add_(x.sum())
        outputs = super().forward(x, labels)
        if rank == 1 and len(x) > self.room:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            outputs["loss"].register_hook(_out_of_memory)  # type: ignore[no-untyped-call]
        return outputs


def _out_of_memory(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def _train(folder: str, room: int, where: str, given: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    one = trainer(folder, ROWS, model=HungryRank(room, where), **given)
    one.train()
    return {**final_state(one), "micro": one.state.train_batch_size}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_without_memory_makes_all_start_again_with_less(where: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_train_epochs": 2, "global_batch_size": 8, "logging_strategy": "steps"}
    given |= {"logging_steps": 1}
    found = run_distributed(
        _train, 2, str(tmp_path / "a"), 1, where, {**given, "auto_find_batch_size": True, "ddp_timeout": 20}
    )
    small = run_distributed(_train, 2, str(tmp_path / "b"), 9, where, {**given, "per_device_train_batch_size": 1})
    assert [one["micro"] for one in found] == [1, 1]
    for one, other in zip(found, small, strict=True):
        for name, value in other["tensors"].items():
            assert torch.equal(one["tensors"][name], value), name
        assert one["logs"] == other["logs"]


def _fails(folder: str) -> str:
    try:
        _train(folder, 0, "forward", {"auto_find_batch_size": True, "max_steps": 2})
    except OutOfMemoryError as error:
        return str(error)
    return "nothing"


def test_all_ranks_end_alike_when_nothing_is_left_to_halve(tmp_path: Path) -> None:
    said = run_distributed(_fails, 2, str(tmp_path))
    assert all("per_device_train_batch_size = 1: Memory ran out in step 1 with a single sample" in one for one in said)


class Watching(Trainer):
    """Notes after each micro-step whether the gradients of the ranks are equal: they were exchanged."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.equal: list[bool] = getattr(self, "equal", [])
        gradient = self.model.get_parameter("head.weight").grad
        assert gradient is not None
        mean = self._trainflow.comm.sum_tensor(gradient) / self._trainflow.comm.world_size
        self.equal.append(self._trainflow.comm.sum_ints([int(torch.equal(mean, gradient))])[0] == 2)
        return loss


def _exchanged(folder: str, config: dict[str, Any] | None) -> list[bool]:
    given: dict[str, Any] = {"gradient_accumulation_steps": 3, "max_steps": 1, "accelerator_config": config}
    one = trainer(folder, ROWS, cls=Watching, per_device_train_batch_size=2, **given)
    one.train()
    assert isinstance(one, Watching)
    return one.equal


def test_sync_each_batch_exchanges_gradients_in_every_micro_step(tmp_path: Path) -> None:
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert run_distributed(_exchanged, 2, str(tmp_path / "a"), None) == [[False, False, True]] * 2
    assert run_distributed(_exchanged, 2, str(tmp_path / "b"), config) == [[True, True, True]] * 2


def _sizes(folder: str, given: dict[str, Any]) -> tuple[int | None, int, int, list[int], list[int]]:
    one = trainer(folder, ROWS, eval_dataset=ROWS, accelerator_config={"split_batches": True}, max_steps=2, **given)
    one.train()
    train = [len(batch["x"]) for batch in one.get_train_dataloader()]
    evaluated = [len(batch["x"]) for batch in one.get_eval_dataloader()]
    return one.state.train_batch_size, one.get_total_train_batch_size(one.args), one.state.max_steps, train, evaluated


def _refused(folder: str) -> str:
    try:
        _sizes(folder, {"per_device_train_batch_size": 5})
    except ValueError as error:
        return str(error)
    return "nothing"


def test_split_batches_divides_the_batch_among_the_processes(tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 4}
    first, second = run_distributed(_sizes, 2, str(tmp_path), given)
    assert first[:3] == second[:3] == (3, 6, 2)
    assert first[3] == [3, 3, 3, 3] and second[3][:3] == [3, 3, 3]
    # Every rank takes equally many batches: the last of the second rank is one row of weight zero.
    assert first[4] == [2] * 6 and second[4] == [2] * 5 + [1]
    said = run_distributed(_refused, 2, str(tmp_path / "odd"))
    assert "per_device_train_batch_size = 5: The batch cannot be divided among 2 processes" in said[0]


def _configured(folder: str, formed: bool) -> str:
    if formed:
        torch.distributed.init_process_group("gloo")
    try:
        one = trainer(folder, ROWS, accelerator_config={"use_configured_state": True}, max_steps=1)
        one.train()
        return f"{one._trainflow.comm.world_size} ranks"
    except ValueError as error:
        return str(error)
    finally:
        if formed:
            torch.distributed.destroy_process_group()


def test_use_configured_state_takes_the_callers_process_group_or_none(tmp_path: Path) -> None:
    assert run_distributed(_configured, 2, str(tmp_path / "a"), True) == ["2 ranks"] * 2
    refusals = run_distributed(_configured, 2, str(tmp_path / "b"), False)
    assert all("use_configured_state = True: This asks for a process group" in one for one in refusals)
