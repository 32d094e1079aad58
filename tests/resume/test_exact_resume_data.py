"""Stopped and resumed equals uninterrupted, bit for bit: where the samples come from, and in which order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.support.resuming import prove
from tests.support.seq2seq import Copier, Tokens, seq2seq_trainer
from tests.support.seq2seq import rows as sequences
from tests.support.tiny_models import bert, tokenizer
from tests.support.toys import Augmented, StatefulStream, Stream, TokenModel, classification_rows, token_rows
from tests.support.training import TWICE, StopAt, preempted_at, trainer
from trainer_lib import DataCollatorForLanguageModeling, Trainer
from trainer_lib.errors import ConfigError

ROWS = classification_rows(22)
WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "two": {"dataloader_num_workers": 2},
    "persistent": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
}


def maker(data: Callable[[], Any], **given: Any) -> Callable[..., Trainer]:
    def make(folder: Path, *callbacks: Any) -> Trainer:
        return trainer(folder, data(), callbacks=list(callbacks), **{**TWICE, **given})

    return make


@pytest.mark.parametrize("workers", ["two", "persistent"])
@pytest.mark.parametrize("stop", [2, 4])  # in the first epoch and in the second
def test_workers_with_random_augmentation(workers: str, stop: int, tmp_path: Path) -> None:
    prove(maker(lambda: Augmented(ROWS), **WORKERS[workers]), tmp_path, stop)


@pytest.mark.parametrize("strategy", ["sequential", "random", "group_by_length"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_orders(strategy: str, drop_last: bool, tmp_path: Path) -> None:
    rows = [{**row, "length": 1 + index % 7} for index, row in enumerate(token_rows(22))]

    def make(folder: Path, *callbacks: Any) -> Trainer:
        given = {**TWICE, "train_sampling_strategy": strategy, "dataloader_drop_last": drop_last, "data_seed": 5}
        return trainer(folder, rows, model=_tokens(), callbacks=list(callbacks), **given)

    prove(make, tmp_path, 3)


def _tokens() -> TokenModel:
    torch.manual_seed(0)
    return TokenModel()


def test_batches_of_similar_length_in_random_order(tmp_path: Path) -> None:
    def make(folder: Path, *callbacks: Any) -> Trainer:
        torch.manual_seed(0)
        given = {**TWICE, "sortish_sampler": True, "save_strategy": "no"}
        one = seq2seq_trainer(folder, Copier(), train_dataset=sequences(22), processing_class=Tokens(), **given)
        for callback in callbacks:
            one.add_callback(callback)
        return one  # type: ignore[no-any-return]

    prove(make, tmp_path, 4)


@pytest.mark.parametrize("workers", ["none", "two"])
def test_dynamic_masking(workers: str, tmp_path: Path) -> None:
    words = tokenizer()
    rows = [{"input_ids": row["input_ids"].tolist()} for row in token_rows(22)]

    def make(folder: Path, *callbacks: Any) -> Trainer:
        collate = DataCollatorForLanguageModeling(words, mlm_probability=0.4, mlm=True)
        given = {**TWICE, **WORKERS[workers], "data_collator": collate}
        return trainer(folder, rows, model=bert(cls="BertForMaskedLM"), callbacks=list(callbacks), **given)

    words.add_special_tokens({"mask_token": "[MASK]"})
    prove(make, tmp_path, 4)


class Known(Stream):
    """A stream with a length."""

    def __len__(self) -> int:
        return len(self.rows)


class Seeded(IterableDataset[dict[str, Any]]):
    """Shuffles with a generator of its own, which the Trainer re-seeds for each epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (ROWS[index] for index in torch.randperm(len(ROWS), generator=self.generator).tolist())


STREAMS: dict[str, Callable[[], Any]] = {
    "no_state": lambda: Stream(ROWS),
    "length": lambda: Known(ROWS),
    "state": lambda: StatefulStream(ROWS),
    "generator": Seeded,
}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("stream", STREAMS)
def test_streams_in_their_second_epoch(stream: str, workers: str, tmp_path: Path) -> None:
    prove(maker(STREAMS[stream], max_steps=8 if workers == "none" else 14, **WORKERS[workers]), tmp_path, 4)


@pytest.mark.parametrize("workers", ["two", "persistent"])
def test_streams_in_workers_beyond_their_first_epoch(workers: str, tmp_path: Path) -> None:
    """Two workers read a stream each: 44 samples an epoch, six steps."""
    prove(maker(lambda: Stream(ROWS), max_steps=14, **WORKERS[workers]), tmp_path, 8)


@pytest.mark.parametrize("workers", ["none", "two"])
@pytest.mark.parametrize("stop", [2, 5])
def test_a_loader_of_the_users_own(workers: str, stop: int, tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            count = WORKERS[workers].get("dataloader_num_workers", 0)
            return DataLoader(Augmented(ROWS), batch_size=4, shuffle=True, num_workers=count)

    prove(maker(lambda: ROWS, cls=Own), tmp_path, stop)


def _streamed(*, shuffled: bool) -> Any:
    import datasets

    table = datasets.Dataset.from_dict({"x": [row["x"].tolist() for row in ROWS], "labels": [0, 1] * 11})
    stream = table.to_iterable_dataset(num_shards=2).with_format("torch")
    return stream.shuffle(seed=3, buffer_size=9) if shuffled else stream


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("stop", [2, 4])
def test_streams_of_datasets(shuffled: bool, stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their shuffle buffer is not part of their state: such a stream is read from its start, and a warning says so."""
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        prove(maker(lambda: _streamed(shuffled=shuffled), max_steps=6), tmp_path, stop)
    assert ("leaves out what its shuffle buffer holds" in caplog.text) == shuffled


def test_another_number_of_workers_reads_another_stream(tmp_path: Path) -> None:
    given: dict[str, Any] = {**TWICE, "max_steps": 9}
    preempted_at(trainer(tmp_path, Stream(ROWS), callbacks=[StopAt(2)], **given))
    with pytest.raises(ConfigError, match="dataloader_num_workers = 2: The value was 0 when the checkpoint was"):
        trainer(tmp_path, Stream(ROWS), dataloader_num_workers=2, **given).train(True)
