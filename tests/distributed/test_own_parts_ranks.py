"""On two ranks, the weights of a loss train as on one, and an overridden `save_model` is called where it should be."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_distributed
from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib import Trainer, TrainingArguments, distributed
from trainer_lib.checkpoint.added_files import add_files
from trainer_lib.commit import read_commit
from trainer_lib.errors import StorageFullError
from trainer_lib.storage import Store

ROWS = classification_rows(24)


class Scaled(nn.Module):
    """A loss with a weight that starts differently on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4) + rank)

    def forward(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs["logits"] * self.scale.mean(), labels) + (self.scale**2).mean()


class Adding(Trainer):
    calls: list[str]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.calls.append("save_model")
        super().save_model(output_dir, _internal_call)
        (Path(str(output_dir)) / f"of-rank-{self._trainflow.comm.rank}.txt").write_text("own")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.calls.append("_save")
        super()._save(output_dir, state_dict)


def _train(folder: str, steps: int, resume: bool) -> tuple[list[str], list[float], list[str]]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    loss = Scaled(rank)
    given: dict[str, Any] = {
        "compute_loss_func": loss,
        "lr_scheduler_type": "constant",
        "resume_from_checkpoint": resume,
    }
    given |= {"global_batch_size": 8, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}
    torch.manual_seed(0)
    model = Classifier(dropout=0.0)  # every rank would draw other masks
    one = trainer(folder, ROWS, model=model, cls=Adding, max_steps=steps, **given)
    one.calls = []  # type: ignore[attr-defined]
    one.train()
    commit = read_commit(Store.open(folder).child(f"checkpoint-{steps}"))
    assert commit is not None
    own = [entry.path for entry in commit.files if entry.path.endswith(".txt")]
    return one.calls, [*loss.scale.tolist(), float(next(one.model.parameters()).detach().sum())], own  # type: ignore[attr-defined]


def test_a_loss_with_weights_and_a_save_of_ones_own_on_two_ranks(tmp_path: Path) -> None:
    _, expected, _ = _train(str(tmp_path / "one"), 4, False)
    stopped = run_distributed(_train, 2, str(tmp_path / "two"), 2, False)
    assert [calls for calls, _, _ in stopped] == [["save_model", "_save"], ["save_model"]]
    resumed = run_distributed(_train, 2, str(tmp_path / "two"), 4, True)
    for _, found, own in resumed:
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5)
        assert own == ["of-rank-0.txt", "of-rank-1.txt"]


def _add_without_space(failing: int) -> str:
    comm = distributed.init(TrainingArguments(output_dir="memory://added", use_cpu=True))
    made = tempfile.mkdtemp, Path.mkdir

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if comm.rank == failing:
        # Rank 0 makes the folder under a new name, and every rank the one inside.
        if failing == 0:
            tempfile.mkdtemp = fail
        else:
            Path.mkdir = fail  # type: ignore[method-assign]
    try:
        add_files(Store.open("memory://added/checkpoint-1"), comm, lambda folder: None)
    except StorageFullError as error:
        return f"rank {error.rank}"
    finally:
        tempfile.mkdtemp, Path.mkdir = made  # type: ignore[method-assign]
    return "no error"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_temporary_folder_that_one_rank_cannot_make_fails_on_every_rank(failing: int) -> None:
    assert run_distributed(_add_without_space, 2, failing, timeout_s=20) == [f"rank {failing}"] * 2
