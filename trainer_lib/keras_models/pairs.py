"""Data sets of (features, labels): samples to batches, and other forms of data to what the loaders take.

A sample is a pair (features, labels), or a mapping in which `label_names` are the labels. Features and labels are
numbers, arrays or tensors, or mappings of them; labels may be missing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from trainer_lib.data.loading.collators import default_data_collator
from trainer_lib.data.loading.fetch import is_pure_collator
from trainer_lib.data.loading.loader import has_length
from trainer_lib.errors import DataError
from trainer_lib.evaluation import nested


class Batch(dict[str, Any]):
    """A batch as a mapping with the keys "features" and, where there are some, "labels"; tensors ``[batch, ...]``."""

    @classmethod
    def of(cls, features: Any, labels: Any) -> Batch:
        """The batch of these features and labels; no labels: None."""
        # {"labels": x} and x ask for the same call of the model.
        if isinstance(labels, Mapping) and set(labels) == {"labels"}:
            labels = labels["labels"]
        return cls(features=features) if labels is None else cls(features=features, labels=labels)

    @override
    def get(self, name: Any, default: Any = None) -> Any:
        """A part of the batch, or a column of its features: what counts tokens looks for ``input_ids``."""
        columns = self["features"] if isinstance(self["features"], Mapping) else {}
        return self[name] if name in self else columns.get(name, default)

    def __missing__(self, name: str) -> None:
        """None for labels that the batch has not."""
        if name != "labels":
            raise KeyError(name)


class PairCollator:
    """Makes a `Batch` of a list of samples, or of a batch in any form that data comes in.

    Args:
        collate: the user's collator, whose result may have any form that `to_batch` takes; None for stacking.
        label_names: columns of labels in samples that are mappings.

    Attributes:
        one_input: the model takes one tensor, so that the only column of a mapping is the features.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None, label_names: Sequence[str]) -> None:
        self.collate = collate
        self.is_pure = collate is None or is_pure_collator(collate)
        self.label_names = tuple(label_names)
        self.one_input = False
        self.tokenizer = getattr(collate, "tokenizer", None)

    def __call__(self, samples: list[Any]) -> Batch:
        """Stack samples to a batch of tensors ``[batch, ...]``."""
        if self.collate is not None:
            return self.to_batch(self.collate(samples))
        if isinstance(samples[0], Mapping):
            return self.to_batch(default_data_collator(samples))
        return self.to_batch(_stack([sample if isinstance(sample, tuple) else (sample,) for sample in samples]))

    def to_batch(self, value: Any) -> Batch:
        """A `Batch` of one; of a pair (features, labels); of a mapping with labels under their names; of features.

        Raises:
            DataError: it has more than two parts.
        """
        if isinstance(value, Batch):
            return value
        if isinstance(value, Mapping):
            labels = {name: value[name] for name in self.label_names if name in value}
            rest = {name: part for name, part in value.items() if name not in labels}
            features = next(iter(rest.values())) if self.one_input and len(rest) == 1 else rest
            return Batch.of(features, next(iter(labels.values())) if len(labels) == 1 else labels or None)
        if not isinstance(value, tuple | list):
            return Batch.of(value, None)
        if not 1 <= len(value) <= 2:
            raise _refusal(f"A sample or batch has {len(value)} parts.", "Give pairs (features, labels).")
        return Batch.of(value[0], value[1] if len(value) == 2 else None)

    def convert(self, batch: Any) -> Batch:
        """A `Batch` of tensors of a batch of the user's own loader."""
        return batch if isinstance(batch, Batch) else self.to_batch(nested.to_tensors(batch))


def _stack(parts: list[Any]) -> Any:
    """Stack one part of every sample: a value ``[...]`` to ``[batch, ...]``, in mappings and tuples one by one."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {str(name): _stack([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(_stack(list(column)) for column in zip(*parts, strict=True))
    if isinstance(first, str | bytes):
        raise _refusal("Text cannot be stacked to a batch.", "Turn it into numbers, or give a data_collator.", first)
    if not isinstance(first, torch.Tensor) and hasattr(first, "numpy"):
        parts = [part.numpy() for part in parts]  # tensors of TensorFlow
    return default_data_collator([{"value": part} for part in parts]).get("value")  # None of None


def as_dataset(dataset: Any, *, shuffle_seed: int | None = None) -> Any:
    """A data set as the loaders take it: map-style data as it is, anything else as a stream of samples.

    Args:
        shuffle_seed: shuffle a `tf.data.Dataset`, which has no random access, by this seed and the epoch.

    Raises:
        DataError: it is a pair of arrays, which would count as two samples, or its items are batches.
    """
    if isinstance(dataset, tuple) and len(dataset) == 2 and all(hasattr(part, "shape") for part in dataset):
        raise _refusal("The data is a pair of arrays, and not a set of pairs.", "Give list(zip(features, labels)).")
    batches = getattr(getattr(sys.modules.get("keras"), "utils", None), "PyDataset", DataLoader)
    if isinstance(dataset, (DataLoader, batches)):
        remedy = "Give its samples, or return it from an override of get_train_tfdataset."
        raise _refusal("Its items are batches, and a data set has samples.", remedy, dataset)
    if dataset is None or isinstance(dataset, IterableDataset):
        return dataset
    if _is_tensorflow(dataset) or (has_length(dataset) and not hasattr(dataset, "__getitem__")):
        return Stream(dataset, shuffle_seed)
    return dataset


def _is_tensorflow(dataset: Any) -> bool:
    return callable(getattr(dataset, "as_numpy_iterator", None))


class Stream(IterableDataset[Any]):
    """The items of an iterable, or of a `tf.data.Dataset` as arrays: samples, or batches of the user's own loader.

    Args:
        items: the iterable.
        seed: shuffle a `tf.data.Dataset` by this seed and the epoch; None: do not.
        steps: how many items to read at most: a `tf.data.Dataset` may repeat itself forever.
        convert: what to make of an item.
    """

    def __init__(
        self,
        items: Any,
        seed: int | None = None,
        steps: int | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        self._items = items
        self._seed = seed
        self._steps = steps
        self._convert = convert
        self._epoch = 0
        self.dataset = getattr(items, "dataset", None)
        self.batch_size = getattr(items, "batch_size", None)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of that epoch from now on."""
        self._epoch = epoch

    def __len__(self) -> int:
        sizes = [] if self._steps is None else [self._steps]
        if _is_tensorflow(self._items):
            sizes += [count for count in [int(self._items.cardinality())] if count >= 0]  # else infinite or unknown
        elif has_length(self._items):
            sizes.append(len(self._items))
        if not sizes:
            raise TypeError("The data set has no length.")
        return min(sizes)

    def __iter__(self) -> Iterator[Any]:
        items = self._items
        if _is_tensorflow(items):
            if self._seed is not None and has_length(self):
                items = items.shuffle(len(self), seed=self._seed + self._epoch, reshuffle_each_iteration=False)
            items = items.as_numpy_iterator()
        items = itertools.islice(items, self._steps)
        return items if self._convert is None else map(self._convert, items)


def _refusal(message: str, remedy: str, value: object = None) -> DataError:
    shown = None if value is None else type(value).__name__
    return DataError(message, field="train_dataset", value=shown, remedy=remedy)
