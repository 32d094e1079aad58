"""Stopped on some processes, resumed on others: the same samples in every step, none lost, none twice."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.toys import Classifier, classification_rows
from tests.support.training import Note, StopAt, assert_equal, final_state, preempted_at, trainer
from trainer_lib import Trainer
from trainer_lib.errors import ConfigError, Preempted

COUNT, BATCH, EPOCHS = 50, 12, 3  # five steps an epoch, the last one of 2 samples
STEPS = EPOCHS * -(-COUNT // BATCH)
Steps = dict[int, list[int]]


def numbered() -> list[dict[str, Any]]:
    """Rows that say in their first feature which one they are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, 6, generator=generator)
    x[:, 0] = torch.arange(COUNT) / COUNT
    return [{"x": x[index], "labels": index % 3} for index in range(COUNT)]


class Recording(Trainer):
    """Notes which samples each step is trained on; what is computed at weight zero is not."""

    @property
    def seen(self) -> Steps:
        """Step -> samples, in the order in which they came."""
        found: Steps = self.__dict__.setdefault("_seen", {})
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        run = self._trainflow.run
        assert run is not None
        if run.weights.items[run.weights.micro_step]:
            indices = (inputs["x"][:, 0] * COUNT).round().int().tolist()
            self.seen.setdefault(self.state.global_step + 1, []).extend(indices)
        return super().training_step(model, inputs, num_items_in_batch)


def leg(folder: str, per_device: int, stop: int) -> tuple[Steps, list[torch.Tensor]]:
    """One rank of one leg of the way: trains from wherever it stands until `stop`."""
    given: dict[str, Any] = {"num_train_epochs": EPOCHS, "global_batch_size": BATCH, "learning_rate": 0.05}
    given |= {"per_device_train_batch_size": per_device, "train_sampling_strategy": "group_by_length"}
    rows = [{**row, "length": 1 + index % 9} for index, row in enumerate(numbered())]
    torch.manual_seed(0)
    one = trainer(folder, rows, cls=Recording, model=Classifier(dropout=0.0), **given)
    if one.is_world_process_zero():
        one.add_callback(StopAt(stop))
    with contextlib.suppress(Preempted):
        one.train("auto")
    assert isinstance(one, Recording)
    return one.seen, [p.detach().clone() for p in one.model.parameters()]


def journey(folder: Path, legs: list[tuple[int, int, int]]) -> tuple[Steps, list[torch.Tensor]]:
    """(processes, micro-batch, stop) each; what was seen in every step, over all ranks, and the weights at the end."""
    seen: Steps = {}
    weights: list[torch.Tensor] = []
    for processes, per_device, stop in legs:
        ranks = run_distributed(leg, processes, str(folder), per_device, stop)
        steps = {step for steps, _ in ranks for step in steps}
        assert steps.isdisjoint(seen), "a step was trained twice"
        seen |= {step: sorted(index for part, _ in ranks for index in part.get(step, [])) for step in steps}
        weights = ranks[0][1]
    return seen, weights


def test_one_two_three_and_one_process_train_on_the_same_samples(tmp_path: Path) -> None:
    seen, weights = journey(tmp_path / "whole", [(1, 12, 99)])
    assert sorted(seen) == list(range(1, STEPS + 1))
    for epoch in range(EPOCHS):
        steps = range(1 + epoch * STEPS // EPOCHS, 1 + (epoch + 1) * STEPS // EPOCHS)
        assert sorted(index for step in steps for index in seen[step]) == list(range(COUNT))
    legs = [(1, 5, 3), (2, 4, 6), (3, 4, 9), (1, 3, 99)]
    elsewhere, changed = journey(tmp_path / "moved", legs)
    assert elsewhere == seen
    for one, other in zip(weights, changed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def batches(folder: Path, batch: int, stop: int = 99, **given: Any) -> Recording:
    """A training of two epochs on one process; stopped after a step, or to its end."""
    settings = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "resume_from_checkpoint": "auto", **given}
    settings["per_device_train_batch_size"] = batch
    one = trainer(folder, numbered(), cls=Recording, callbacks=[StopAt(stop)], **settings)
    assert isinstance(one, Recording)
    if stop < 99:
        assert preempted_at(one) == stop
    else:
        one.train()
    return one


def test_another_global_batch_is_refused_unless_it_is_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = batches(tmp_path, 6, stop=7)  # five steps, then two of 12 in the second epoch
    with pytest.raises(ConfigError) as refused:
        batches(tmp_path, 5)
    assert str(refused.value).startswith(
        "global_batch_size = 10: The global batch was 12 when the checkpoint was written "
        "(6 per device x 2 micro-batches x 1 processes) "
        "and is 10 now (5 per device x 2 micro-batches x 1 processes)"
    )
    assert "allow_global_batch_change=True" in str(refused.value)
    before = {name: value.clone() for name, value in first.model.state_dict().items()}
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        second = batches(tmp_path, 5, allow_global_batch_change=True)
    assert (
        "training goes on at sample 20 of epoch 1 (4 samples before it are trained on a second time), and it and its "
        "schedule end at step 10." in caplog.text
    )
    assert sorted(second.seen) == [8, 9, 10]
    rest = sorted(index for step in second.seen.values() for index in step)
    known = sorted(index for step in (6, 7) for index in first.seen[step])
    assert len(rest) == 30 and len(set(rest) & set(known)) == 4
    assert set(rest) | set(known) == set(range(COUNT))
    assert second.state.epoch == 2.0 and second.state.global_step == second.state.max_steps == 10
    assert any(not torch.equal(before[name], value) for name, value in second.model.state_dict().items())


@pytest.mark.parametrize("stop", [5, 10])
def test_a_batch_changed_between_two_epochs_repeats_nothing(stop: int, tmp_path: Path) -> None:
    batches(tmp_path, 6, stop=5, num_train_epochs=3)
    if stop == 10:
        batches(tmp_path, 6, stop=10, num_train_epochs=3)
    last = batches(tmp_path, 4, num_train_epochs=3, allow_global_batch_change=True)
    epochs = 3 - stop // 5
    assert len(last.seen) == epochs * -(-COUNT // 8)
    assert sorted(index for step in last.seen.values() for index in step) == sorted([*range(COUNT)] * epochs)


FEW: dict[str, Any] = {"num_train_epochs": 3, "gradient_accumulation_steps": 2}
FEW |= {"save_strategy": "steps", "save_steps": 2}


def on_ranks(folder: str, stop: int | None) -> tuple[int, dict[str, Any] | None]:
    """One rank: trains from wherever it stands, until `stop` or to the end; where it began, and what it ended with."""
    beginning = Note("on_train_begin", lambda state, **_: state.global_step)
    one = trainer(folder, classification_rows(22), callbacks=[beginning, *([StopAt(stop)] if stop else [])], **FEW)
    with contextlib.suppress(Preempted):
        one.train("auto")
        return beginning.kept[0], final_state(one)
    return beginning.kept[0], None


def test_what_one_rank_finds_damaged_no_rank_uses(tmp_path: Path) -> None:
    whole = run_distributed(on_ranks, 2, str(tmp_path / "whole"), None)
    assert run_distributed(on_ranks, 2, str(tmp_path / "cut"), 3) == [(0, None), (0, None)]
    steps = sorted(int(path.name.rpartition("-")[2]) for path in (tmp_path / "cut").glob("checkpoint-*"))
    harmed = tmp_path / "cut" / f"checkpoint-{steps[-1]}" / "rng" / "rank-00001.json"  # the first rank does not need it
    harmed.write_bytes(harmed.read_bytes().replace(b"1", b"2"))
    resumed = run_distributed(on_ranks, 2, str(tmp_path / "cut"), None)
    for (_, before), (first, after) in zip(whole, resumed, strict=True):
        assert first == steps[-2]
        assert before is not None and after is not None
        assert_equal(before, after)
