"""Loaders of the user's own for tests, and a reader of any loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from tests.support.toys import classification_rows
from trainer_lib.data.collators import default_data_collator
from trainer_lib.data.foreign import ForeignLoader

ROWS = classification_rows(23)


def read(loader: Any, epoch: int = 0, step: int = 0) -> list[tuple[list[float], bool]]:
    return [(micro.batch["x"].flatten().tolist(), micro.real) for micro in loader.micros(epoch, step)]


def shuffled() -> DataLoader[Any]:
    return DataLoader(ROWS, batch_size=2, shuffle=True, collate_fn=default_data_collator)  # type: ignore[arg-type]


def foreign(loader: Any, world: int = 1, rank: int = 0) -> ForeignLoader:
    return ForeignLoader(loader, accumulation=2, data_parallel_size=world, rank=rank, seed=1, drop_last=False)
