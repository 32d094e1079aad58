"""Loaders start at any step at once, seed randomness per sample, and share data out to ranks without loss."""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, TensorDataset

from tests.support.toys import Augmented, StatefulStream, Stream, classification_rows
from trainer_lib.data.loading.collators import default_data_collator
from trainer_lib.data.loading.foreign import ForeignLoader
from trainer_lib.data.loading.items import count_samples
from trainer_lib.data.loading.iterable import IterableLoader, Shares
from trainer_lib.data.loading.loader import EvalLoader, TrainLoader, is_pure
from trainer_lib.data.loading.order import BatchPlan, RandomOrder
from trainer_lib.errors import ConfigError

ROWS = classification_rows(23)
MORE = classification_rows(24)
THREE = torch.zeros(3)


def read(loader: Any, epoch: int = 0, step: int = 0) -> list[tuple[list[float], bool]]:
    return [(micro.batch["x"].flatten().tolist(), micro.real) for micro in loader.micros(epoch, step)]


def shuffled() -> DataLoader[Any]:
    return DataLoader(ROWS, batch_size=2, shuffle=True, collate_fn=default_data_collator)  # type: ignore[arg-type]


def foreign(loader: Any, world: int = 1, rank: int = 0) -> ForeignLoader:
    return ForeignLoader(loader, accumulation=2, data_parallel_size=world, rank=rank, seed=1, drop_last=False)


def train_loader(
    dataset: Any,
    *,
    world: int = 1,
    rank: int = 0,
    micro: int = 2,
    batch: int = 4,
    workers: int = 0,
    collate: Any = None,
) -> TrainLoader:
    given: dict[str, Any] = {"global_batch": batch, "micro_batch": micro, "data_parallel_size": world, "rank": rank}
    plan, order = BatchPlan.cut(len(dataset), drop_last=False, **given), RandomOrder(len(dataset), seed=5)
    given = {"collate": collate or default_data_collator, "options": {"num_workers": workers}}
    return TrainLoader(dataset, order=order, plan=plan, seed=1, **given)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_start_at_any_step_and_reads_nothing_before_it(workers: int) -> None:
    whole = read(train_loader(Augmented(ROWS), workers=workers))
    assert read(train_loader(Augmented(ROWS), workers=workers), step=3) == whole[6:]
    dataset = Augmented(ROWS)
    next(train_loader(dataset).micros(0, 5))
    assert len(dataset.read) == 2


def test_randomness_in_a_sample_depends_on_seed_epoch_and_sample_only() -> None:
    def by_sample(loader: TrainLoader, epoch: int) -> set[tuple[float, ...]]:
        batches = (micro.batch["x"] for micro in loader.micros(epoch, 0) if micro.real)
        return {tuple(row) for batch in batches for row in batch.tolist()}

    one = by_sample(train_loader(Augmented(ROWS)), 0)
    assert one == by_sample(train_loader(Augmented(ROWS), micro=3, batch=7), 0)
    assert one == by_sample(train_loader(Augmented(ROWS), workers=2), 0)
    halves = [by_sample(train_loader(Augmented(ROWS), world=2, rank=rank), 0) for rank in (0, 1)]
    assert halves[0] | halves[1] == one
    assert one.isdisjoint(by_sample(train_loader(Augmented(ROWS)), 1))


class Sometimes(Augmented):
    """Draws for few of its samples only, and then may fail."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 7 == 5:
            return super().__getitem__(index)
        self.read.append(index)
        return {"x": self.rows[index]["x"] + 0.5, "labels": self.rows[index]["labels"]}


def test_samples_of_which_few_are_random_are_read_as_if_all_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]

    before, dataset = states(), Sometimes(ROWS)
    unwatched = read(train_loader(dataset, micro=1))
    assert states() == before
    assert len(ROWS) < len(dataset.read) <= len(ROWS) + 1  # the first random one twice
    monkeypatch.setattr("trainer_lib.data.loading.loader.watch_generators", lambda: None)
    assert read(train_loader(Sometimes(ROWS), micro=1)) == unwatched


def test_a_sample_that_fails_by_chance_fails_again_under_its_own_seed() -> None:
    class Failing(Augmented):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 5 and random.random() < 2:
                raise ValueError(f"drew {random.random()}")
            return {"labels": index}

    def message(start: int) -> str:
        state = random.getstate()
        with pytest.raises(ValueError, match="drew") as caught:
            list(train_loader(Failing(ROWS), micro=1).micros(0, start))
        assert random.getstate() == state
        return str(caught.value)

    assert message(0) == message(1)


def test_loading_does_not_disturb_the_generators_that_dropout_draws_from() -> None:
    def draws() -> tuple[float, float, float]:
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    for build in (
        lambda: train_loader(Augmented(ROWS)).micros(0, 0),
        lambda: train_loader(Augmented(ROWS), workers=1).micros(0, 0),
        lambda: iterable(Stream(ROWS)).micros(0, 0),
        lambda: foreign(shuffled()).micros(0, 3),
    ):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        expected = draws()
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        next(build())  # type: ignore[no-untyped-call]
        assert draws() == expected


def test_a_collator_that_draws_is_seeded_as_well() -> None:
    def masking(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(len(rows), 2)}

    assert read(train_loader(ROWS, collate=masking), step=2) == read(train_loader(ROWS, collate=masking))[4:]
    assert read(train_loader(ROWS, collate=masking, workers=1)) == read(train_loader(ROWS, collate=masking))


def test_a_rank_without_samples_gets_a_filler_and_the_same_number_of_micro_batches() -> None:
    ranks = [read(train_loader(ROWS[:5], world=3, rank=rank, micro=1, batch=3)) for rank in range(3)]
    # 5 samples: the second step has 2 of 3
    assert [[real for _, real in rank] for rank in ranks] == [[True, True], [True, True], [True, False]]


class Batched(Augmented):
    calls = 0

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.calls += 1
        return [self[index] for index in indices]


def test_datasets_that_read_many_rows_at_once_are_asked_once_per_batch() -> None:
    dataset = Batched(ROWS)
    whole = read(train_loader(dataset))
    assert dataset.calls == len(whole)
    assert read(train_loader(Batched(ROWS)), step=2) == whole[4:]


def test_pure_data_is_known_through_subsets_and_by_its_own_word() -> None:
    assert is_pure(ROWS) and is_pure(Subset(TensorDataset(torch.zeros(3)), [0, 1]))
    assert not is_pure(Augmented(ROWS))
    # A Subset reads one by one what its dataset reads one by one, and is seeded accordingly.
    sub = Subset(Augmented(ROWS), list(range(8)))
    assert read(train_loader(sub, micro=1)) == read(train_loader(Augmented(ROWS[:8]), micro=1))


def test_a_position_in_another_order_or_under_another_batch_is_refused() -> None:
    state = train_loader(ROWS).state()
    train_loader(ROWS, world=2, micro=1).load_state(state, epoch=0, step=3)
    with pytest.raises(ConfigError, match=r"global_batch_size = 8: The value was 4 when"):
        train_loader(ROWS, batch=8).load_state(state, epoch=0, step=3)
    with pytest.raises(ConfigError, match="train_dataset"):
        train_loader(ROWS[:22]).load_state(state, epoch=0, step=3)


def test_starting_ten_million_samples_in_costs_what_starting_at_ten_does() -> None:
    class Huge:
        is_pure = True

        def __len__(self) -> int:
            return 20_000_000

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"x": index}

    def first_batch(step: int) -> float:
        started = time.perf_counter()
        next(train_loader(Huge(), batch=8, micro=8).micros(0, step))
        return time.perf_counter() - started

    first_batch(0)
    # Not a benchmark: replaying ten million positions would take seconds, not a fraction of one.
    assert min(first_batch(1_250_000) for _ in range(3)) < 10 * min(first_batch(1) for _ in range(3)) + 0.1


# ---------------------------------------------------------------------------------------------------------- evaluation
@pytest.mark.parametrize(("count", "batch", "world"), [(23, 4, 3), (2, 4, 3), (24, 4, 2), (1, 1, 4)])
def test_evaluation_rows_are_shared_out_in_order_and_none_twice(count: int, batch: int, world: int) -> None:
    loaders = [eval_loader(MORE[:count], batch=batch, world=world, rank=rank) for rank in range(world)]
    assert len({loader.rounds for loader in loaders}) == 1
    rows = sorted(row for loader in loaders for start, stop in loader.slices for row in range(start, stop))
    assert rows == list(range(count))
    assert sum(len(batch["labels"]) for loader in loaders for batch in loader) == count


# ------------------------------------------------------------------------------------------------------------ streams
def eval_loader(dataset: Any, *, batch: int = 1, world: int = 1, rank: int = 0) -> EvalLoader:
    given: dict[str, Any] = {"data_parallel_size": world, "rank": rank, "options": {}}
    return EvalLoader(dataset, batch_size=batch, collate=default_data_collator, seed=0, **given)


def test_batches_read_ahead_in_evaluation_are_those_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_lib.data.loading.loader._QUICK_S", 10.0)  # seconds: however slow the machine is
    state, dataset = random.getstate(), Sometimes(MORE)
    batches = iter(eval_loader(dataset))
    next(batches), next(batches)
    assert len(dataset.read) > 3  # quick samples come a few at a time
    ahead = [batch["x"].tolist() for batch in eval_loader(Sometimes(MORE))]
    assert random.getstate() == state
    monkeypatch.setattr("trainer_lib.data.loading.loader.watch_generators", lambda: None)
    assert [batch["x"].tolist() for batch in eval_loader(Sometimes(MORE))] == ahead


def test_training_data_is_read_when_its_step_comes() -> None:
    dataset = Sometimes(MORE)
    batches = train_loader(dataset, micro=1).micros(0, 0)
    for count in range(1, 5):  # what a callback changes in the data must hold from the next step on
        next(batches)
        assert len(set(dataset.read)) == count


def iterable(
    stream: Any, *, world: int = 1, rank: int = 0, workers: int = 0, drop_last: bool = False
) -> IterableLoader:
    given: dict[str, Any] = {"global_batch": 4, "micro_batch": 2, "data_parallel_size": world, "rank": rank, "seed": 3}
    shares = Shares(stream, default_data_collator, **given)
    return IterableLoader(shares, drop_last=drop_last, options={"num_workers": workers})


def test_a_stream_is_shared_out_to_ranks_without_loss_and_ends_together() -> None:
    alone = [x for x, _ in read(iterable(StatefulStream(ROWS[:22])))]
    ranks = [read(iterable(StatefulStream(ROWS[:22]), world=2, rank=rank)) for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1])
    dealt = [x for pair in zip(*ranks, strict=True) for x, real in pair if real]
    assert list(itertools.chain(*alone)) == list(itertools.chain(*dealt))
    assert not ranks[1][-1][1]  # the last round has two samples, both rank 0's


def test_a_stream_tells_its_length_where_it_has_one_and_drops_a_last_batch_when_asked() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return len(self.rows)

    assert iterable(Sized(ROWS)).steps_per_epoch == 6 and iterable(Sized(ROWS), drop_last=True).steps_per_epoch == 5
    assert iterable(Stream(ROWS)).steps_per_epoch is None and len(read(iterable(Stream(ROWS), drop_last=True))) == 10
    assert len(list(iterable(Stream(ROWS)))) == 12


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_state_is_read_again_and_says_so(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    whole = read(iterable(Stream(ROWS), workers=workers), epoch=1)
    loader = iterable(Stream(ROWS), workers=workers)
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        loader.load_state(iterable(Stream(ROWS)).state(), epoch=1, step=3)
    assert "reading and discarding 12 samples (6 batches) up to the position" in caplog.text
    assert read(loader, epoch=1, step=3) == whole[6:]


def test_a_stream_with_state_is_put_back_where_it_was() -> None:
    loader = iterable(StatefulStream(ROWS))
    micros = loader.micros(1, 0)
    before = [next(micros).batch["labels"].tolist() for _ in range(6)]
    state = loader.state()
    rest = [micro.batch["labels"].tolist() for micro in micros]
    stream = StatefulStream(ROWS)
    resumed = iterable(stream)
    resumed.load_state(state, epoch=1, step=3)
    assert [micro.batch["labels"].tolist() for micro in resumed.micros(1, 3)] == rest
    assert stream.started_at == [12]
    assert before + rest == [micro.batch["labels"].tolist() for micro in iterable(StatefulStream(ROWS)).micros(1, 0)]


def test_a_stream_with_a_generator_is_reseeded_every_epoch() -> None:
    class Generated(Stream):
        def __init__(self) -> None:
            super().__init__(ROWS[:8])
            self.generator = torch.Generator()
            self.set_epoch = None  # type: ignore[assignment,method-assign]

        def __iter__(self) -> Any:
            for index in torch.randperm(8, generator=self.generator).tolist():
                yield self.rows[index]

    loader = iterable(Generated())
    first, second = read(loader, epoch=0), read(loader, epoch=1)
    assert first != second
    assert read(iterable(Generated()), epoch=1) == second


def test_a_loader_of_ones_own_is_dealt_out_to_ranks_in_one_order() -> None:
    alone = [x for x, _ in read(foreign(shuffled()), epoch=1)]
    ranks = [read(foreign(shuffled(), 2, rank), epoch=1) for rank in (0, 1)]
    assert [x for pair in zip(*ranks, strict=True) for x, _ in pair] == alone
    assert foreign(shuffled()).steps_per_epoch == 6
    assert alone != [x for x, _ in read(foreign(shuffled()), epoch=0)]
    assert read(foreign(shuffled()), epoch=1, step=2) == read(foreign(shuffled()), epoch=1)[4:]
    batches = BatchSampler(SequentialSampler(ROWS), batch_size=2, drop_last=False)
    loader: DataLoader[Any] = DataLoader(ROWS, batch_sampler=batches)  # type: ignore[arg-type]
    assert foreign(loader).step_samples(0) == 4, "a batch sampler says how large a step is"


def test_epochs_of_a_loader_with_a_generator_are_those_of_torch_also_after_a_resume() -> None:
    def own() -> tuple[DataLoader[Any], torch.Generator]:
        generator = torch.Generator().manual_seed(7)
        batches = BatchSampler(RandomSampler(ROWS, generator=generator), batch_size=2, drop_last=False)
        return DataLoader(ROWS, batch_sampler=batches, collate_fn=default_data_collator), generator  # type: ignore[arg-type]

    def resumed(state: dict[str, Any], step: int = 0) -> tuple[list[Any], list[int]]:
        loader, generator = own()
        source = foreign(loader)
        source.load_state(json.loads(json.dumps(state)), epoch=1, step=step)
        return [x for x, _ in read(source, epoch=1, step=step)], generator.get_state().tolist()

    plain, drawn = own()
    first, second = ([batch["x"].flatten().tolist() for batch in plain] for _ in range(2))
    loader, generator = own()
    source, given = foreign(loader), generator.get_state()
    assert [x for x, _ in read(source)] == first and resumed(source.state()) == (second, drawn.get_state().tolist())
    micros = source.micros(1, 0)
    next(micros), next(micros)
    torch.rand(1, generator=generator)  # as an evaluation may do
    stopped = source.state()
    list(micros)
    assert resumed(stopped, step=1) == (second[2:], generator.get_state().tolist())
    source.close()
    assert torch.equal(generator.get_state(), given)


def test_a_closed_source_leaves_the_loader_as_it_was() -> None:
    """Another source of the same loader gives the same epochs, as after a rollback to the start."""
    generator = torch.Generator().manual_seed(7)
    rows: Any = ROWS
    order = RandomSampler(rows, generator=generator)
    seeded: DataLoader[Any] = DataLoader(rows, batch_size=2, sampler=order, collate_fn=default_data_collator)
    for loader in (shuffled(), seeded):
        first = foreign(loader)
        epochs = [read(first, epoch=epoch) for epoch in (0, 1)]
        next(first.micros(1, 0))
        first.close()
        again = foreign(loader)
        assert [read(again, epoch=epoch) for epoch in (0, 1)] == epochs


def test_a_loader_with_state_is_put_back() -> None:
    class Stateful:
        def __init__(self) -> None:
            self.at = 0
            self.batch_size = 1

        def __iter__(self) -> Any:
            while self.at < 6:
                self.at += 1
                yield {"x": torch.tensor([float(self.at)])}
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    source = foreign(Stateful())
    micros = source.micros(0, 0)
    next(micros), next(micros)
    resumed = foreign(Stateful())
    resumed.load_state(source.state(), epoch=0, step=1)
    assert [x for x, _ in read(resumed, step=1)] == [[3.0], [4.0], [5.0], [6.0]]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.zeros(4, 2), "names": ["a", "b"]}, 4),
        ({"features": {"x": torch.zeros(4, 2)}, "names": ["a", "b"]}, 4),
        ({"label": [THREE, THREE], "texts": ["a", "b"]}, 2),
        ({"label": [THREE, THREE], "texts": [["a", "b", "c"], ["d", "e", "f"]]}, 2),
        ({"inputs": [THREE, THREE]}, 3),
        (["a", "b"], 2),
        ([{"x": THREE}, {"x": THREE}], 2),
        (3.5, None),
    ],
)
def test_samples_are_counted_by_tensors_else_by_texts(batch: Any, expected: int | None) -> None:
    assert count_samples(batch) == expected
