"""Keras on torch: its first import, names of parameters, optimizers, and data sets of (features, labels)."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from trainer_lib.data.loading.collators import default_data_collator
from trainer_lib.data.loading.loader import has_length, is_pure_collator
from trainer_lib.errors import ConfigError, DataError, MissingExtraError
from trainer_lib.evaluation import nested

_VARIABLE = "KERAS_BACKEND"
_PARAMETERS = "_torch_params"  # under this name, Keras registers a layer's variables with torch

#: What a Keras optimizer would do by itself, although the Trainer does it -> the remedy.
_OWN_LOOPS = {
    "inner_optimizer": "Give the optimizer inside it, and set fp16=True.",  # of a LossScaleOptimizer
    "loss_scale_factor": "Remove it, and set fp16=True.",
    "gradient_accumulation_steps": "Remove it, and set gradient_accumulation_steps in the arguments.",
    "use_ema": "Remove it, and average the weights in a callback.",
}


def choose_torch() -> None:
    """Let Keras run on torch when it is imported, unless the environment chooses a backend."""
    if "keras" not in sys.modules:
        os.environ.setdefault(_VARIABLE, "torch")


def import_keras() -> Any:
    """The package keras, on torch. Raises MissingExtraError without it, and ConfigError if it has another backend."""
    choose_torch()
    chosen = os.environ.get(_VARIABLE, "torch")
    try:
        keras = importlib.import_module("keras")
        chosen = keras.config.backend()
    except ImportError as error:
        if chosen == "torch":
            raise MissingExtraError(f"Keras cannot be imported: {error}.", field="model", extra="keras") from error
    if chosen != "torch":
        remedy = "Set KERAS_BACKEND=torch in the environment, or import TFTrainer before keras."
        raise refusal(_VARIABLE, "A TFTrainer trains Keras models that run on torch.", remedy, chosen)
    return keras


def refusal(field: str, message: str, remedy: str, value: Any = None) -> ConfigError:
    """The error for a setting, or for an object that is shown by the name of its class."""
    shown = value if value is None or isinstance(value, str | int | float) else type(value).__name__
    return ConfigError(message, field=field, value=shown, remedy=remedy)


def is_keras_model(model: object) -> bool:
    """Whether a model is a `keras.Model`; keras is not imported for it."""
    kind = getattr(sys.modules.get("keras"), "Model", None)
    return isinstance(kind, type) and isinstance(model, kind)


def placed_on(device: torch.device) -> AbstractContextManager[None]:
    """A block in which Keras creates and converts tensors on `device`: it chooses a GPU itself, even with `use_cpu`."""
    block: AbstractContextManager[None] = import_keras().device(str(device))
    return block


def register_parameters(model: Any) -> None:
    """Register a built model's variables with torch once, under names that do not depend on the process.

    Keras numbers layers without a name through the whole process: a second model of the same code has ``dense_2`` where
    the first one has ``dense``, and a checkpoint of the first would not fit it. Here the place among the variables
    tells them apart: ``0/sequential/dense/kernel``.
    """
    names = (re.sub(r"_\d+(?=/)", "", variable.path) for variable in model.variables)
    tensors = {
        f"{place}/{name}": var.value for place, (name, var) in enumerate(zip(names, model.variables, strict=True))
    }
    for module in list(model.modules()):
        if hasattr(type(module), "torch_params"):  # a layer of Keras: without any, it would register its own again
            module._modules.pop(_PARAMETERS, None)
            module.register_module(_PARAMETERS, nn.ParameterDict(tensors if module is model else {}))


# -- the optimizer -----------------------------------------------------------------------------------------------------


class KerasOptimizer(torch.optim.Optimizer):
    """A Keras optimizer over a model's trainable variables; attributes that torch has not are the Keras optimizer's.

    Keras owns the state: slots (momentum, velocity, …), the count of the steps, perhaps the learning rate. Checkpoints
    get it from `state_dict`, and a restored one is copied into Keras' tensors.

    Raises:
        ConfigError: the optimizer accumulates, averages or scales by itself, or was built for another model.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], device: torch.device) -> None:
        for name, remedy in _OWN_LOOPS.items():
            if getattr(optimizer, name, None):
                raise refusal("optimizers", "The Keras optimizer does by itself what the Trainer does.", remedy, name)
        self.keras_optimizer = optimizer
        self._device = device
        self._variables = list(variables)
        with placed_on(device):
            if not optimizer.built:
                optimizer.build(self._variables)
        try:  # Keras' own check, which it makes at its first step: here it is made before training
            optimizer._check_variables_are_known(self._variables)
        except ValueError as error:
            message = "The Keras optimizer was built for the variables of another model."
            raise refusal("optimizers", message, "Make a new optimizer for this model.", optimizer) from error
        for variable in optimizer.variables:
            variable.value.data = variable.value.data.to(device)  # the user may have built it for another device
        super().__init__([variable.value for variable in self._variables], {"lr": self.rate()})

    def rate(self) -> torch.Tensor:
        """The learning rate of the next step ``[]``, as a copy."""
        with torch.no_grad(), placed_on(self._device):
            rate: torch.Tensor = import_keras().ops.convert_to_tensor(self.keras_optimizer.learning_rate, "float32")
        return rate.detach().clone()

    @override
    def step(self, closure: Any = None) -> Any:
        """Update the variables from their gradients. The group's "lr" is afterwards the rate of this step."""
        self.param_groups[0]["lr"] = self.rate()
        with torch.no_grad(), placed_on(self._device):
            self.keras_optimizer.apply([variable.value.grad for variable in self._variables], self._variables)
        return None

    @property
    def state(self) -> Any:
        """The Keras optimizer's variables ``[...]`` under their numbers; changing the mapping has no effect."""
        variables = self.keras_optimizer.variables
        return {"keras": {str(number): variable.value.detach() for number, variable in enumerate(variables)}}

    @state.setter
    def state(self, value: Any) -> None:
        """Do nothing: torch would set an empty state."""

    @override
    def state_dict(self) -> dict[str, Any]:
        """The Keras optimizer's variables ``[...]``, in its order."""
        return {"variables": list(self.state["keras"].values())}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the variables ``[...]`` of `state_dict` in. Raises ConfigError for those of another optimizer."""
        present, saved = self.state_dict()["variables"], state_dict["variables"]
        if [tensor.shape for tensor in present] != [tensor.shape for tensor in saved]:
            message = "The checkpoint holds the state of another Keras optimizer."
            remedy = "Resume with the optimizer that wrote the checkpoint, or load its weights only."
            raise refusal("optimizers", message, remedy, self.keras_optimizer)
        with torch.no_grad():
            for tensor, value in zip(present, saved, strict=True):
                tensor.copy_(value)

    def __getattr__(self, name: str) -> Any:
        # Called for names that are not found otherwise; before `__init__` has run there is nothing to ask.
        if "keras_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.keras_optimizer, name)


class KerasSchedule:
    """The schedule inside a Keras optimizer, with the methods that the Trainer calls on a schedule."""

    def __init__(self, optimizer: KerasOptimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, step: Any) -> float:
        """The learning rate of the step with that number, counted from 0."""
        schedule = self._optimizer.keras_optimizer._learning_rate
        is_schedule = callable(schedule) and hasattr(schedule, "get_config")
        return float(schedule(step) if is_schedule else self._optimizer.rate())

    def step(self, metric: Any = None) -> None:
        """Do nothing: the Keras optimizer counts its own steps."""

    def get_last_lr(self) -> list[float]:
        """The learning rate of the newest step."""
        return [float(self._optimizer.param_groups[0]["lr"])]

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's count of its steps, which is all that a schedule depends on."""
        return {"iterations": int(self._optimizer.keras_optimizer.iterations)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the count is restored with the optimizer."""


def use_schedule(optimizer: Any, schedule: Any) -> None:
    """Let a Keras optimizer follow a schedule that was given alongside it. Raises ConfigError if it has another."""
    kind, present = import_keras().optimizers.schedules.LearningRateSchedule, optimizer._learning_rate
    if not isinstance(schedule, kind):
        message = "The schedule of a Keras optimizer must be a Keras schedule."
        remedy = "Give a keras.optimizers.schedules.LearningRateSchedule, or None."
        raise refusal("optimizers", message, remedy, schedule)
    if isinstance(present, kind) and present is not schedule and present.get_config() != schedule.get_config():
        message = "The optimizer has another schedule than the given one."
        remedy = "Give the optimizer that schedule as its learning_rate, or give (optimizer, None)."
        raise refusal("optimizers", message, remedy, schedule)
    if present is not schedule:
        optimizer.learning_rate = schedule


def as_writer(writer: Any) -> Any:
    """A writer with the methods of torch's; one of TensorFlow is wrapped, and stays open. Raises ConfigError."""
    if callable(getattr(writer, "add_scalar", None)):
        return writer
    if not callable(getattr(writer, "as_default", None)):
        remedy = "Give a SummaryWriter of torch or of TensorFlow."
        raise refusal("tb_writer", "It has neither add_scalar() nor as_default().", remedy, writer)
    summary: Any = importlib.import_module("tensorflow").summary  # imported already: it made the writer

    def add_scalar(name: str, value: float, step: int) -> None:
        with writer.as_default():
            summary.scalar(name, value, step=step)

    def add_text(name: str, text: str) -> None:
        with writer.as_default():
            summary.text(name, text, step=0)

    return SimpleNamespace(add_scalar=add_scalar, add_text=add_text, flush=writer.flush)


# -- data sets of (features, labels) -----------------------------------------------------------------------------------
# A sample is a pair (features, labels), or a mapping in which `label_names` are the labels. Features and labels are
# numbers, arrays or tensors, or mappings of them; labels may be missing.


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

    A user's `collate` may return any form that `to_batch` takes; None stacks. `label_names` are columns of samples that
    are mappings. `one_input`: the model takes one tensor, so that the only column of a mapping is the features.
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
        """A `Batch` of one; of a pair (features, labels); of a mapping with labels under their names; of features."""
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
            remedy = "Give pairs (features, labels). Weights may be among the labels, for compute_loss_func."
            raise _refusal(f"A sample or batch has {len(value)} parts.", remedy)
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

    A `tf.data.Dataset` has no random access: it is shuffled by `shuffle_seed` and the epoch. Raises DataError for
    arrays of columns, which would count as samples, and for items that are batches.
    """
    parts = [*dataset.values()] if isinstance(dataset, Mapping) else dataset if isinstance(dataset, tuple) else []
    if len(parts) > 1 and all(hasattr(part, "shape") for part in parts):
        raise _refusal("The data is arrays of columns, and not a set of pairs.", "Give list(zip(features, labels)).")
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

    A `tf.data.Dataset` is shuffled by `seed` and the epoch. At most `steps` items are read: it may repeat itself
    forever.
    """

    def __init__(
        self, items: Any, seed: int | None = None, steps: int | None = None, convert: Callable[[Any], Any] | None = None
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
