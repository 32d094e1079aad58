"""Loaders, samplers, columns and batches as user code overrides them: on transformers' Trainer and on ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import trainer_lib
from tests.support.patterns import ROWS, Make, Table, assert_same

PATTERNS = Table()
EVALUATES: dict[str, Any] = {"eval_dataset": ROWS[:12], "eval_strategy": "steps", "eval_steps": 2}


def _weighted(count: int) -> WeightedRandomSampler:
    weights = [1.0 + index % 3 for index in range(count)]
    return WeightedRandomSampler(weights, count, generator=torch.Generator().manual_seed(7))


@PATTERNS.add
def a_plain_loader(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            return DataLoader(
                self.train_dataset,
                batch_size=self.args.train_batch_size,
                sampler=SequentialSampler(self.train_dataset),
                collate_fn=self.data_collator,
                drop_last=self.args.dataloader_drop_last,
                num_workers=self.args.dataloader_num_workers,
                pin_memory=False,
            )

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            rows = eval_dataset if eval_dataset is not None else self.eval_dataset
            return DataLoader(rows, batch_size=3, collate_fn=self.data_collator)

    return make(Mine, max_steps=6, **EVALUATES)


@PATTERNS.add
def a_prepared_loader(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

    return make(Mine, max_steps=6, gradient_accumulation_steps=2)


@PATTERNS.add
def a_weighted_sampler(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return _weighted(len(self.train_dataset))

    return make(Mine, max_steps=4)


@PATTERNS.add
def a_weighted_sampler_in_a_plain_loader(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            sampler = _weighted(len(self.train_dataset))
            return DataLoader(self.train_dataset, batch_size=4, sampler=sampler, collate_fn=self.data_collator)

    return make(Mine, max_steps=4)


@PATTERNS.add
def batches_of_one_kind(make: Make) -> Any:
    class ByLabel(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            order = sorted(range(len(ROWS)), key=lambda index: int(ROWS[index]["labels"]))
            yield from (order[at : at + 4] for at in range(0, len(order), 4))

        def __len__(self) -> int:
            return len(ROWS) // 4

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_sampler=ByLabel(), collate_fn=self.data_collator)

    return make(Mine, num_train_epochs=2, max_steps=-1)


@PATTERNS.add
def several_tasks_with_several_loaders(make: Make) -> Any:
    class Alternating:
        def __init__(self, loaders: dict[str, Any]) -> None:
            self.loaders = loaders
            self.dataset = [None] * sum(len(loader.dataset) for loader in loaders.values())

        def __len__(self) -> int:
            return sum(len(loader) for loader in self.loaders.values())

        def __iter__(self) -> Any:
            for pair in zip(*self.loaders.values(), strict=True):
                yield from pair

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_single(self, rows: Any) -> Any:
            return DataLoader(rows, batch_size=4, collate_fn=self.data_collator)

        def get_train_dataloader(self) -> Any:
            return Alternating({name: self.get_single(rows) for name, rows in self.train_dataset.items()})

    return make(Mine, train_dataset={"a": ROWS[:8], "b": ROWS[8:]}, max_steps=5)


@PATTERNS.add
def the_private_loader_with_another_batch(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            return self._get_dataloader(
                dataset=self.train_dataset,
                description="Training",
                batch_size=self._train_batch_size * 2,
                sampler_fn=self._get_train_sampler,
                is_training=True,
            )

    return make(Mine, max_steps=4)


@PATTERNS.add
def the_private_loader_replaced(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        seen: list[Any] = []  # noqa: RUF012

        def _get_dataloader(
            self,
            dataset: Any,
            description: str,
            batch_size: int,
            sampler_fn: Any = None,
            is_training: bool = False,
            dataloader_key: str | None = None,
        ) -> Any:
            self.seen = [*self.seen, (description.lower(), batch_size, is_training)]
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    return make(Mine, **EVALUATES)


@PATTERNS.add
def a_collator_swapped_for_training(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        data_collator: Any

        def get_train_dataloader(self) -> Any:
            collate = self.data_collator
            self.data_collator = lambda rows: {**collate(rows), "x": 2 * collate(rows)["x"]}
            loader = super().get_train_dataloader()
            self.data_collator = collate
            return loader

    return make(Mine, **EVALUATES)


@PATTERNS.add
def columns_kept_for_the_loss(make: Make) -> Any:
    from datasets import Dataset as Columns

    rows = Columns.from_dict(
        {"x": [row["x"].tolist() for row in ROWS], "labels": [row["labels"] for row in ROWS], "w": [1.0, 3.0] * 8}
    )

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        _signature_columns: Any = None

        def _set_signature_columns_if_needed(self) -> None:
            if self._signature_columns is None:
                self._signature_columns = ["x", "labels", "w"]

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            weights = inputs.pop("w")
            loss = model(**inputs)["loss"] * weights.mean()
            return (loss, {}) if return_outputs else loss

    return make(Mine, train_dataset=rows.with_format("torch"))


@PATTERNS.add
def columns_removed_by_hand(make: Make) -> Any:
    from datasets import Dataset as Columns

    rows = Columns.from_dict(
        {"x": [row["x"].tolist() for row in ROWS], "label": [row["labels"] for row in ROWS], "text": ["a"] * 16}
    )

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        seen: list[Any] = []  # noqa: RUF012

        def _remove_unused_columns(self, dataset: Any, description: Any = None) -> Any:
            self.seen = [*self.seen, sorted(dataset.column_names)]
            return dataset.remove_columns(["text"])

    return make(Mine, train_dataset=rows)


@PATTERNS.add
def a_callback_that_changes_the_data(make: Make) -> Any:
    class Growing(Dataset[Any]):
        factor = 1.0

        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, index: int) -> Any:
            return {**ROWS[index], "x": ROWS[index]["x"] * self.factor}

    class Curriculum(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
            train_dataloader.dataset.factor = 1.0 + round(state.epoch or 0)

    return make(make.lib.Trainer, train_dataset=Growing(), callbacks=[Curriculum()], num_train_epochs=2, max_steps=-1)


@PATTERNS.add
def a_stream(make: Make) -> Any:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(ROWS)

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            self.seen = [isinstance(loader.dataset, Stream)]
            return loader

    one = make(Mine, train_dataset=Stream(), max_steps=6, eval_dataset=Stream(), eval_strategy="steps", eval_steps=3)
    one.leaves_out = ("epoch",)  # theirs takes max_steps for the length of a pass, ours the passes that were seen
    return one


@PATTERNS.add
def batches_that_are_looked_at_before_the_step(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        seen: list[Any] = []  # noqa: RUF012

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
            self.seen = [*self.seen, [len(batch["labels"]) for batch in batches]]
            return batches, items

    return make(Mine, gradient_accumulation_steps=3, num_train_epochs=2, max_steps=-1, **EVALUATES)


@PATTERNS.add
def evaluation_in_another_order(make: Make) -> Any:
    class Backwards(Sampler[int]):
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def __iter__(self) -> Iterator[int]:
            return iter(range(len(self.rows) - 1, -1, -1))

        def __len__(self) -> int:
            return len(self.rows)

    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return Backwards(eval_dataset)

    one = make(Mine, **EVALUATES)
    one.train()
    one.seen = one.predict(ROWS[:6]).label_ids.tolist()
    return one


@PATTERNS.add
def loaders_seen_by_callbacks(make: Make) -> Any:
    class Look(make.lib.TrainerCallback):  # type: ignore[name-defined,misc]
        seen: list[Any] = []  # noqa: RUF012

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            loader = kwargs["train_dataloader"]
            self.seen = [len(loader), loader.dataset is ROWS, len(loader.dataset)]

    look = Look()
    one = make(make.lib.Trainer, callbacks=[look])
    one.train()
    one.seen = look.seen
    return one


def plain(make: Make) -> Any:
    return make(make.lib.Trainer, max_steps=4)


OLD = Table()


@OLD.add
def a_sampler_without_the_dataset(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def _get_train_sampler(self) -> Any:
            return SequentialSampler(self.train_dataset)

    return make(Mine, max_steps=4)


@OLD.add
def batch_samples_without_the_device(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int) -> Any:
            return super().get_batch_samples(epoch_iterator, num_batches)

    return make(Mine, max_steps=4)


@OLD.add
def a_loader_with_a_batch_sampler_of_its_own(make: Make) -> Any:
    class Mine(make.lib.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            batches = BatchSampler(SequentialSampler(self.train_dataset), 4, drop_last=False)
            return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

    return make(Mine, max_steps=4)


@pytest.mark.parametrize("name", sorted(OLD))
def test_an_older_signature_ends_where_a_plain_trainer_ends(name: str, tmp_path: Path) -> None:
    assert_same(OLD[name], tmp_path, reference=plain)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_the_pattern_ends_where_it_ends_on_transformers_trainer(name: str, tmp_path: Path) -> None:
    assert_same(PATTERNS[name], tmp_path)


def test_a_collator_that_is_set_on_the_loader_is_used(tmp_path: Path) -> None:
    """The loader that accelerate prepares for the reference ignores it."""

    class Mine(trainer_lib.Trainer):
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            collate = loader.collate_fn
            loader.collate_fn = lambda rows: {**collate(rows), "x": -collate(rows)["x"]}
            return loader

    make = Make(trainer_lib, tmp_path)
    turned = [{**row, "x": -row["x"]} for row in ROWS]
    one, other = make(Mine), make(trainer_lib.Trainer, train_dataset=turned)
    one.train()
    other.train()
    assert torch.equal(one.model.head.weight, other.model.head.weight)
