"""Data sets of (features, labels): samples to batches, and other forms of data to what the loaders take.

A sample is a pair (features, labels), or a mapping in which `label_names` are the labels. Features and labels are
numbers, arrays or tensors, or mappings of them; labels may be missing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from trainer_lib.data.loading.collators import default_data_collator
from trainer_lib.data.loading.fetch import is_pure_collator
from trainer_lib.data.loading.loader import has_length
from trainer_lib.errors import DataError


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
        first = samples[0]
        if self.collate is not None:
            return self.to_batch(self.collate(samples))
        if isinstance(first, Mapping):
            return self.to_batch(default_data_collator(samples))
        return self.to_batch(_stack(samples if isinstance(first, tuple) else [(sample,) for sample in samples]))

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
            raise DataError(
                f"A sample or batch has {len(value)} parts.",
                field="train_dataset",
                remedy="Give pairs (features, labels).",
            )
        return Batch.of(value[0], value[1] if len(value) == 2 else None)


def _stack(parts: list[Any]) -> Any:
    """Stack one part of every sample: a value ``[...]`` to ``[batch, ...]``, in mappings and tuples one by one."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {str(name): _stack([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(_stack([part[index] for part in parts]) for index in range(len(first)))
    if not isinstance(first, torch.Tensor) and hasattr(first, "numpy"):
        parts = [part.numpy() for part in parts]  # tensors of TensorFlow
    batch = default_data_collator([{"value": part} for part in parts])
    if "value" not in batch:
        raise DataError(
            "Text cannot be stacked to a batch.",
            field="train_dataset",
            value=type(first).__name__,
            remedy="Turn it into numbers, or give a data_collator.",
        )
    return batch["value"]


def as_dataset(dataset: Any, *, shuffle_seed: int | None = None) -> Any:
    """A data set as the loaders take it: map-style data as it is, anything else as a stream of samples.

    Args:
        shuffle_seed: shuffle a `tf.data.Dataset`, which has no random access, by this seed and the epoch.

    Raises:
        DataError: it is a pair of arrays, which would count as two samples, or its items are batches.
    """
    if isinstance(dataset, tuple) and len(dataset) == 2 and all(hasattr(part, "shape") for part in dataset):
        raise DataError(
            "The data is a pair of arrays, and not a set of pairs.",
            field="train_dataset",
            remedy="Give list(zip(features, labels)).",
        )
    batches = getattr(getattr(sys.modules.get("keras"), "utils", None), "PyDataset", DataLoader)
    if isinstance(dataset, (DataLoader, batches)):
        raise DataError(
            "Its items are batches, and a data set has samples.",
            field="train_dataset",
            value=type(dataset).__name__,
            remedy="Give its samples, or return it from an override of get_train_tfdataset.",
        )
    if dataset is None or isinstance(dataset, IterableDataset):
        return dataset
    if _is_tensorflow(dataset) or (has_length(dataset) and not hasattr(dataset, "__getitem__")):
        return Stream(dataset, shuffle_seed)
    return dataset


def _is_tensorflow(dataset: Any) -> bool:
    return callable(getattr(dataset, "as_numpy_iterator", None))


class Stream(IterableDataset[Any]):
    """The samples of an iterable with a length, or of a `tf.data.Dataset`, as arrays shuffled by (seed, epoch)."""

    def __init__(self, samples: Any, seed: int | None) -> None:
        self._samples = samples
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of that epoch from now on."""
        self._epoch = epoch

    def __len__(self) -> int:
        count = int(self._samples.cardinality()) if _is_tensorflow(self._samples) else len(self._samples)
        if count < 0:  # infinite or unknown
            raise TypeError("The data set has no length.")
        return count

    def __iter__(self) -> Iterator[Any]:
        samples = self._samples
        if not _is_tensorflow(samples):
            return iter(samples)
        if self._seed is not None and has_length(self):
            samples = samples.shuffle(len(self), seed=self._seed + self._epoch, reshuffle_each_iteration=False)
        return iter(samples.as_numpy_iterator())


class BatchLoader:
    """The batches of the user's own loader or data set, as `Batch`.

    Args:
        batches: batches in any form that `to_batch` takes, of torch tensors, arrays or tensors of TensorFlow.
        steps: how many batches to read at most: a `tf.data.Dataset` may repeat itself forever.
    """

    def __init__(self, batches: Iterable[Any], collate: PairCollator, *, steps: int | None = None) -> None:
        self._batches: Any = batches
        self._collate = collate
        self._steps = steps
        self.dataset = getattr(batches, "dataset", None)
        self.batch_size = getattr(batches, "batch_size", None)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches.as_numpy_iterator() if _is_tensorflow(self._batches) else iter(self._batches)
        for batch in itertools.islice(batches, self._steps):
            yield self._collate.to_batch(_to_torch(batch))

    def __len__(self) -> int:
        lengths = [self._steps] if self._steps is not None else []
        lengths += [len(self._batches)] if has_length(self._batches) else []
        if not lengths:
            raise TypeError("The batches have no length.")
        return min(lengths)


def _to_torch(value: Any) -> Any:
    if value is None or isinstance(value, torch.Tensor | Batch):
        return value
    if isinstance(value, Mapping):
        return {str(name): _to_torch(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_to_torch(part) for part in value)
    return torch.from_numpy(np.array(value.numpy() if hasattr(value, "numpy") else value))
