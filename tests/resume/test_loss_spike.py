"""After a loss spike, training goes back to the checkpoint before it and skips the samples in between."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from tests.support.distributed import RemoteFailure, run_distributed
from tests.support.spikes import (
    SignalAt,
    checkpoints,
    make,
    spiky_rows,
    stop_and_resume,
    train_in_group,
    train_sharded,
)
from tests.support.training import assert_equal, final_state
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.arguments import TrainingArguments, numeric_fields
from trainer_lib.checkpoint.reader import Checkpoint, open_checkpoint
from trainer_lib.data.collators import default_data_collator
from trainer_lib.errors import ConfigError, LossSpikeError, NonFiniteError, Preempted, from_record
from trainer_lib.storage import Store

ROW = 25  # of step 7: the checkpoint before is step 4, and the log at step 9 shows the loss


def in_group(folder: Path, world: int, *spikes: int, at: int = 0, number: int = 0, **given: Any) -> list[Any]:
    """What `train_in_group` returns on each rank; one rank that is not killed runs in this process."""
    if world == 1 and number != signal.SIGKILL:
        torch.set_num_threads(1)  # as in a group
        return [train_in_group(str(folder), spikes or (ROW,), at, number, given)]
    return run_distributed(train_in_group, world, str(folder), spikes or (ROW,), at, number, given)


def stopped_and_resumed(folder: Path, world: int, at: int, **given: Any) -> list[tuple[int, list[int], Any]]:
    """What `stop_and_resume` returns on each rank."""
    if world == 1:
        return [stop_and_resume(str(folder), (ROW,), at, given)]
    return run_distributed(stop_and_resume, world, str(folder), (ROW,), at, given)


@pytest.fixture(scope="module", params=[1, 2])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    world: int = request.param
    return world, in_group(tmp_path_factory.mktemp("whole"), world)


def test_it_goes_back_and_skips_the_samples_in_between(whole: tuple[int, list[Any]]) -> None:
    """Step 7 goes back to 4, and step 17 to 16; each is found by the collection at the next save or log."""
    _, ranks = whole
    trained = sorted(row for rank in ranks for row in rank["trained"])
    assert trained == sorted([*range(32), *range(28, 40)] * 2)
    for rank in ranks:
        assert (rank["spikes"], rank["samples"]) == (2, 80 - 3 * 4 - 1 * 4)
        assert rank["spiked"][0] == (9, 1)
        assert all(math.isfinite(each["loss"]) for each in rank["end"]["logs"] if "loss" in each)
        assert all(each["loss"] < 50 for each in rank["end"]["logs"] if "loss" in each)
        assert rank["end"]["position"] == (20, 2.0)
        assert rank["end"]["groups"] == ranks[0]["end"]["groups"]


@pytest.mark.parametrize("at", [7, 9, 14])
def test_killed_and_resumed_it_ends_the_same(at: int, whole: tuple[int, list[Any]], tmp_path: Path) -> None:
    """Killed at the spike, right after the rollback, and after the next save."""
    world, ranks = whole
    with pytest.raises(RemoteFailure, match="exit code -9"):
        in_group(tmp_path, world, at=at, number=signal.SIGKILL)
    for one, other in zip(ranks, in_group(tmp_path, world), strict=True):
        assert_equal(one["end"], other["end"])


@pytest.mark.parametrize("at", [5, 9, 11])
def test_stopped_and_resumed_it_ends_the_same(at: int, whole: tuple[int, list[Any]], tmp_path: Path) -> None:
    """A stop's checkpoint is not one to go back to: an uninterrupted run does not have it."""
    world, ranks = whole
    cut = stopped_and_resumed(tmp_path, world, at)
    assert len({step for step, _, _ in cut}) == 1
    for one, (step, saved, other) in zip(ranks, cut, strict=True):
        assert step in saved
        assert_equal(one["end"], other["end"])


def test_the_checkpoint_to_go_back_to_outlives_rotation(whole: tuple[int, list[Any]], tmp_path: Path) -> None:
    world, ranks = whole
    cut = stopped_and_resumed(tmp_path, world, 5, save_total_limit=1)
    for one, (step, saved, other) in zip(ranks, cut, strict=True):
        assert saved == [4, step]
        assert_equal(one["end"], other["end"])
    assert checkpoints(tmp_path) == [20]


def test_with_saves_in_the_background_it_ends_the_same(whole: tuple[int, list[Any]], tmp_path: Path) -> None:
    world, ranks = whole
    for one, other in zip(ranks, in_group(tmp_path, world, save_async=True), strict=True):
        assert_equal(one["end"], other["end"])


def test_a_sharded_model_goes_back_too(tmp_path: Path) -> None:
    given = {"fsdp": "full_shard", "num_train_epochs": 1}
    ranks = run_distributed(train_sharded, 2, str(tmp_path / "whole"), 0, given)
    assert ranks == [(1, 28)] * 2
    with pytest.raises(RemoteFailure, match="exit code -9"):
        run_distributed(train_sharded, 2, str(tmp_path / "cut"), 9, given)
    assert run_distributed(train_sharded, 2, str(tmp_path / "cut"), 0, given) == ranks
    roots = (Store.open(tmp_path / name) for name in ("whole", "cut"))
    one, other = (open_checkpoint(root, "checkpoint-10", Checkpoint) for root in roots)
    names = [each.path for each in one.commit.files if each.path.endswith(".safetensors")]
    assert names
    assert [one.commit.entry(name) for name in names] == [other.commit.entry(name) for name in names]


@pytest.mark.parametrize("world", [1, 2])
def test_a_spike_that_repeats_ends_typed(world: int, tmp_path: Path) -> None:
    with pytest.raises(LossSpikeError, match=r"spiked at step 9 .*, after 2 rollbacks in this training") as caught:
        in_group(tmp_path, world, *range(25, 40), max_loss_spikes=2)
    assert (caught.value.exit_code, caught.value.retryable, caught.value.step) == (12, False, 9)
    assert isinstance(caught.value, NonFiniteError)
    assert type(from_record(caught.value.to_record())) is LossSpikeError
    assert checkpoints(tmp_path) == [4, 8]


def test_a_spike_before_the_first_checkpoint_goes_back_to_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = make(str(tmp_path / "spiked"), spiky_rows(ROW), save_steps=50, num_train_epochs=1)
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        done = one.train()
    assert "goes back to step 0 and skips the samples of steps 1 to 7 (rollback 1 of 3)" in caplog.text
    assert done.metrics["loss_spikes"] == 1
    assert one.model.trained == [*range(36), *range(28, 40)]


def test_the_window_has_to_be_full(tmp_path: Path) -> None:
    ends = {}
    for window in (6, 7):
        one = make(str(tmp_path / str(window)), spiky_rows(ROW), num_train_epochs=1, loss_spike_window=window)
        ends[window] = one.train().metrics.get("loss_spikes")
    assert ends == {6: 1, 7: None}


def test_without_the_setting_nothing_goes_back(tmp_path: Path) -> None:
    one = make(str(tmp_path), spiky_rows(ROW), loss_spike_sigma=None)
    done = one.train()
    assert "loss_spikes" not in done.metrics
    assert one.state.num_samples_seen == 80


def test_too_many_steps_that_are_not_finite_go_back_too(tmp_path: Path) -> None:
    bad = [row for step in (6, 7, 8) for row in range(4 * step - 4, 4 * step)]
    one = make(str(tmp_path), spiky_rows(*bad, scale=math.nan), num_train_epochs=1, max_nonfinite_steps=3)
    done = one.train()
    assert (done.metrics["loss_spikes"], one.state.num_samples_seen) == (1, 40 - 4 * 4)
    assert "nonfinite_steps" not in done.metrics


def test_a_checkpoint_among_steps_that_are_not_finite_is_not_one_to_go_back_to(tmp_path: Path) -> None:
    bad = [row for step in (7, 8, 9) for row in range(4 * step - 4, 4 * step)]
    one = make(str(tmp_path), spiky_rows(*bad, scale=math.nan), num_train_epochs=1, max_nonfinite_steps=3)
    done = one.train()
    assert (done.metrics["loss_spikes"], one.state.num_samples_seen) == (1, 40 - 5 * 4)  # from step 4, not from 8


def test_a_stream_reads_on_past_the_skipped_samples(tmp_path: Path) -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(spiky_rows(ROW))

    one = make(str(tmp_path), Rows(), max_steps=10)
    assert one.train().metrics["loss_spikes"] == 1
    assert one.model.trained == [*range(32), *range(28, 40)]


def test_a_run_stopped_before_its_first_save_goes_back_to_the_start(tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_steps": 50, "num_train_epochs": 1}
    whole = make(str(tmp_path / "whole"), spiky_rows(ROW), **given)
    whole.train()
    with pytest.raises(Preempted):
        make(str(tmp_path / "cut"), spiky_rows(ROW), SignalAt(3, signal.SIGTERM), **given).train()
    resumed = make(str(tmp_path / "cut"), spiky_rows(ROW), **given)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(final_state(resumed), final_state(whole))
    assert checkpoints(tmp_path / "cut") == [10]


def test_a_rollback_goes_to_the_position_also_where_a_resume_does_not(tmp_path: Path) -> None:
    one = make(str(tmp_path), spiky_rows(ROW), num_train_epochs=1, ignore_data_skip=True)
    assert one.train().metrics["loss_spikes"] == 1
    assert one.model.trained == [*range(32), *range(28, 40)]


def test_checkpoints_that_a_rollback_takes_back_are_removed(tmp_path: Path) -> None:
    """Saves at 6 and 8 lie among steps that are not finite; a kill after the rollback must not resume from them."""

    class Killed(Exception):
        pass

    class KillAt(TrainerCallback):
        taken = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.taken += 1
            if self.taken == 12:  # 9 steps, and 5 to 7 once more
                raise Killed

    given: dict[str, Any] = {"num_train_epochs": 1, "save_steps": 2, "max_nonfinite_steps": 5, "save_total_limit": 1}
    rows = spiky_rows(*range(16, 36), scale=math.nan)
    whole = make(str(tmp_path / "whole"), rows, **given)
    assert whole.train().metrics["loss_spikes"] == 1
    with pytest.raises(Killed):
        make(str(tmp_path / "cut"), rows, KillAt(), **given).train()
    assert checkpoints(tmp_path / "cut") == [6]
    resumed = make(str(tmp_path / "cut"), rows, **given)
    resumed.train(resume_from_checkpoint="auto")
    assert_equal(final_state(resumed), final_state(whole))


class Continuing:
    """A loader with a state that goes on where the last reader stopped."""

    batch_size = 4

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.at = rows, 0

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


def shuffling(rows: list[Any]) -> Any:
    return DataLoader(rows, batch_size=4, shuffle=True, collate_fn=default_data_collator)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [shuffling, Continuing])
def test_a_loader_of_the_users_own_gives_the_same_samples_again(kind: Callable[[Any], Any], tmp_path: Path) -> None:
    """An override may return the same loader for every attempt; back at the start, the order is that of the spike."""
    order = list(range(40))
    if kind is shuffling:
        order = list(RandomSampler(order, generator=torch.Generator().manual_seed(42)))

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    rows = spiky_rows(order[24])
    loader = kind(rows)
    one = make(str(tmp_path), rows, cls=Own, save_steps=50, num_train_epochs=1)
    assert one.train().metrics["loss_spikes"] == 1
    assert one.model.trained == [*order[:36], *order[28:]]


def test_the_key_has_the_settings_only_when_a_spike_goes_back() -> None:
    def key(**given: Any) -> dict[str, Any]:
        return numeric_fields(TrainingArguments("out", **given), data_parallel_size=1)

    assert key(loss_spike_window=7, max_loss_spikes=9, save_steps=3) == key()
    assert not any("spike" in name for name in key())
    assert key(loss_spike_sigma=6.0) != key()
    assert key(loss_spike_sigma=6.0, save_steps=3) != key(loss_spike_sigma=6.0)
    assert key(loss_spike_sigma=6.0, max_loss_spikes=9) == key(loss_spike_sigma=6.0)


def test_checkpoints_that_cannot_be_continued_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_spike_sigma = 6\.0: A loss spike goes back to a checkpoint"):
        TrainingArguments("out", loss_spike_sigma=6.0, save_only_model=True)
