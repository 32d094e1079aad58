"""`TrainingArguments`: every argument of a training run, flat, inert and checked.

The fields live in small groups (one file each) and are inherited, so that subclassing as a dataclass,
`dataclasses.fields`, `dataclasses.replace` and assignment after construction work as they do for any dataclass. Nothing
here touches a device, the environment or the disk; what must (`device`, ranks) is looked up when asked for.
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
from trainer_lib.arguments.seq2seq_arguments import Seq2SeqArguments
from trainer_lib.arguments.setters import ArgumentSetters
from trainer_lib.errors import ConfigError
from trainer_lib.suggestions import suggestion


class _Translating(ABCMeta):
    """Lets a class take old names: they are translated before its `__init__` sees them, in subclasses too."""

    if not TYPE_CHECKING:  # type checkers see the dataclass's own signature

        def __call__(cls, *values, **given):
            known = constructor_names(cls)
            if any(name in compat.OLD_NAMES and name not in known for name in given):
                given = compat.translate(given, keep=known, stacklevel=2)
            if "**" not in known:
                refuse_unknown(given, known)
            return super().__call__(*values, **given)


@functools.cache
def constructor_names(cls: type) -> tuple[str, ...]:
    """The names a class's constructor takes; "**" is among them when it takes any."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return tuple("**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters)


def refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise a ConfigError for the first name that is no argument, with the nearest one that is."""
    for name in given:
        if name not in known:
            remedy = suggestion(name, [*known, *compat.OLD_NAMES], listing=False)
            raise ConfigError("There is no such argument.", field=name, remedy=remedy)


def _joined(present: Any, changed: Any) -> Any:
    return {**present, **changed} if isinstance(present, dict) and isinstance(changed, dict) else changed


@dataclass
class TrainingArguments(ArgumentSetters, metaclass=_Translating):
    """The arguments of a training run; each group's file documents its own.

    Fields that follow from others are filled at construction and again by `validate`: `output_dir`, `do_eval`,
    `eval_steps`, `metric_for_best_model`, `greater_is_better`, `torch_compile`, both names of gradient checkpointing.

    Raises:
        ConfigError: at construction, for a value that is out of range or of the wrong type, an unknown name, or
            arguments that contradict each other.
    """

    def __post_init__(self) -> None:
        self.validate()

    def __getattr__(self, name: str) -> Any:
        old = compat.OLD_NAMES.get(name)
        if old is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        compat.warn(name, stacklevel=3)
        return old.read(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in compat.OLD_NAMES and name not in type(self).__dataclass_fields__:
            for new, changed in compat.changes_for(name, value, stacklevel=3).items():
                object.__setattr__(self, new, _joined(self.__dict__.get(new), changed))
            return
        object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, prefix: str = "train.args") -> Self:
        """Arguments from a mapping, such as a part of a spec; old names are understood.

        Args:
            values: names and values; texts are coerced to the field's type ("1e-3", "true", "none").
            prefix: put before the field's name in errors.

        Raises:
            ConfigError: with field `<prefix>.<name>`.
        """
        try:
            return cls(**{str(name): value for name, value in values.items()})
        except ConfigError as error:
            if prefix and error.field:
                error.field = f"{prefix}.{error.field}"
            raise

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Self:
        """Arguments from a JSON or YAML file.

        Raises:
            ConfigError: the file cannot be read, or its arguments are refused (field `<file name>.<name>`).
        """
        file = Path(path)
        return cls.from_dict(io.read_mapping(file, field="file"), prefix=file.name)

    def to_dict(self) -> dict[str, Any]:
        """Every argument as plain JSON values: enums by value, tokens masked."""
        return io.to_dict(self)

    def to_json_string(self) -> str:
        """`to_dict` as indented JSON."""
        return io.to_json_string(self)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` for trackers that take only numbers, truth values and texts."""
        return io.to_sanitized_dict(self)


@dataclass
class Seq2SeqTrainingArguments(Seq2SeqArguments, TrainingArguments):
    """`TrainingArguments` plus what `Seq2SeqTrainer` needs."""
