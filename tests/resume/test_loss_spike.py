"""After a loss spike, training goes back to the checkpoint before it and skips the samples in between."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.support.checkpoints import checkpoints
from tests.support.distributed import RemoteFailure, run_distributed
from tests.support.toys import Classifier, classification_rows
from tests.support.training import Note, arguments, assert_equal, final_state
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.arguments import TrainingArguments
from trainer_lib.checkpoint.reader import open_checkpoint
from trainer_lib.data.loading.collators import default_data_collator
from trainer_lib.distributed import communicator as distributed
from trainer_lib.errors import ConfigError, LossSpikeError, NonFiniteError, Preempted, from_record
from trainer_lib.storage import Store

ROW = 25  # of step 7: the checkpoint before is step 4, and the log at step 9 shows the loss
#: 40 rows, 10 steps per epoch: step s of an epoch has rows 4s-4 … 4s-1.
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 2, "global_batch_size": 4, "num_train_epochs": 2}
SETTINGS |= {"train_sampling_strategy": "sequential", "lr_scheduler_type": "linear", "warmup_steps": 2}
SETTINGS |= {"logging_strategy": "steps", "logging_steps": 3, "save_strategy": "steps", "save_steps": 4}
SETTINGS |= {"loss_spike_sigma": 20.0, "loss_spike_window": 4}


class Scaled(Classifier):
    """Multiplies its loss by the largest scale in the batch, and notes the rows that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []

    def forward(self, x: Any, labels: Any = None, scale: Any = None, row: Any = None) -> dict[str, torch.Tensor]:
        out = super().forward(x, labels)
        if self.training and row is not None:
            self.trained += row.tolist()
        return out if scale is None else {**out, "loss": out["loss"] * scale.max()}


class Killed(BaseException):
    """Ends a training without a last save, in the test's process."""


def end_at(count: int, how: int) -> TrainerCallback:
    """At the end of the n-th step that is taken, those before a rollback counted: a signal, or `Killed` for 0."""
    taken: list[int] = []

    def end(state: Any, **_: Any) -> None:
        taken.append(state.global_step)
        if len(taken) == count and how == 0:
            raise Killed
        if len(taken) == count:
            os.kill(os.getpid(), how)

    return Note("on_step_end", end)


def spiky_rows(*spikes: int, count: int = 40, scale: float = 1000.0) -> list[dict[str, Any]]:
    """Rows of which those numbered in `spikes` have a loss that is `scale` times as large."""
    rows = classification_rows(count)
    return [
        {**row, "scale": torch.tensor(scale if number in spikes else 1.0), "row": number}
        for number, row in enumerate(rows)
    ]


def make(folder: str, rows: Any, *callbacks: TrainerCallback, cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
    """A Trainer around `Scaled`, always with the same initial weights; dropout is on."""
    torch.manual_seed(0)
    args = arguments(folder, **{**SETTINGS, **given})
    return cls(Scaled(), args, train_dataset=rows, callbacks=list(callbacks))


def train_in_group(folder: str, spikes: tuple[int, ...], at: int, how: int, given: dict[str, Any]) -> dict[str, Any]:
    """On each rank: continue the training in `folder`, and return what it ended with.

    Args:
        spikes: rows whose loss spikes.
        at: the step, counted as they are taken, at whose end a process gets the signal `how`; 0 = none. Every rank
            gets a SIGKILL, only the last one a SIGTERM.
        given: further training arguments.
    """
    trainer = make(folder, spiky_rows(*spikes), **given)
    last = trainer.args.process_index == trainer.args.world_size - 1
    if at and (how != signal.SIGTERM or last):
        trainer.add_callback(end_at(at, how))
    try:
        done = trainer.train(resume_from_checkpoint="auto")
    except Preempted as stopped:
        return {"stopped": stopped.step}
    model: Any = trainer.model
    end = {} if "fsdp" in given else final_state(trainer)
    spiked = [(entry["step"], entry["loss_spikes"]) for entry in trainer.state.log_history if "loss_spikes" in entry]
    found = {"end": end, "spiked": spiked, "trained": getattr(model, "trained", None)}
    found |= {"samples": trainer.state.num_samples_seen, "spikes": done.metrics.get("loss_spikes")}
    if "fsdp" in given:
        distributed.shutdown()
    return found


def stop_and_resume(folder: str, at: int, given: dict[str, Any]) -> tuple[int, list[int], dict[str, Any]]:
    """On each rank: stop at step `at` and resume; the step and the checkpoints of the stop, and what it ended with."""
    stopped = train_in_group(folder, (ROW,), at, signal.SIGTERM, given)["stopped"]
    found = checkpoints(Path(folder))
    distributed.init(arguments(folder)).barrier()  # before another rank saves
    return stopped, found, train_in_group(folder, (ROW,), 0, 0, given)


def in_group(folder: Path, world: int, *spikes: int, at: int = 0, how: int = 0, **given: Any) -> list[Any]:
    """What `train_in_group` returns on each rank; one rank runs in this process."""
    words = (str(folder), spikes or (ROW,), at, how, given)
    if world > 1:
        return run_distributed(train_in_group, world, *words)
    torch.set_num_threads(1)  # as in a group
    return [train_in_group(*words)]


@pytest.fixture(scope="module", params=[1, 2])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    world: int = request.param
    return world, in_group(tmp_path_factory.mktemp("whole"), world)


def test_it_goes_back_and_skips_the_samples_in_between(whole: tuple[int, list[Any]]) -> None:
    """Step 7 goes back to 4, and step 17 to 16; each is found by the collection at the next save or log."""
    _, ranks = whole
    assert sorted(row for rank in ranks for row in rank["trained"]) == sorted([*range(32), *range(28, 40)] * 2)
    for rank in ranks:
        assert (rank["spikes"], rank["samples"]) == (2, 80 - 3 * 4 - 1 * 4)
        assert rank["spiked"][0] == (9, 1)
        assert all(math.isfinite(each["loss"]) for each in rank["end"]["logs"] if "loss" in each)
        assert all(each["loss"] < 50 for each in rank["end"]["logs"] if "loss" in each)
        assert rank["end"]["position"] == (20, 2.0)
        assert rank["end"]["groups"] == ranks[0]["end"]["groups"]


@pytest.mark.parametrize(("whole", "at"), [(1, 7), (1, 9), (1, 14), (2, 9)], indirect=["whole"])
def test_killed_and_resumed_it_ends_the_same(at: int, whole: tuple[int, list[Any]], tmp_path: Path) -> None:
    """Killed at the spike, right after the rollback, and after the next save; two ranks at the second, by SIGKILL."""
    world, ranks = whole
    with pytest.raises(Killed if world == 1 else RemoteFailure, match=None if world == 1 else "exit code -9"):
        in_group(tmp_path, world, at=at, how=0 if world == 1 else signal.SIGKILL)
    for ours, theirs in zip(ranks, in_group(tmp_path, world), strict=True):
        assert_equal(ours["end"], theirs["end"])


@pytest.mark.parametrize(("at", "given"), [(5, {"save_total_limit": 1}), (9, {}), (11, {})])
def test_stopped_and_resumed_it_ends_the_same(
    at: int, given: dict[str, Any], whole: tuple[int, list[Any]], tmp_path: Path
) -> None:
    """A stop's checkpoint is not one to go back to: an uninterrupted run does not have it."""
    world, ranks = whole
    words = (str(tmp_path), at, given)
    cut = [stop_and_resume(*words)] if world == 1 else run_distributed(stop_and_resume, world, *words)
    assert len({step for step, _, _ in cut}) == 1
    for ours, (step, saved, theirs) in zip(ranks, cut, strict=True):
        assert step in saved
        assert_equal(ours["end"], theirs["end"])
        if given:  # what to go back to outlives rotation
            assert saved == [4, step]
            assert checkpoints(tmp_path) == [20]


def test_with_saves_in_the_background_it_ends_the_same(whole: tuple[int, list[Any]], tmp_path: Path) -> None:
    world, ranks = whole
    for ours, theirs in zip(ranks, in_group(tmp_path, world, save_async=True), strict=True):
        assert_equal(ours["end"], theirs["end"])


def test_a_sharded_model_goes_back_too(tmp_path: Path) -> None:
    given: dict[str, Any] = {"fsdp": "full_shard", "num_train_epochs": 1}
    ranks = in_group(tmp_path / "whole", 2, **given)
    assert [(rank["spikes"], rank["samples"]) for rank in ranks] == [(1, 28)] * 2
    with pytest.raises(RemoteFailure, match="exit code -9"):
        in_group(tmp_path / "cut", 2, at=9, how=signal.SIGKILL, **given)
    again = in_group(tmp_path / "cut", 2, **given)
    assert [(rank["spikes"], rank["samples"]) for rank in again] == [(1, 28)] * 2
    roots = (Store.open(tmp_path / name) for name in ("whole", "cut"))
    ours, theirs = (open_checkpoint(root, "checkpoint-10").commit for root in roots)
    names = [entry.path for entry in ours.files if entry.path.endswith(".safetensors")]
    assert names
    assert [ours.entry(name) for name in names] == [theirs.entry(name) for name in names]


@pytest.mark.parametrize("world", [1, 2])
def test_a_spike_that_repeats_ends_typed(world: int, tmp_path: Path) -> None:
    with pytest.raises(LossSpikeError, match=r"spiked at step 9 .*, after 2 rollbacks in this training") as caught:
        in_group(tmp_path, world, *range(25, 40), max_loss_spikes=2)
    assert (caught.value.exit_code, caught.value.retryable, caught.value.step) == (12, False, 9)
    assert isinstance(caught.value, NonFiniteError)
    assert type(from_record(caught.value.to_record())) is LossSpikeError
    assert checkpoints(tmp_path) == [4, 8]


class Continuing:
    """A loader with a state that resumes where the last reader stopped."""

    batch_size = 4

    def __init__(self) -> None:
        self.rows, self.at = spiky_rows(ROW), 0

    def __len__(self) -> int:
        return len(self.rows) // 4

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.rows):
            self.at += 4
            yield default_data_collator(self.rows[self.at - 4 : self.at])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OwnLoader(Trainer):
    """Gives the same loader of the user's for every attempt."""

    def get_train_dataloader(self) -> Any:
        return self.__dict__.setdefault("loader", Continuing())


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(spiky_rows(ROW))


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        pytest.param({"save_steps": 50, "num_train_epochs": 1}, 36, id="before the first checkpoint, to the start"),
        pytest.param({"save_steps": 50, "num_train_epochs": 1, "cls": OwnLoader}, 36, id="a loader of the user's"),
        pytest.param({"rows": Rows(), "max_steps": 10}, 32, id="a stream"),
        pytest.param({"num_train_epochs": 1, "ignore_data_skip": True}, 32, id="where a resume does not skip"),
    ],
)
def test_the_samples_after_the_spike_follow(
    changes: dict[str, Any], first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"rows": spiky_rows(ROW), **changes}
    one = make(str(tmp_path), settings.pop("rows"), **settings)
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        assert one.train().metrics["loss_spikes"] == 1
    assert one.model.trained == [*range(first), *range(28, 40)]
    if first == 36:
        assert "goes back to step 0 and skips the samples of steps 1 to 7 (rollback 1 of 3)" in caplog.text


def test_the_window_has_to_be_full(tmp_path: Path) -> None:
    ends = {}
    for window in (6, 7):
        one = make(str(tmp_path / str(window)), spiky_rows(ROW), num_train_epochs=1, loss_spike_window=window)
        ends[window] = one.train().metrics.get("loss_spikes")
    assert ends == {6: 1, 7: None}


def test_without_the_setting_nothing_goes_back(tmp_path: Path) -> None:
    one = make(str(tmp_path), spiky_rows(ROW), loss_spike_sigma=None)
    assert "loss_spikes" not in one.train().metrics
    assert one.state.num_samples_seen == 80


@pytest.mark.parametrize(("steps", "skipped"), [((6, 7, 8), 4), ((7, 8, 9), 5)])
def test_too_many_steps_that_are_not_finite_go_back_too(steps: tuple[int, ...], skipped: int, tmp_path: Path) -> None:
    """From step 4: a checkpoint among them (8) is not one to go back to."""
    bad = [row for step in steps for row in range(4 * step - 4, 4 * step)]
    one = make(str(tmp_path), spiky_rows(*bad, scale=math.nan), num_train_epochs=1, max_nonfinite_steps=3)
    done = one.train()
    assert (done.metrics["loss_spikes"], one.state.num_samples_seen) == (1, 40 - skipped * 4)
    assert "nonfinite_steps" not in done.metrics


def test_a_run_stopped_before_its_first_save_goes_back_to_the_start(tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_steps": 50, "num_train_epochs": 1}
    whole = make(str(tmp_path / "whole"), spiky_rows(ROW), **given)
    whole.train()
    with pytest.raises(Preempted):
        make(str(tmp_path / "cut"), spiky_rows(ROW), end_at(3, signal.SIGTERM), **given).train()
    resumed = make(str(tmp_path / "cut"), spiky_rows(ROW), **given)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(final_state(resumed), final_state(whole))
    assert checkpoints(tmp_path / "cut") == [10]


def test_checkpoints_that_a_rollback_takes_back_are_removed(tmp_path: Path) -> None:
    """Saves at 6 and 8 lie among steps that are not finite; a kill after the rollback must not resume from them."""
    given: dict[str, Any] = {"num_train_epochs": 1, "save_steps": 2, "max_nonfinite_steps": 5, "save_total_limit": 1}
    rows = spiky_rows(*range(16, 36), scale=math.nan)
    whole = make(str(tmp_path / "whole"), rows, **given)
    assert whole.train().metrics["loss_spikes"] == 1
    with pytest.raises(Killed):
        make(str(tmp_path / "cut"), rows, end_at(12, 0), **given).train()  # 9 steps, and 5 to 7 once more
    assert checkpoints(tmp_path / "cut") == [6]
    resumed = make(str(tmp_path / "cut"), rows, **given)
    resumed.train(resume_from_checkpoint="auto")
    assert_equal(final_state(resumed), final_state(whole))


def test_checkpoints_that_cannot_be_continued_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_spike_sigma = 6\.0: A loss spike goes back to a checkpoint"):
        TrainingArguments("out", loss_spike_sigma=6.0, save_only_model=True)
