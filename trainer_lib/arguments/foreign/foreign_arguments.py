"""Arguments of transformers, and of classes derived from them, as our own.

What has the value that transformers gives it by itself was not asked for, and keeps our default. Fields that a subclass
adds, and what else was set on the object, come along under their names; so do its constants, and its methods, as far as
they do not call `super()`. A field of transformers that is unknown here is refused by its name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

from trainer_lib.arguments.fields import field_map
from trainer_lib.arguments.training import Seq2SeqTrainingArguments, TrainingArguments, constructor_names
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

_PACKAGE = "transformers"
_NAMES = ("Seq2SeqTrainingArguments", "TrainingArguments")  # the more specific one first
#: The arguments that no version of transformers has.
OURS_ALONE = (
    *("global_batch_size", "save_async", "max_failed_saves", "max_nonfinite_steps", "allow_global_batch_change"),
    *("loss_spike_sigma", "loss_spike_window", "max_loss_spikes", "fp8", "parallelism"),
)
_REMEDY = "Give trainer_lib.TrainingArguments, or the TrainingArguments of transformers."


def adopt_arguments(args: Any) -> TrainingArguments:
    """Return `args` if they are ours; convert those of transformers, and of classes derived from them.

    Raises:
        ConfigError: the object is not a set of training arguments, has a field that is unknown here, or holds a value
            that is refused.
    """
    if isinstance(args, TrainingArguments):
        return args
    if isinstance(args, Mapping):
        raise ConfigError(
            "The arguments are a mapping.",
            field="args",
            value=type(args).__name__,
            remedy="Give TrainingArguments.from_dict(values).",
        )
    base = _base(type(args))
    if base is None or isinstance(args, type):
        raise _refusal(args)
    usual = base(output_dir="trainer_output", use_cpu=args.use_cpu)
    target = _target(type(args), base)
    asked = _asked(args, usual, target)
    own = {name: getattr(args, name) for name in _added_fields(type(args), base)}
    _refuse_other_meanings(own)
    adopted: TrainingArguments = target(**asked)
    fields = {field.name for field in dataclasses.fields(args)}
    # What was set on the object besides its fields, and not by transformers.
    besides = {name: value for name, value in vars(args).items() if name not in fields and name not in vars(usual)}
    for name, value in {**besides, **own}.items():
        if not isinstance(getattr(type(adopted), name, None), property):
            object.__setattr__(adopted, name, value)
    return adopted


def _base(cls: type) -> Any:
    """The class of transformers that `cls` is, or is derived from; None for any other class."""
    for parent in cls.__mro__:
        if parent.__name__ in _NAMES and parent.__module__.partition(".")[0] == _PACKAGE:
            return parent
    return None


def _refusal(args: Any) -> ConfigError:
    """The error for an object of another kind; it names the first of its values that is not an argument."""
    if isinstance(args, type):
        remedy = f'Make one: {args.__name__}("out", …).'
        return ConfigError("The Trainer needs arguments, not their class.", field="args", value=args, remedy=remedy)
    kind, known = type(args).__name__, constructor_names(TrainingArguments)
    for name, value in getattr(args, "__dict__", {}).items():
        if name not in known and not name.startswith("_"):
            what = f"The arguments are a {kind}, and no training argument has this name."
            return ConfigError(what, field=f"args.{name}", value=value, remedy=_REMEDY)
    return ConfigError("These are not training arguments.", field="args", value=kind, remedy=_REMEDY)


def _added_fields(cls: Any, base: Any) -> list[str]:
    """The fields that a class adds to those of transformers."""
    known = {field.name for field in dataclasses.fields(base)}
    return [field.name for field in dataclasses.fields(cls) if field.name not in known]


def _refuse_other_meanings(own: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field that a subclass adds under a name that only trainer_lib has an argument for."""
    for name, field in field_map(TrainingArguments).items():
        if name in OURS_ALONE and own.get(name, field.default) not in (None, field.default):
            raise ConfigError(
                "The class adds this field; trainer_lib has an argument of this name, which may mean something else.",
                field=name,
                value=own[name],
                remedy="Rename the field, or derive the class from trainer_lib.TrainingArguments.",
            )


def _target(cls: Any, base: Any) -> Any:
    """Our class for arguments of class `cls`: with the fields, methods and constants that it and its mixins add."""
    ours = Seq2SeqTrainingArguments if base.__name__ == _NAMES[0] else TrainingArguments
    if cls is base:
        return ours
    annotated = [(name, Any, dataclasses.field(default=None)) for name in _added_fields(cls, base)]
    fields = {field.name for field in dataclasses.fields(cls)}
    members: dict[str, Any] = {"__module__": cls.__module__}
    for parent in reversed(cls.__mro__):
        if parent not in base.__mro__:
            own = {name: value for name, value in vars(parent).items() if name not in fields}
            members |= {name: value for name, value in own.items() if _is_portable(name, value)}
    return dataclasses.make_dataclass(cls.__name__, annotated, bases=(ours,), namespace=members)


def _is_portable(name: str, value: Any) -> bool:
    """Whether a member of a class works in another one: a constant, or a property or method without `super()`."""
    if name.startswith("__") or name == "_abc_impl":
        return False
    for inner in ("fget", "func", "__func__"):  # of a property, a cached property, a static or class method
        value = getattr(value, inner, value)
    # `super()` and `__class__` are free variables that hold the class of the definition.
    return not inspect.isfunction(value) or "__class__" not in value.__code__.co_freevars


def _asked(args: Any, usual: Any, target: type) -> dict[str, Any]:
    """The arguments whose value is not the usual one, by name, as plain values."""
    known = constructor_names(target)
    asked: dict[str, Any] = {}
    for field in dataclasses.fields(usual):
        value = getattr(args, field.name)
        given = _difference(_plain(value), _plain(getattr(usual, field.name)))
        if given is None:
            continue
        if field.name not in known:
            raise ConfigError(
                "trainer_lib has no argument of this name.",
                field=field.name,
                value=value,
                remedy=suggestion(field.name, known, listing=False),
            )
        asked[field.name] = given[0]
    if args.use_cpu:
        asked["use_cpu"] = True  # `usual` has it too, because it decides what else is usual
    sharding = asked.get("fsdp_config") or {}
    if asked.get("fsdp") is True and not any(sharding.get(key) for key in ("auto_wrap_policy", "min_num_params")):
        asked["fsdp"] = "full_shard auto_wrap"  # there, layers are wrapped unless a policy says otherwise
    return asked


def _difference(value: Any, usual: Any) -> tuple[Any] | None:
    """The part of a value that is not the usual one, in a tuple; None when all of it is."""
    if isinstance(value, dict) and isinstance(usual, dict):
        changed = {key: member for key, member in value.items() if key not in usual or member != usual[key]}
        return (changed,) if changed else None
    return None if value == usual else (value,)


def _plain(value: Any) -> Any:
    """The settings of transformers' own objects as mappings, and its choices as texts; any other value as it is."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if type(value).__name__ == "AcceleratorConfig":
        return dict(value.to_dict())
    return value
