"""Arguments and parts of the user's own on two ranks: replication, memory, losses, metrics, pushes, slow ranks."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import loaded, run_distributed
from tests.support.toys import Classifier, classification_rows
from tests.support.training import LOGGED, accuracy, final_state, trainer
from trainer_lib import Trainer, TrainerCallback, TrainingArguments
from trainer_lib.callbacks.stragglers import StragglerCallback
from trainer_lib.checkpoint.writer import add_files
from trainer_lib.distributed import communicator as distributed
from trainer_lib.errors import CodeError, ConfigError, OutOfMemoryError, StorageFullError
from trainer_lib.hub.folder import FolderHub
from trainer_lib.storage import Store
from trainer_lib.storage.commit import read_commit

ROWS = classification_rows(22)


# -------------------------------------------------------------------------------------------------- the ddp_* arguments
class Buffered(Classifier):
    """Has a buffer, and five layers of 1 MiB."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(512, 512) for _ in range(5))
        self.unused = unused
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = super().forward(x, labels)
        layers: list[Any] = [] if self.unused else list(self.wide)
        for layer in layers:
            outputs["loss"] = outputs["loss"] + layer(torch.zeros(1, 512)).sum() * 0
        return outputs


class Differ(TrainerCallback):
    """Gives the buffer another value on every rank, between two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.seen.fill_(args.process_index + 5.0)


REPLICAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small": {"ddp_bucket_cap_mb": 1},
    "static": {"ddp_static_graph": True, "ddp_find_unused_parameters": False},
}


def replicated(folder: str) -> dict[str, Any]:
    """What each setting changes, in one world."""
    seen: dict[str, Any] = {}
    for name, settings in REPLICAS.items():
        training = trainer(Path(folder, name), ROWS, model=Buffered(), max_steps=3, **settings)
        training.train()
        wrapped: Any = training.model_wrapped
        said = wrapped._get_ddp_logging_data()
        flags = bool(said["find_unused_parameters"]), bool(said.get("static_graph"))
        seen[name] = (*flags, len(str(said["bucket_sizes"]).split(",")))
    for value in (True, False):
        buffers: Any = {"ddp_broadcast_buffers": value, "max_steps": 2, "callbacks": [Differ()]}
        training = trainer(Path(folder, f"buffers-{value}"), ROWS, model=Buffered(), **buffers)
        training.train()
        seen[f"buffers {value}"] = float(training.model.state_dict()["seen"])
    strict: Any = {"ddp_find_unused_parameters": False, "max_steps": 3}
    training = trainer(Path(folder, "strict"), ROWS, model=Buffered(unused=True), **strict)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        training.train()
    refusal = "dataloader_in_order = False: Several processes take their micro-batches by position"
    with pytest.raises(ConfigError, match=refusal):
        trainer(Path(folder, "order"), ROWS, dataloader_in_order=False, dataloader_num_workers=1)
    return seen


def test_ddp_arguments_change_the_replication(tmp_path: Path) -> None:
    zero, one = run_distributed(replicated, 2, str(tmp_path))
    assert zero["plain"][:2] == (True, False)
    assert zero["static"][:2] == (False, True)
    assert zero["small"][2] > zero["plain"][2]
    assert (zero["buffers True"], one["buffers True"]) == (5.0, 5.0)
    assert (zero["buffers False"], one["buffers False"]) == (5.0, 6.0)


# ---------------------------------------------------------------------------- micro-batches: memory, accelerator_config
class HungryRank(Classifier):
    """Runs out of memory on rank 1 alone, in forward or in backward, above `room` samples. Has a buffer that drifts."""

    seen: torch.Tensor

    def __init__(self, room: int, where: str) -> None:
        super().__init__()
        self.room, self.where = room, where
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.add_(x.sum())
        outputs = super().forward(x, labels)
        if distributed.current().rank == 1 and len(x) > self.room:
            if self.where == "forward":
                _run_out_of_memory()
            outputs["loss"].register_hook(_run_out_of_memory)  # type: ignore[no-untyped-call]
        return outputs


def _run_out_of_memory(*_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def _hungry(folder: str, room: int, where: str, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    training = trainer(folder, ROWS, model=HungryRank(room, where), **settings)
    training.train()
    return {**final_state(training), "micro": training.state.train_batch_size}


def halved(folder: str) -> tuple[str, list[dict[str, Any]]]:
    with pytest.raises(OutOfMemoryError) as caught:
        _hungry(f"{folder}/nothing", 0, "forward", auto_find_batch_size=True, max_steps=2)
    common: dict[str, Any] = {"num_train_epochs": 2, "global_batch_size": 8, **LOGGED}
    return str(caught.value), [
        _hungry(f"{folder}/small", 9, "forward", **common, per_device_train_batch_size=1),
        *(
            _hungry(f"{folder}/{where}", 1, where, **common, auto_find_batch_size=True, ddp_timeout=20)
            for where in ("forward", "backward")
        ),
    ]


def test_one_rank_without_memory_makes_all_start_again_with_less_until_nothing_is_left(tmp_path: Path) -> None:
    for said, (small, *restarted) in run_distributed(halved, 2, str(tmp_path)):
        assert "per_device_train_batch_size = 1: Memory ran out in step 1 with a single sample" in said
        for state in restarted:
            assert state["micro"] == 1
            assert all(torch.equal(state["tensors"][name], value) for name, value in small["tensors"].items())
            assert state["logs"] == small["logs"]


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


def _exchanged(folder: str) -> list[list[bool]]:
    seen = []
    for config in (None, {"gradient_accumulation_kwargs": {"sync_each_batch": True}}):
        settings: dict[str, Any] = {"gradient_accumulation_steps": 3, "max_steps": 1, "accelerator_config": config}
        training: Any = trainer(folder, ROWS, cls=Watching, per_device_train_batch_size=2, **settings)
        training.train()
        seen.append(training.equal)
    return seen


def test_sync_each_batch_exchanges_gradients_in_every_micro_step(tmp_path: Path) -> None:
    assert run_distributed(_exchanged, 2, str(tmp_path)) == [[[False, False, True], [True, True, True]]] * 2


def _configured(folder: str) -> int:
    def configured() -> Trainer:
        return trainer(folder, ROWS, accelerator_config={"use_configured_state": True}, max_steps=1)

    with pytest.raises(ConfigError, match="use_configured_state = True: This asks for a process group"):
        configured()
    torch.distributed.init_process_group("gloo")
    try:
        training = configured()
        training.train()
        return training._trainflow.comm.world_size
    finally:
        torch.distributed.destroy_process_group()


def test_use_configured_state_takes_the_callers_process_group_or_none(tmp_path: Path) -> None:
    assert run_distributed(_configured, 2, str(tmp_path)) == [2, 2]


# ------------------------------------------------------------------------------ losses with weights, saves of one's own
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


def _weighted(folder: str, steps: int, resume: bool) -> tuple[list[str], list[float], list[str]]:
    loss = Scaled(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    settings: dict[str, Any] = {"lr_scheduler_type": "constant", "max_steps": steps, "compute_loss_func": loss}
    settings |= {"global_batch_size": 8, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}
    torch.manual_seed(0)
    model = Classifier(dropout=0.0)  # every rank would draw other masks
    training: Any = trainer(
        folder, classification_rows(24), model=model, cls=Adding, resume_from_checkpoint=resume, **settings
    )
    training.calls = []
    training.train()
    commit = read_commit(Store.open(folder).child(f"checkpoint-{steps}"))
    assert commit is not None
    added = [entry.path for entry in commit.files if entry.path.endswith(".txt")]
    weight = float(next(training.model.parameters()).detach().sum())
    return training.calls, [*loss.scale.tolist(), weight], added


def test_a_loss_with_weights_and_a_save_of_ones_own_on_two_ranks(tmp_path: Path) -> None:
    _, expected, _ = _weighted(str(tmp_path / "one"), 4, False)
    stopped = run_distributed(_weighted, 2, str(tmp_path / "two"), 2, False)
    assert [calls for calls, _, _ in stopped] == [["save_model", "_save"], ["save_model"]]
    for _, weights, added in run_distributed(_weighted, 2, str(tmp_path / "two"), 4, True):
        assert torch.allclose(torch.tensor(weights), torch.tensor(expected), rtol=1e-5)
        assert added == ["of-rank-0.txt", "of-rank-1.txt"]


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


# --------------------------------------------------------------------------------------------- metrics, outputs, pushes
class Wordy(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        outputs: dict[str, Any] = super().forward(x, labels)
        return {**outputs, "words": [f"{float(row[0]):.3f}" for row in x]}


def _measured(folder: str) -> tuple[float, float, list[Any]]:
    from torchmetrics.classification import MulticlassAccuracy

    def mistaken(p: Any, compute_result: bool) -> dict[str, float]:
        raise KeyError("a mistake in the metric")

    streamed: dict[str, Any] = {"eval_dataset": ROWS, "batch_eval_metrics": True}
    training = trainer(folder, None, compute_metrics=MulticlassAccuracy(3, average="micro"), **streamed)
    training.evaluate()
    share = training.evaluate()["eval_MulticlassAccuracy"]
    with pytest.raises(CodeError, match="a mistake in the metric"):
        trainer(folder, None, compute_metrics=mistaken, **streamed).evaluate()
    seen: list[Any] = []

    def note(p: Any) -> dict[str, float]:
        seen.append(p.predictions[1])
        return {"n": len(p.predictions[1])}

    words: dict[str, Any] = {"eval_dataset": ROWS, "compute_metrics": note, "eval_use_gather_object": True}
    training = trainer(folder, None, model=Wordy(), per_device_eval_batch_size=4, **words)
    return share, training.evaluate()["eval_n"], seen


def test_metrics_and_outputs_that_are_no_tensors_see_every_sample_once_in_order(tmp_path: Path) -> None:
    """torchmetrics' objects do not wait for other ranks, and what a metric raises is raised on every rank."""
    alone = trainer(tmp_path, None, eval_dataset=ROWS, compute_metrics=accuracy).evaluate()["eval_accuracy"]
    with loaded("torchmetrics.classification"):
        first, second = run_distributed(_measured, 2, str(tmp_path))
    assert [first[0], second[0]] == [pytest.approx(alone)] * 2
    assert first[1:] == (22, [[f"{float(row['x'][0]):.3f}" for row in ROWS]])
    assert second[1:] == (22, [])


def _pushed(folder: str) -> tuple[Any, bool]:
    hub: dict[str, Any] = {"push_to_hub": True, "hub_model_id": f"{folder}/hub", "hub_strategy": "checkpoint"}
    training = trainer(f"{folder}/out", ROWS, save_strategy="steps", save_steps=1, max_steps=2, **hub)
    training.train()
    url = training.push_to_hub("Once more", tags="mine")
    future = training.push_to_hub("And more", blocking=False)
    training._trainflow.publisher.queue.wait(unless=lambda: False)
    return url, future is None


def test_one_rank_pushes_and_every_rank_gets_the_url(tmp_path: Path) -> None:
    first, second = run_distributed(_pushed, 2, str(tmp_path))
    assert first[0] == second[0] and str(tmp_path) in first[0]
    assert (first[1], second[1]) == (False, True)
    oldest = FolderHub(str(tmp_path / "hub")).revisions()[-1]
    assert "last-checkpoint/rng/rank-00001.json" in {entry.path for entry in oldest.commit.files}


# ---------------------------------------------------------------------- the rank that keeps the others waiting is named
class Slow:
    """Rows that one rank takes long to load."""

    def __init__(self, rank: int, seconds: float) -> None:
        self._seconds = seconds if int(os.environ["RANK"]) == rank else 0.0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return ROWS[index % len(ROWS)]


def _delayed(folder: str, where: str, rank: int) -> list[str]:
    told: list[str] = []
    callback = StragglerCallback(every_s=0.1, windows=2, report=told.append)
    rows = Slow(rank, 0.01 if where == "data" else 0.0)
    training = trainer(folder, rows, callbacks=[callback], max_steps=60, per_device_train_batch_size=2, logging_steps=7)
    if where == "forward" and int(os.environ["RANK"]) == rank:
        [*training.model.modules()][-1].register_forward_pre_hook(lambda *_: time.sleep(0.02))
    training.train()
    return told


@pytest.mark.parametrize(("where", "rank"), [("data", 0), ("forward", 1)])
def test_the_rank_that_is_slow_is_named_on_the_first(where: str, rank: int, tmp_path: Path) -> None:
    first, second = run_distributed(_delayed, 2, str(tmp_path), where, rank)
    assert second == []
    # A second time only after a window in which a busy machine held the other rank up as well.
    assert {line.split(" is slow: ")[0] for line in first} == {f"Rank {rank}"}
    assert float(first[0].split("it needs ")[1].split(" ms")[0]) >= 20.0


def _judged(said: list[tuple[float, ...]]) -> list[str]:
    told: list[str] = []
    callback = StragglerCallback(windows=2, report=told.append)
    for number, times in enumerate(said):
        callback._compare([json.dumps([number, seconds]) for seconds in times])
    return told


def test_only_a_rank_that_is_slow_for_long_is_named_and_in_a_world_of_one_none(tmp_path: Path) -> None:
    assert _judged([(0.1, 0.9), (0.1, 0.1), (0.1, 0.9), (0.1, 0.1)]) == []
    assert _judged([(0.0001, 0.0009)] * 5) == []
    assert _judged([(0.1, 0.14)] * 5) == []
    [told] = _judged([(0.1, 0.1, 0.9)] * 5)
    slow, rest = told.split("; ")
    assert slow == "Rank 2 is slow: it needs 900.0 ms of its own per step, and the median is 100.0 ms"
    assert rest == "the other ranks wait for it."
    callback = StragglerCallback(every_s=0.0)
    trainer(tmp_path, ROWS, callbacks=[callback], max_steps=2).train()
    assert callback._clock is None
