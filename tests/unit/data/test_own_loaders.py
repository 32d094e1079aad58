"""DataLoaders that the user built: dealt out to ranks, resumed, and ordered by the epoch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from tests.support.loaders import ROWS, foreign, read, shuffled
from trainer_lib.data.collators import default_data_collator


def test_a_loader_of_ones_own_is_dealt_out_to_ranks_in_one_order() -> None:
    alone = [x for x, _ in read(foreign(shuffled()), epoch=1)]
    ranks = [read(foreign(shuffled(), 2, rank), epoch=1) for rank in (0, 1)]
    assert [x for pair in zip(*ranks, strict=True) for x, _ in pair] == alone
    assert foreign(shuffled()).steps_per_epoch == 6
    assert alone != [x for x, _ in read(foreign(shuffled()), epoch=0)]


def test_a_loader_of_ones_own_is_read_up_to_the_position() -> None:
    assert read(foreign(shuffled()), epoch=1, step=2) == read(foreign(shuffled()), epoch=1)[4:]


def test_an_epoch_of_a_loader_with_a_generator_depends_on_no_earlier_epoch() -> None:
    def own(generator: torch.Generator) -> DataLoader[Any]:
        order = RandomSampler(ROWS, generator=generator)
        batches = BatchSampler(order, batch_size=2, drop_last=False)
        return DataLoader(ROWS, batch_sampler=batches, collate_fn=default_data_collator)  # type: ignore[arg-type]

    generator = torch.Generator().manual_seed(7)
    plain = [batch["x"].flatten().tolist() for batch in own(torch.Generator().manual_seed(7))]
    source = foreign(own(generator))
    first, second = read(source), read(source, epoch=1)
    assert [x for x, _ in first] == plain
    assert first != second
    assert read(foreign(own(torch.Generator().manual_seed(7))), epoch=1) == second
    source.close()
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(7).get_state())


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
        assert [read(foreign(loader), epoch=epoch) for epoch in (0, 1)] == epochs


def test_a_batch_sampler_says_how_large_a_step_is() -> None:
    batches = BatchSampler(SequentialSampler(ROWS), batch_size=2, drop_last=False)
    loader: DataLoader[Any] = DataLoader(ROWS, batch_sampler=batches)  # type: ignore[arg-type]
    assert foreign(loader).step_samples(0) == 4


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
