"""`Loaders`: from datasets to loaders. Columns, collators, the order of samples, the share of this rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, Sampler, Subset

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import total_batch_size
from trainer_lib.data.loading.foreign import ForeignLoader
from trainer_lib.data.loading.generators import keep_generators
from trainer_lib.data.loading.iterable import IterableLoader, Shares
from trainer_lib.data.loading.loader import EvalLoader, TrainLoader, TrainSource, has_length, is_pure_collator
from trainer_lib.data.loading.mixture_order import MixtureOrder
from trainer_lib.data.loading.order import (
    BatchPlan,
    LengthGroupedOrder,
    Order,
    OrderSampler,
    RandomOrder,
    SamplerOrder,
    SequentialOrder,
)
from trainer_lib.data.rows.column import LABELS
from trainer_lib.distributed.communicator import sum_over_data
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.trainer.accelerator.slot import unwrap_prepared
from trainer_lib.trainer.api.base import TrainerBase
from trainer_lib.trainer.model.source_losses import WithSources
from trainer_lib.trainer.overrides import takes_positionals

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class WithoutColumns:
    """A collator that drops from each sample the columns that the model does not take."""

    def __init__(self, collate: Callable[[list[Any]], Any], columns: set[str], described: str) -> None:
        self.collate = collate
        self.is_pure = is_pure_collator(collate)
        self._columns = columns
        self._described = described
        self._logged = False

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of the samples' other columns. Raises ConfigError when none is left."""
        if not isinstance(samples[0], Mapping) or samples[0].keys() <= self._columns:
            return self.collate(samples)
        kept = [{name: value for name, value in row.items() if name in self._columns} for row in samples]
        if not kept[0]:
            raise no_column_left(samples[0], self._columns, self._described)
        if not self._logged and len(kept[0]) < len(samples[0]):
            self._logged = True
            dropped = ", ".join(sorted(set(samples[0]) - self._columns))
            _log.info("Columns of %s that the model's forward does not take are dropped: %s.", self._described, dropped)
        return self.collate(kept)


class WithoutColumn:
    """A collator that drops one column from each sample."""

    def __init__(self, collate: Callable[[list[Any]], Any], column: str) -> None:
        self.collate = collate
        self.is_pure = is_pure_collator(collate)
        self._column = column

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of the samples' other columns."""
        if isinstance(samples[0], Mapping) and self._column in samples[0]:
            samples = [{name: value for name, value in row.items() if name != self._column} for row in samples]
        return self.collate(samples)


def no_column_left(present: Any, columns: set[str], described: str) -> ConfigError:
    """The error for samples with the columns `present`, of which the model takes none."""
    what = f"No column of {described} is a parameter of the model's forward ({', '.join(sorted(columns))})."
    remedy = "Rename the columns, or set remove_unused_columns=False and give a data_collator."
    return ConfigError(what, field="remove_unused_columns", value=", ".join(map(str, present)), remedy=remedy)


_STRETCH = 50  # global batches that are sorted by length together


def sorts_by_length(args: TrainingArguments) -> bool:
    """Whether training batches hold samples of similar length."""
    return args.train_sampling_strategy == "group_by_length" or bool(getattr(args, "sortish_sampler", False))


class Loaders:
    """Makes the loaders of a Trainer; `kept` holds those of evaluation sets whose workers persist."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self.kept: dict[str, Any] = {}

    # -- columns ------------------------------------------------------------------------------------------------------

    def kept_columns(self) -> set[str] | None:
        """The columns that stay; None when all do."""
        trainer = self._trainer
        if not trainer.args.remove_unused_columns:
            return None
        trainer._set_signature_columns_if_needed()
        if trainer._signature_columns is None:
            return None
        length = [trainer.args.length_column_name] if sorts_by_length(trainer.args) else []
        return {*trainer._signature_columns, *length}

    def prepare(self, dataset: Any, description: str) -> tuple[Any, Callable[[list[Any]], Any]]:
        """(dataset, collator) without the columns that the model does not take."""
        trainer = self._trainer
        collate = trainer.data_collator
        if callable(getattr(dataset, "remove_columns", None)):
            dataset = trainer._remove_unused_columns(dataset, description=description)
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description=description)
        # The column that samples are sorted by is not an input, not even of a model that takes any keyword.
        name = trainer.args.length_column_name
        if sorts_by_length(trainer.args) and name not in (self._internals.facts.columns or ()):
            collate = WithoutColumn(collate, name)
        return dataset, collate

    # -- training -----------------------------------------------------------------------------------------------------

    def train_order(self, dataset: Any) -> Order:
        """The order of the training samples that the arguments ask for."""
        args = self._trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        sortish = bool(getattr(args, "sortish_sampler", False))
        if (mixture := getattr(dataset, "mixture", None)) is not None:
            if sorts_by_length(args):
                what = "A mixture of sources has an order that is not by length."
                remedy = "Remove it, or the mixture."
                raise ConfigError(what, field="train_sampling_strategy", value="group_by_length", remedy=remedy)
            batch, shuffled = self._trainer.get_total_train_batch_size(args), args.train_sampling_strategy == "random"
            return MixtureOrder(mixture, seed, batch, args.dataloader_drop_last, shuffled)
        if args.train_sampling_strategy == "sequential" and not sortish:
            return SequentialOrder(len(dataset))
        if not sorts_by_length(args):
            return RandomOrder(len(dataset), seed)
        batch = self._trainer.get_total_train_batch_size(args)
        if sortish:
            return LengthGroupedOrder(self._lengths(dataset), seed, _STRETCH * batch, shuffled_batch=batch)
        return LengthGroupedOrder(self._lengths(dataset), seed, _STRETCH * batch)

    def _lengths(self, dataset: Any) -> list[int]:
        """Every sample's length, in the unit of the length column, else in tokens."""
        name = self._trainer.args.length_column_name
        key = getattr(self._trainer.processing_class, "model_input_names", ["input_ids"])[0]
        columns = getattr(dataset, "column_names", None) or ()
        rows = (dataset[index] for index in range(len(dataset)))
        try:
            with keep_generators():  # reading a sample may draw random numbers
                if name in columns:
                    return [int(length) for length in dataset[name]]
                if key in columns:
                    return [len(tokens) for tokens in dataset[key]]
                return [int(row[name]) if name in row else len(row[key]) for row in rows]
        except DataError:  # of the dataset, about a row
            raise
        except (TypeError, KeyError, IndexError, ValueError) as error:
            what = f"Sorting by length: the samples have neither a column {name!r} nor one {key!r} with a length."
            remedy = f"Add a column {name!r}, or name it in length_column_name."
            raise ConfigError(what, field="length_column_name", value=name, remedy=remedy) from error

    def train_loader(
        self, dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int, sampler: Sampler[int] | None
    ) -> TrainLoader:
        """The loader of this rank's micro-batches of `batch_size` samples, in the order of the sampler."""
        args, share = self._trainer.args, self._internals.world.comm.data_parallel
        order: Order = SequentialOrder(len(dataset))
        if sampler is not None:
            order = sampler.order if isinstance(sampler, OrderSampler) else SamplerOrder(sampler, args.seed)
        if isinstance(order, MixtureOrder):
            collate = WithSources(collate, order.names)
        plan = BatchPlan.cut(
            order.num_samples,
            global_batch=self._global_batch(batch_size),
            micro_batch=batch_size,
            data_parallel_size=share.size,
            rank=share.rank,
            drop_last=args.dataloader_drop_last,
        )
        return TrainLoader(dataset, order=order, plan=plan, collate=collate, seed=args.seed, options=self._options())

    def _global_batch(self, batch_size: int) -> int:
        """The samples of a step: as many micro-batches as the arguments ask for, whatever their size."""
        trainer = self._trainer
        return trainer.get_total_train_batch_size(trainer.args) * batch_size // trainer._train_batch_size

    def stream_loader(
        self, dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int, *, trains: bool
    ) -> IterableLoader:
        """A loader of this rank's share of a stream."""
        args, share = self._trainer.args, self._internals.world.comm.data_parallel
        shares = Shares(
            dataset,
            collate,
            global_batch=self._global_batch(batch_size) if trains else batch_size * share.size,
            micro_batch=batch_size,
            data_parallel_size=share.size,
            rank=share.rank,
            seed=args.seed,
            # A rank whose stream has ended still takes part in the evaluation steps of the others.
            dummy_batches=not trains and share.size > 1,
        )
        options = self._options(training=trains)
        return IterableLoader(shares, drop_last=trains and args.dataloader_drop_last, options=options)

    def source_of(self, loader: Any) -> TrainSource:
        """A loader as the training loop reads it: our own, or any other behind an adapter."""
        args, world, loader = self._trainer.args, self._internals.world, unwrap_prepared(loader)
        if isinstance(loader, TrainLoader | IterableLoader):
            return loader
        if world.batching.split_batches:
            what = "The batches of your own loader cannot be split."
            remedy = "Remove it, and let the loader make batches for one process."
            raise ConfigError(what, field="accelerator_config.split_batches", value=True, remedy=remedy)
        return ForeignLoader(
            loader,
            accumulation=args.gradient_accumulation_steps,
            data_parallel_size=world.comm.data_parallel.size,
            rank=world.comm.data_parallel.rank,
            seed=args.seed,
            drop_last=args.dataloader_drop_last,
            keeps_start=args.loss_spike_sigma is not None,
        )

    def _options(self, *, training: bool = True) -> dict[str, Any]:
        """The settings of torch's DataLoader; most need workers."""
        args = self._trainer.args
        pins = args.dataloader_pin_memory and self._internals.world.device.type == "cuda"
        options: dict[str, Any] = {"num_workers": args.dataloader_num_workers, "pin_memory": pins}
        if args.dataloader_num_workers > 0:
            options |= {
                "persistent_workers": args.dataloader_persistent_workers,
                "prefetch_factor": args.dataloader_prefetch_factor,
                "multiprocessing_context": args.dataloader_multiprocessing_context,
                "in_order": args.dataloader_in_order or not training,  # predictions are matched to samples by position
            }
        return options

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_loader(self, dataset: Any, description: str, key: str | None = None) -> Any:
        """The loader of a dataset to evaluate or predict, from the Trainer's `_get_dataloader`."""
        trainer = self._trainer
        return trainer._get_dataloader(
            dataset=dataset,
            description=description,
            batch_size=self._internals.world.eval_batch_size(trainer.args),
            sampler_fn=trainer._get_eval_sampler,
            dataloader_key=key,
        )

    def eval_set(self, given: Any) -> Any:
        """The evaluation set: the given one, the set of that name, or the Trainer's own."""
        sets = self._trainer.eval_dataset
        if isinstance(given, str):
            named = sets if isinstance(sets, Mapping) else {}
            if given not in named:
                known = f"There are {', '.join(named)}." if named else "Give eval_dataset as a dict of sets."
                raise ConfigError("The evaluation set is unknown.", field="eval_dataset", value=given, remedy=known)
            return named[given]
        dataset = sets if given is None else given
        if dataset is None:
            raise ConfigError("Evaluating needs data.", field="eval_dataset", remedy="Give it to the Trainer.")
        return dataset

    def range_loader(self, dataset: Any, start: int, stop: int) -> EvalLoader:
        """A loader of rows [start, stop) for this process alone."""
        dataset, collate = self.prepare(dataset, "test")
        batch_size = self._internals.world.eval_batch_size(self._trainer.args)
        return self.eval_loader(dataset, collate, batch_size, (start, stop))

    def eval_loader(
        self, dataset: Any, collate: Callable[[list[Any]], Any], batch_size: int, rows: tuple[int, int] | None = None
    ) -> EvalLoader:
        """A loader of this rank's share of all rows; with `rows`, of these rows for this process alone."""
        share = self._internals.world.comm.data_parallel
        return EvalLoader(
            dataset,
            batch_size=batch_size,
            data_parallel_size=1 if rows is not None else share.size,
            rank=0 if rows is not None else share.rank,
            collate=collate,
            seed=self._trainer.args.seed,
            options=self._options(training=False),
            rows=rows,
        )


class DataMethods(TrainerBase):
    """Loaders and what they are made of."""

    # -- sizes --------------------------------------------------------------------------------------------------------

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of one optimizer step over all ranks."""
        world = self._trainflow.world
        return total_batch_size(args, data_parallel_size=world.comm.data_parallel.size, settings=world.batching)

    @property
    def _train_batch_size(self) -> int:
        """Samples of one micro-batch: as the arguments ask, or fewer where memory was short."""
        size = self._trainflow.world.train_batch_size(self.args)
        return min(size, self._trainflow.attempts.allowed or size)

    def num_examples(self, dataloader: Any) -> int:
        """Samples behind a loader: its dataset's length, else an estimate from its batches."""
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
        """Tokens of one pass over a loader, counted by reading it: elements of ``input_ids [batch, sequence]``.

        With `max_steps`, only the first batch is read, and its tokens are multiplied by that number.
        """
        total = 0
        for batch in train_dl:
            tokens = batch["input_ids"].numel()
            if max_steps is not None:
                return int(tokens * max_steps)
            total += tokens
        return int(total)

    # -- columns ------------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """Set `self._signature_columns`, the columns that are kept, unless they are set."""
        columns = self._trainflow.facts.columns
        if self._signature_columns is None and columns is not None:
            self._signature_columns = list(dict.fromkeys([*columns, *LABELS, *self.label_names]))

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A `datasets.Dataset` without the columns that the model's forward does not take; any other one unchanged."""
        columns = self._trainflow.loaders.kept_columns()
        if columns is None or not callable(getattr(dataset, "remove_columns", None)):
            return dataset
        present = list(getattr(dataset, "column_names", None) or [])
        ignored = [name for name in present if name not in columns]
        if present and len(ignored) == len(present):
            raise no_column_left(present, columns, f"the {description or 'training'} data")
        return dataset.remove_columns(ignored) if ignored else dataset

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """`data_collator` behind a filter that drops the columns that the model's forward does not take."""
        columns = self._trainflow.loaders.kept_columns()
        if columns is None:
            return data_collator
        # The length column is kept for the sampler, which reads the dataset; batches do without it.
        columns -= {self.args.length_column_name} - set(self._signature_columns or ())
        return WithoutColumns(data_collator, columns, f"the {description or 'training'} data")

    # -- loaders ------------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The order of the training samples; an override may return any sampler. None = the dataset's own order."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        is_sized = dataset is not None and has_length(dataset)
        return OrderSampler(self._trainflow.loaders.train_order(dataset)) if is_sized else None

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """None: ranks share the dataset in its own order; an override may return any sampler."""
        return None

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """A loader of this rank's share of a dataset.

        Args:
            dataset: map-style or iterable.
            description: what the dataset is for, in log lines.
            batch_size: samples of one micro-batch.
            sampler_fn: dataset -> the order of its samples; None = its own order.
            is_training: make a loader to train on; else each sample comes once, in order.
            dataloader_key: the name of an evaluation set, whose loader is kept where its workers persist.
        """
        loaders = self._trainflow.loaders
        dataset, collate = loaders.prepare(dataset, description)
        loader: Any
        if isinstance(dataset, IterableDataset) or not has_length(dataset):
            loader = loaders.stream_loader(dataset, collate, batch_size, trains=is_training)
        else:
            # Overrides of older code take no dataset.
            given = (dataset,) if sampler_fn is not None and takes_positionals(sampler_fn, 1) else ()
            sampler = None if sampler_fn is None else sampler_fn(*given)
            if is_training:
                return loaders.train_loader(dataset, collate, batch_size, sampler)
            rows = dataset if sampler is None else Subset(dataset, [int(index) for index in sampler])
            loader = loaders.eval_loader(rows, collate, batch_size)
        if not is_training:
            self._trainflow.accelerator.watch(loader)
            if dataloader_key is not None and self.args.dataloader_persistent_workers:
                loaders.kept[dataloader_key] = loader
        return loader

    def get_train_dataloader(self) -> Any:
        """The loader of this rank's training micro-batches; an override may return any DataLoader."""
        if self.train_dataset is None:
            raise ConfigError("Training needs data.", field="train_dataset", remedy="Give it to the Trainer.")
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="training",
            batch_size=self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of an evaluation set: the given one, the set of that name, or the Trainer's own."""
        loaders, name = self._trainflow.loaders, eval_dataset if isinstance(eval_dataset, str) else "eval"
        # A dataset passed as an object has no name to find its loader by.
        keeps = self.args.dataloader_persistent_workers and (eval_dataset is None or isinstance(eval_dataset, str))
        if keeps and name in loaders.kept:
            return loaders.kept[name]
        return loaders.evaluation_loader(loaders.eval_set(eval_dataset), "evaluation", name if keeps else None)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of a dataset to predict."""
        return self._trainflow.loaders.evaluation_loader(test_dataset, "test")

    # -- one step's batches -------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The next step's micro-batches of this rank, and the target items of all of them over all ranks.

        At the end of the data there are fewer than `num_batches`, or none; without any, the items are None. Batches
        hold tensors ``[batch, ...]``; the items are a number or a tensor ``[]``.
        """
        batches: list[Any] = []
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                # The last step of an epoch may have fewer.
                break
        return batches, self._get_num_items_in_batch(batches, device) if batches else None

    def _get_num_items_in_batch(
        self, batch_samples: list[Any], device: torch.device | None = None
    ) -> torch.Tensor | int | None:
        """Target items of a step's micro-batches: over all ranks with `average_tokens_across_devices`."""
        run, comm, count = self._trainflow.run, self._trainflow.world.comm, self._trainflow.forward.target_items
        if run is None:
            total = sum(count(batch) for batch in batch_samples)
            return sum_over_data(comm, [total])[0] if self.args.average_tokens_across_devices else total
        total = run.weights.count(batch_samples, count)
        if comm.world_size == 1 or not self.args.average_tokens_across_devices:
            return total
        # In one message: a second one would make the host wait twice per step.
        total, run.weights.all_batches = sum_over_data(comm, [total, sum(map(bool, run.weights.items))])
        return total
