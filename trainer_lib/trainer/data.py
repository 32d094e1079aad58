"""From datasets to loaders: columns, collators, order, shares of ranks. Every method may be overridden."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler, Subset

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.global_batch import total_batch_size
from trainer_lib.data.fetch import is_pure_collator
from trainer_lib.data.generators import keep_generators
from trainer_lib.data.items import count_items
from trainer_lib.data.iterable import ForeignLoader, IterableLoader
from trainer_lib.data.loader import (
    EvalLoader,
    LoaderOptions,
    TrainLoader,
    TrainSource,
    has_length,
)
from trainer_lib.data.order import (
    BatchPlan,
    LengthGroupedOrder,
    Order,
    OrderSampler,
    RandomOrder,
    SamplerOrder,
    SequentialOrder,
)
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.base import TrainerBase
from trainer_lib.trainer.inspecting import takes_positionals

_log = logging.getLogger(__name__)
_ALWAYS_KEPT = ("label", "label_ids", "labels")


class _WithoutColumns:
    """A collator that drops from each sample the columns the model does not take."""

    def __init__(self, collate: Callable[[list[Any]], Any], columns: set[str], described: str) -> None:
        self.collate = collate
        self.is_pure = is_pure_collator(collate)
        self._columns = columns
        self._described = described
        self._said = False

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], Mapping) or samples[0].keys() <= self._columns:
            return self.collate(samples)
        kept = [{name: value for name, value in row.items() if name in self._columns} for row in samples]
        if not kept[0]:
            raise _nothing_left(samples[0], self._columns, self._described)
        if not self._said and len(kept[0]) < len(samples[0]):
            self._said = True
            dropped = ", ".join(sorted(set(samples[0]) - self._columns))
            _log.info("Columns of %s that the model's forward does not take are dropped: %s.", self._described, dropped)
        return self.collate(kept)


class _WithoutColumn:
    """A collator that drops one column from each sample."""

    def __init__(self, collate: Callable[[list[Any]], Any], column: str) -> None:
        self.collate = collate
        self.is_pure = is_pure_collator(collate)
        self._column = column

    def __call__(self, samples: list[Any]) -> Any:
        if isinstance(samples[0], Mapping) and self._column in samples[0]:
            samples = [{name: value for name, value in row.items() if name != self._column} for row in samples]
        return self.collate(samples)


def _nothing_left(present: Any, columns: set[str], described: str) -> ConfigError:
    return ConfigError(
        f"No column of {described} is a parameter of the model's forward ({', '.join(sorted(columns))}).",
        field="remove_unused_columns",
        value=", ".join(map(str, present)),
        remedy="Rename the columns, or set remove_unused_columns=False and give a data_collator.",
    )


class DataMixin(TrainerBase):
    """Loaders and what they are made of."""

    # -- sizes --------------------------------------------------------------------------------------------------------

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of one optimizer step over all ranks."""
        return total_batch_size(args, data_parallel_size=self.comm.data_parallel.size, settings=self._batching)

    def num_examples(self, dataloader: Any) -> int:
        """Samples behind a loader: its dataset's length, else estimated from its batches."""
        if isinstance(dataloader, ForeignLoader):
            dataloader = dataloader.loader
        if isinstance(dataloader, IterableLoader) and dataloader.epoch_samples is not None:
            return dataloader.epoch_samples
        dataset = getattr(dataloader, "dataset", None)
        if dataset is not None and has_length(dataset):
            return len(dataset)
        return len(dataloader) * self.args.per_device_train_batch_size

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Tokens of one pass over a loader (or of `max_steps` times its first batch), by enumerating it."""
        total = 0
        for batch in train_dl:
            tokens = batch["input_ids"].numel()
            if max_steps is not None:
                return int(tokens * max_steps)
            total += tokens
        return int(total)

    def target_items(self, inputs: Any) -> int:
        """Target items of a batch: what its loss is a mean over."""
        return count_items(inputs, self.label_names, shifts=self._forward.shifts_labels)

    # -- columns ------------------------------------------------------------------------------------------------------

    _signature_columns: list[str] | None = None

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None and self._forward.columns is not None:
            self._signature_columns = list(dict.fromkeys([*self._forward.columns, *_ALWAYS_KEPT, *self.label_names]))

    def _kept_columns(self) -> set[str] | None:
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        if self._signature_columns is None:
            return None
        length = [self.args.length_column_name] if self._sorts_by_length else []
        return {*self._signature_columns, *length}

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A `datasets.Dataset` without the columns the model's forward does not take; anything else as it is."""
        columns = self._kept_columns()
        if columns is None or not callable(getattr(dataset, "remove_columns", None)):
            return dataset
        present = list(getattr(dataset, "column_names", None) or [])
        ignored = [name for name in present if name not in columns]
        if present and len(ignored) == len(present):
            raise _nothing_left(present, columns, f"the {description or 'training'} data")
        return dataset.remove_columns(ignored) if ignored else dataset

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """`data_collator`, given only the columns that the model's forward takes."""
        columns = self._kept_columns()
        if columns is None:
            return data_collator
        columns -= {self.args.length_column_name} - set(self._signature_columns or ())
        return _WithoutColumns(data_collator, columns, f"the {description or 'training'} data")

    def _prepared(self, dataset: Any, description: str) -> tuple[Any, Callable[[list[Any]], Any]]:
        collate = self.data_collator
        if callable(getattr(dataset, "remove_columns", None)):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        # The column that samples are sorted by is no input, not even of a model that takes any keyword.
        if self._sorts_by_length and self.args.length_column_name not in (self._forward.columns or ()):
            collate = _WithoutColumn(collate, self.args.length_column_name)
        return dataset, collate

    # -- training -----------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The order of the training samples; a subclass may return any sampler. None = the dataset's own order."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        return OrderSampler(self._train_order(dataset))

    def _train_order(self, dataset: Any) -> Order:
        if self.args.train_sampling_strategy == "sequential":
            return SequentialOrder(len(dataset))
        if self._sorts_by_length:
            stretch = 50 * self.get_total_train_batch_size(self.args)
            return LengthGroupedOrder(self._lengths(dataset), self._data_seed, stretch)
        return RandomOrder(len(dataset), self._data_seed)

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _lengths(self, dataset: Any) -> list[int]:
        """Every sample's length, in the unit of the length column, else tokens."""
        name = self.args.length_column_name
        key = getattr(self.processing_class, "model_input_names", ["input_ids"])[0]
        columns = getattr(dataset, "column_names", None) or ()
        rows = (dataset[index] for index in range(len(dataset)))
        try:
            with keep_generators():  # reading a sample may draw random numbers
                if name in columns:
                    return [int(length) for length in dataset[name]]
                if key in columns:
                    return [len(tokens) for tokens in dataset[key]]
                return [int(row[name]) if name in row else len(row[key]) for row in rows]
        except (TypeError, KeyError, IndexError) as error:
            raise ConfigError(
                f"Sorting by length: the samples have neither a column {name!r} nor one {key!r} with a length.",
                field="length_column_name",
                value=name,
                remedy=f"Add a column {name!r}, or name it in length_column_name.",
            ) from error

    def get_train_dataloader(self) -> Any:
        """The loader of this rank's training micro-batches. Override to bring your own DataLoader."""
        if self.train_dataset is None:
            raise ConfigError("is needed to train.", field="train_dataset", remedy="Give it to the Trainer.")
        dataset, collate = self._prepared(self.train_dataset, "training")
        args, share = self.args, self.comm.data_parallel
        if isinstance(dataset, IterableDataset) or not has_length(dataset):
            return IterableLoader(
                dataset,
                global_batch=self.get_total_train_batch_size(args),
                micro_batch=self._train_batch_size,
                data_parallel_size=share.size,
                rank=share.rank,
                collate=collate,
                seed=args.seed,
                drop_last=args.dataloader_drop_last,
                options=self._loader_options(),
            )
        own = (dataset,) if takes_positionals(self._get_train_sampler, 1) else ()  # overrides of old take none
        order = self._order_of(self._get_train_sampler(*own), dataset)
        plan = BatchPlan.cut(
            order.num_samples,
            global_batch=self.get_total_train_batch_size(args),
            micro_batch=self._train_batch_size,
            data_parallel_size=share.size,
            rank=share.rank,
            drop_last=args.dataloader_drop_last,
        )
        options = self._loader_options()
        return TrainLoader(dataset, order=order, plan=plan, collate=collate, seed=args.seed, options=options)

    def _order_of(self, sampler: Sampler[int] | None, dataset: Sized) -> Order:
        if sampler is None:
            return SequentialOrder(len(dataset))
        return sampler.order if isinstance(sampler, OrderSampler) else SamplerOrder(sampler, self.args.seed)

    def _train_source(self) -> TrainSource:
        """What the loop takes its micro-batches from: our loader, or the user's behind an adapter."""
        loader = self.get_train_dataloader()
        self.callback_handler.train_dataloader = loader
        if isinstance(loader, TrainLoader | IterableLoader):
            return loader
        if self._batching.split_batches:
            raise ConfigError(
                "cannot split the batches of a loader of your own.",
                field="accelerator_config.split_batches",
                value=True,
                remedy="Remove it, and let the loader make batches for one process.",
            )
        return ForeignLoader(
            loader,
            accumulation=self.args.gradient_accumulation_steps,
            data_parallel_size=self.comm.data_parallel.size,
            rank=self.comm.data_parallel.rank,
            seed=self.args.seed,
            drop_last=self.args.dataloader_drop_last,
        )

    def _loader_options(self, *, training: bool = True) -> LoaderOptions:
        args = self.args
        return LoaderOptions(
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            in_order=args.dataloader_in_order or not training,
        )

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """None = the dataset's own order, shared out to ranks; a subclass may return any sampler."""
        return None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of an evaluation set: the given one, the one of that name, or the Trainer's own."""
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        kept = self.args.dataloader_persistent_workers and (eval_dataset is None or isinstance(eval_dataset, str))
        if kept and name in self._eval_loaders:
            return self._eval_loaders[name]
        dataset = self._eval_set(eval_dataset)
        loader = self._inference_dataloader(dataset, "evaluation")
        if kept:
            self._eval_loaders[name] = loader
        return loader

    def _eval_set(self, asked: Any) -> Any:
        if isinstance(asked, str):
            sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if asked not in sets:
                known = f"There are {', '.join(sets)}." if sets else "Give eval_dataset as a dict of sets."
                raise ConfigError("is no evaluation set.", field="eval_dataset", value=asked, remedy=known)
            return sets[asked]
        dataset = self.eval_dataset if asked is None else asked
        if dataset is None:
            raise ConfigError("is needed to evaluate.", field="eval_dataset", remedy="Give it to the Trainer.")
        return dataset

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of a dataset to predict."""
        return self._inference_dataloader(test_dataset, "test")

    def _inference_dataloader(self, dataset: Any, description: str) -> Any:
        dataset, collate = self._prepared(dataset, description)
        if isinstance(dataset, IterableDataset) or not has_length(dataset):
            return IterableLoader(
                dataset,
                global_batch=self._eval_batch_size * self.comm.data_parallel.size,
                micro_batch=self._eval_batch_size,
                data_parallel_size=self.comm.data_parallel.size,
                rank=self.comm.data_parallel.rank,
                collate=collate,
                seed=self.args.seed,
                drop_last=False,
                options=self._loader_options(training=False),
                fillers=self.strategy.forward_communicates,
            )
        sampler = self._get_eval_sampler(dataset)
        if sampler is not None:
            dataset = Subset(dataset, [int(index) for index in sampler])
        return self._eval_loader(dataset, collate)

    def _eval_loader(
        self, dataset: Any, collate: Callable[[list[Any]], Any], rows: tuple[int, int] | None = None
    ) -> EvalLoader:
        alone = rows is not None
        return EvalLoader(
            dataset,
            batch_size=self._eval_batch_size,
            data_parallel_size=1 if alone else self.comm.data_parallel.size,
            rank=0 if alone else self.comm.data_parallel.rank,
            collate=collate,
            seed=self.args.seed,
            options=self._loader_options(training=False),
            rows=rows,
        )

    def range_dataloader(self, dataset: Any, start: int, stop: int) -> EvalLoader:
        """A loader of rows [start, stop) for this process alone."""
        dataset, collate = self._prepared(dataset, "test")
        return self._eval_loader(dataset, collate, (start, stop))

    # -- one step's batches -------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The next step's micro-batches of this rank (fewer than `num_batches`, or none, at the end of the data), and
        the target items of all of them over all ranks."""
        batches: list[Any] = []
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        return batches, self._get_num_items_in_batch(batches, device) if batches else None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        reals = self._run.reals(len(batch_samples)) if self._run is not None else [True] * len(batch_samples)
        counts = [self.target_items(b) if real else 0 for b, real in zip(batch_samples, reals, strict=True)]
        if self._run is not None:
            self._run.items = counts
        total = sum(counts)
        return self.comm.sum_ints([total])[0] if self.args.average_tokens_across_devices else total
