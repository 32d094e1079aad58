"""`TrainingArguments`: every argument of a training run, flat, inert and checked.

The fields live in small groups (one file each) and are inherited, so that subclassing as a dataclass,
`dataclasses.fields`, `dataclasses.replace` and assignment after construction work as for any dataclass. Construction
touches no device, no environment variable and no disk; properties such as `device` look only when they are read.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainer_lib.arguments import compat, io
from trainer_lib.arguments.process_state import fill_accelerate_state
from trainer_lib.arguments.seq2seq_arguments import Seq2SeqArguments
from trainer_lib.arguments.setters import ArgumentSetters
from trainer_lib.errors import ConfigError
from trainer_lib.suggestions import suggestion


class _Translating(ABCMeta):
    """Lets a class and its subclasses accept old names, by translating them before `__init__` gets them."""

    if not TYPE_CHECKING:  # type checkers see the dataclass's own signature

        def __call__(cls, *values, **given):
            # Before `__init__`, because a dataclass's own signature would refuse an old name with a bare TypeError.
            known = constructor_names(cls)
            if any(name in compat.OLD_NAMES and name not in known for name in given):
                given = compat.translate(given, keep=known, stacklevel=2)
            if "**" not in known:
                refuse_unknown(given, known)
            return super().__call__(*values, **given)


# Names that other libraries use, too short for a comparison of their letters.
_SHORT_NAMES = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "steps": "max_steps",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
}
# What the constructor of the Trainer takes -> the recipe's function for it.
_OF_THE_TRAINER = {
    "data_collator": "collate",
    "compute_metrics": "compute_metrics",
    "compute_loss_func": "compute_loss_func",
    "preprocess_logits_for_metrics": "preprocess_logits_for_metrics",
    "callbacks": "callbacks",
    "model_init": "build_model",
}


@functools.cache
def constructor_names(cls: type) -> tuple[str, ...]:
    """Return the names that a class's constructor takes; "**" stands for a constructor that takes any name."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return tuple("**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters)


def refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise a ConfigError for the first name that is not an argument, with the nearest argument as remedy."""
    for name in given:
        if name in known:
            continue
        if name in _OF_THE_TRAINER:
            raise ConfigError(
                "The Trainer takes this, not its arguments.",
                field=name,
                remedy=f"Give it to the Trainer; in a recipe, define {_OF_THE_TRAINER[name]}.",
            )
        usual = f'Did you mean "{_SHORT_NAMES[name]}"?' if name in _SHORT_NAMES else None
        remedy = usual or suggestion(name, [*known, *compat.OLD_NAMES], listing=False)
        raise ConfigError("No argument has this name.", field=name, remedy=remedy)


def _joined(present: Any, changed: Any) -> Any:
    if isinstance(present, dict) and isinstance(changed, dict):
        return type(present)({**present, **changed})
    return changed


@dataclass
class TrainingArguments(ArgumentSetters, metaclass=_Translating):
    """The arguments of a training run; the file of each group documents its fields.

    Construction, and `validate` again, fill the fields that follow from others: `output_dir`, `do_eval`, `eval_steps`,
    `metric_for_best_model`, `greater_is_better`, `torch_compile`, and both names of gradient checkpointing.

    Raises:
        ConfigError: at construction, when a value is out of range or of the wrong type, a name is unknown, or
            arguments contradict each other.
    """

    def __post_init__(self) -> None:
        self.validate()
        fill_accelerate_state(self)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are not found otherwise: old names, and mistakes.
        old = compat.OLD_NAMES.get(name)
        if name == "_n_gpu":  # which older scripts set too, so a property would not do
            return self.n_gpu
        if old is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        compat.warn(name, stacklevel=3)
        return old.read(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # A subclass may declare a field that has an old name: then the field is meant.
        if name in compat.OLD_NAMES and name not in type(self).__dataclass_fields__:
            for new, changed in compat.changes_for(name, value, stacklevel=3).items():
                object.__setattr__(self, new, _joined(self.__dict__.get(new), changed))
            return
        object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, prefix: str = "train.args") -> Self:
        """Make arguments from a mapping, such as a part of a spec. Old names are accepted.

        Args:
            values: names and values; texts are converted to the field's type ("1e-3", "true", "none").
            prefix: stands before the field's name in errors.

        Raises:
            ConfigError: an argument is refused; the error's field is `<prefix>.<name>`.
        """
        try:
            return cls(**{str(name): value for name, value in values.items()})
        except ConfigError as error:
            if prefix and error.field:
                error.field = f"{prefix}.{compat.name_as_given(error.field, values)}"
            raise

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Self:
        """Make arguments from a JSON or YAML file.

        Raises:
            ConfigError: the file cannot be read, or an argument is refused; the field is `<file name>.<name>`.
        """
        file = Path(path)
        return cls.from_dict(io.read_mapping(file, field="file"), prefix=file.name)

    def to_dict(self) -> dict[str, Any]:
        """Return every argument as plain JSON values: enums by value, tokens masked."""
        return io.to_dict(self)

    def to_json_string(self) -> str:
        """Return `to_dict` as indented JSON."""
        return io.to_json_string(self)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return `to_dict` for trackers that accept only numbers, truth values and texts."""
        return io.to_sanitized_dict(self)


@dataclass
class Seq2SeqTrainingArguments(Seq2SeqArguments, TrainingArguments):
    """`TrainingArguments` plus what `Seq2SeqTrainer` needs."""
