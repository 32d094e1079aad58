"""Loaders, sizes and columns. Every method may be overridden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Sampler

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.global_batch import total_batch_size
from trainer_lib.data.foreign import ForeignLoader
from trainer_lib.data.iterable import IterableLoader
from trainer_lib.data.loader import has_length
from trainer_lib.trainer.base import TrainerBase


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
        return self._trainflow.attempts.limit(self._trainflow.world.train_batch_size(self.args))

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
        self._trainflow.loaders.set_signature_columns()

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A `datasets.Dataset` without the columns that the model's forward does not take; any other one unchanged."""
        return self._trainflow.loaders.remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """`data_collator` behind a filter that drops the columns that the model's forward does not take."""
        return self._trainflow.loaders.without_unused_columns(data_collator, description)

    # -- loaders ------------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The order of the training samples; an override may return any sampler. None = the dataset's own order."""
        return self._trainflow.loaders.train_sampler(self.train_dataset if train_dataset is None else train_dataset)

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
        if is_training:
            return loaders.training_loader(dataset, description, batch_size, sampler_fn)
        return loaders.inference_loader(dataset, description, batch_size, sampler_fn, key=dataloader_key)

    def get_train_dataloader(self) -> Any:
        """The loader of this rank's training micro-batches; an override may return any DataLoader."""
        return self._trainflow.loaders.train_loader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of an evaluation set: the given one, the set of that name, or the Trainer's own."""
        return self._trainflow.loaders.eval_loader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of a dataset to predict."""
        return self._trainflow.loaders.test_loader(test_dataset)

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
            return comm.sum_ints([total])[0] if self.args.average_tokens_across_devices else total
        total = run.weights.count(batch_samples, count)
        if comm.world_size == 1 or not self.args.average_tokens_across_devices:
            return total
        # In one message: a second one would make the host wait twice per step.
        total, run.weights.all_batches = comm.sum_ints([total, sum(map(bool, run.weights.items))])
        return total
