"""Arguments of other programs as our own: the objects of transformers, and the variables of `accelerate launch`.

What has the value that transformers gives it by itself was not asked for, and keeps our default. Fields that a subclass
adds, and what else was set on the object, come along under their names; so do its constants, and its methods, as far as
they do not call `super()`. A field of transformers that is unknown here is refused by its name.

The flags and the configuration file of `accelerate launch` arrive as environment variables (ACCELERATE_*, FSDP_*). A
setting given once is used, settings given in both places must be equal, and an error about a contradiction names both
values. Nothing else in this library reads these variables, and nothing here imports torch.

    ACCELERATE_MIXED_PRECISION              bf16, fp16, fp8 (of torchao)
    ACCELERATE_USE_CPU                      use_cpu
    ACCELERATE_GRADIENT_ACCUMULATION_STEPS  gradient_accumulation_steps
    ACCELERATE_GRADIENT_CLIPPING            max_grad_norm
    ACCELERATE_DYNAMO_BACKEND, _MODE        torch_compile, torch_compile_backend, torch_compile_mode
    ACCELERATE_USE_FSDP, FSDP_*             fsdp, fsdp_config
    ACCELERATE_USE_DEEPSPEED, ACCELERATE_DEEPSPEED_*    deepspeed
    ACCELERATE_USE_PARALLELISM_CONFIG, PARALLELISM_CONFIG_*_SIZE    parallelism_config
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from trainer_lib.arguments.coerce import read_mapping
from trainer_lib.arguments.fields import declarations, field_map
from trainer_lib.arguments.training import Seq2SeqTrainingArguments, TrainingArguments, constructor_names
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

_NAMES = ("Seq2SeqTrainingArguments", "TrainingArguments")  # the more specific one first
_REMEDY = "Give trainer_lib.TrainingArguments, or the TrainingArguments of transformers."
_TRUE = ("1", "true", "yes", "on")
_NOTHING = ("", "no", "none", "auto", "null")  # how accelerate writes an absent setting
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # numbered from 1
_WAYS = frozenset(word.lower() for word in _SHARDING)
_SIZES = "PARALLELISM_CONFIG_"
# Settings of fsdp_config by the variable that carries them: words, and truth values.
_FSDP_TEXTS = {"FSDP_BACKWARD_PREFETCH": "backward_prefetch", "FSDP_STATE_DICT_TYPE": "state_dict_type"}
# With the launcher's default, which it always writes and which therefore asks for nothing.
_FSDP_FLAGS = {
    "FSDP_FORWARD_PREFETCH": ("forward_prefetch", False),
    "FSDP_USE_ORIG_PARAMS": ("use_orig_params", True),
    "FSDP_SYNC_MODULE_STATES": ("sync_module_states", True),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("cpu_ram_efficient_loading", True),
    "FSDP_ACTIVATION_CHECKPOINTING": ("activation_checkpointing", False),
}


def adopt_arguments(args: Any) -> TrainingArguments:
    """Return `args` if they are ours; convert those of transformers, and of classes derived from them.

    Raises ConfigError for another object, a field that is unknown here, and a value that is refused.
    """
    if isinstance(args, TrainingArguments):
        return args
    if isinstance(args, Mapping):
        remedy = "Give TrainingArguments.from_dict(values)."
        raise ConfigError("The arguments are a mapping.", field="args", value=type(args).__name__, remedy=remedy)
    parents = (parent for parent in type(args).__mro__ if parent.__module__.partition(".")[0] == "transformers")
    base: Any = next((parent for parent in parents if parent.__name__ in _NAMES), None)
    if base is None or isinstance(args, type):
        raise _refusal(args)
    usual = base(output_dir="trainer_output", use_cpu=args.use_cpu)
    target = _target(type(args), base)
    asked = _asked(args, usual, target)
    own = {name: getattr(args, name) for name in _added_fields(type(args), base)}
    declared = declarations(TrainingArguments)
    for name, field in field_map(TrainingArguments).items():  # what only trainer_lib has an argument for
        if declared[name].alone and own.get(name, field.default) not in (None, field.default):
            what = "The class adds this field; trainer_lib has an argument of this name, which may mean something else."
            remedy = "Rename the field, or derive the class from trainer_lib.TrainingArguments."
            raise ConfigError(what, field=name, value=own[name], remedy=remedy)
    adopted: TrainingArguments = target(**asked)
    fields = {field.name for field in dataclasses.fields(args)}
    # What was set on the object besides its fields, and not by transformers.
    besides = {name: value for name, value in vars(args).items() if name not in fields and name not in vars(usual)}
    for name, value in {**besides, **own}.items():
        if not isinstance(getattr(type(adopted), name, None), property):
            object.__setattr__(adopted, name, value)
    return adopted


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
        own, theirs = _plain(value), _plain(getattr(usual, field.name))
        if isinstance(own, dict) and isinstance(theirs, dict):
            own, theirs = {key: own[key] for key in own if key not in theirs or own[key] != theirs[key]}, {}
        if own == theirs:
            continue
        if field.name not in known:
            remedy = suggestion(field.name, known, listing=False)
            raise ConfigError("trainer_lib has no argument of this name.", field=field.name, value=value, remedy=remedy)
        asked[field.name] = own
    if args.use_cpu:
        asked["use_cpu"] = True  # `usual` has it too, because it decides what else is usual
    sharding = asked.get("fsdp_config") or {}
    if asked.get("fsdp") is True and not any(sharding.get(key) for key in ("auto_wrap_policy", "min_num_params")):
        asked["fsdp"] = "full_shard auto_wrap"  # there, layers are wrapped unless a policy says otherwise
    return asked


def _plain(value: Any) -> Any:
    """The settings of transformers' own objects as mappings, and its choices as texts; any other value as it is."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if type(value).__name__ == "AcceleratorConfig":
        return dict(value.to_dict())
    return value


class LauncherSetting(NamedTuple):
    """One argument that the launcher sets, and the variable that holds it."""

    name: str
    value: Any
    source: str


def apply_launcher(args: TrainingArguments, environ: Mapping[str, str] | None = None) -> TrainingArguments:
    """Return validated arguments with those that the launcher's environment gives: a copy if it gives any.

    Raises ConfigError for a contradiction (with both values), and for what is not supported.
    """
    args.validate()
    settings = list(implied(os.environ if environ is None else environ))
    if not settings:
        return args
    args = copy.copy(args)
    for setting in settings:
        setattr(args, setting.name, _merged(setting, args))
    args.validate()
    return args


def merge(given: Mapping[str, Any], environ: Mapping[str, str], *, prefix: str = "") -> dict[str, Any]:
    """A mapping of arguments, such as a spec's `train.args`, with those that the launcher's environment gives.

    `prefix` stands before the field's name in errors (``train.args``), which are those of `apply_launcher`.
    """
    settings = list(implied(environ))
    if not settings:
        return dict(given)
    parsed, merged = TrainingArguments.from_dict(given, prefix=prefix), dict(given)
    try:
        for setting in settings:
            merged[setting.name] = _merged(setting, parsed)
    except ConfigError as error:
        error.field = f"{prefix}.{error.field}" if prefix else error.field
        raise
    return merged


def implied(environ: Mapping[str, str]) -> Iterator[LauncherSetting]:
    """Yield the arguments that these variables set; without `accelerate launch`, none. Raises ConfigError."""
    name = "ACCELERATE_USE_MEGATRON_LM"
    if _is_true(environ.get(name)):
        field, remedy = f"environment variable {name}", "Use fsdp or deepspeed."
        raise ConfigError("This is not supported.", field=field, value=environ[name], remedy=remedy)
    yield from _precision(environ)
    if _is_true(environ.get("ACCELERATE_USE_CPU")):
        yield LauncherSetting("use_cpu", True, "ACCELERATE_USE_CPU")
    for name, field, kind in (
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps", int),
        ("ACCELERATE_GRADIENT_CLIPPING", "max_grad_norm", float),
    ):
        text = environ.get(name, "")
        # accelerate always writes 1 for accumulation, its default.
        if text.lower() not in _NOTHING and not (kind is int and text == "1"):
            yield LauncherSetting(field, _number(name, text, kind), name)
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend not in _NOTHING:
        yield LauncherSetting("torch_compile", True, "ACCELERATE_DYNAMO_BACKEND")
        yield LauncherSetting("torch_compile_backend", backend, "ACCELERATE_DYNAMO_BACKEND")
        mode = environ.get("ACCELERATE_DYNAMO_MODE", "default")
        if mode != "default":
            yield LauncherSetting("torch_compile_mode", mode, "ACCELERATE_DYNAMO_MODE")
    if _is_true(environ.get("ACCELERATE_USE_FSDP")):
        yield from _fsdp(environ)
    if _is_true(environ.get("ACCELERATE_USE_DEEPSPEED")):
        yield _deepspeed(environ)
    yield from _parallelism(environ)


def _parallelism(environ: Mapping[str, str]) -> Iterator[LauncherSetting]:
    if _is_true(environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        names = [name for name in environ if name.startswith(_SIZES) and name.endswith("_SIZE")]
        sizes = {name.removeprefix(_SIZES).lower(): _number(name, environ[name], int) for name in names}
        yield LauncherSetting("parallelism_config", sizes, f"{_SIZES}*_SIZE")


def _precision(environ: Mapping[str, str]) -> Iterator[LauncherSetting]:
    name = "ACCELERATE_MIXED_PRECISION"
    word = environ.get(name, "no").lower()
    if word in ("bf16", "fp16"):
        yield LauncherSetting(word, True, name)
    elif word == "fp8" and environ.get("ACCELERATE_FP8_BACKEND", "AO").upper() in ("AO", "AUTO"):
        yield LauncherSetting("bf16", True, name)
        yield LauncherSetting("fp8", "tensorwise", name)
    elif word not in _NOTHING:
        remedy = "Choose no, bf16, fp16, or fp8 with the backend AO."
        raise ConfigError("This is not supported.", field=f"environment variable {name}", value=word, remedy=remedy)


def _fsdp(environ: Mapping[str, str]) -> Iterator[LauncherSetting]:
    yield LauncherSetting("fsdp", " ".join(_fsdp_words(environ)), "FSDP_SHARDING_STRATEGY")
    settings: dict[str, Any] = {}
    for name, key in _FSDP_TEXTS.items():
        text = environ.get(name, "").lower()
        if text not in (*_NOTHING, "no_prefetch"):
            settings[key] = text
    for name, (key, usual) in _FSDP_FLAGS.items():
        if name in environ and _is_true(environ[name]) != usual:
            settings[key] = not usual
    # Version 1 is the launcher's default and asks for nothing: all its modes run on the second version.
    if environ.get("FSDP_VERSION", "1") == "2":
        settings["version"] = 2
    policy = environ.get("FSDP_AUTO_WRAP_POLICY", "")
    classes = environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    if policy == "TRANSFORMER_BASED_WRAP" and classes.lower() not in _NOTHING:
        settings["transformer_layer_cls_to_wrap"] = [part.strip() for part in classes.split(",")]
    if policy == "SIZE_BASED_WRAP":
        text = environ.get("FSDP_MIN_NUM_PARAMS", "")
        settings["min_num_params"] = _number("FSDP_MIN_NUM_PARAMS", text, int)
    yield LauncherSetting("fsdp_config", settings, "FSDP_*")


def _fsdp_words(environ: Mapping[str, str]) -> Iterator[str]:
    name = "FSDP_SHARDING_STRATEGY"
    text = environ.get(name, "FULL_SHARD").upper()
    if text.isdigit() and 1 <= int(text) <= len(_SHARDING):
        text = _SHARDING[int(text) - 1]
    if environ.get("FSDP_VERSION", "1") == "2":  # there the mode follows from what happens after the forward pass
        name, text = "FSDP_RESHARD_AFTER_FORWARD", environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").upper()
        text = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(text, text)
    if text not in _SHARDING:
        what = "No way of sharding has this name."
        remedy = f"Choose one of {', '.join(_SHARDING)}."
        raise ConfigError(what, field=f"environment variable {name}", value=text, remedy=remedy)
    yield text.lower()
    if _is_true(environ.get("FSDP_OFFLOAD_PARAMS")):
        yield "offload"
    if environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP") in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
        yield "auto_wrap"


def _deepspeed(environ: Mapping[str, str]) -> LauncherSetting:
    prefix = "ACCELERATE_DEEPSPEED_"
    file = environ.get(f"{prefix}CONFIG_FILE", "")
    if file.lower() not in _NOTHING:
        return LauncherSetting("deepspeed", file, f"{prefix}CONFIG_FILE")
    # 2 is accelerate's own default.
    stage = environ.get(f"{prefix}ZERO_STAGE", "2")
    zero: dict[str, Any] = {"stage": _number(f"{prefix}ZERO_STAGE", stage, int)}
    for what in ("OPTIMIZER", "PARAM"):
        device = environ.get(f"{prefix}OFFLOAD_{what}_DEVICE", "none").lower()
        if device not in _NOTHING:
            zero[f"offload_{what.lower()}"] = {"device": device}
            path = environ.get(f"{prefix}OFFLOAD_{what}_NVME_PATH", "none")
            if path.lower() not in _NOTHING:
                zero[f"offload_{what.lower()}"]["nvme_path"] = path
    if _is_true(environ.get(f"{prefix}ZERO3_SAVE_16BIT_MODEL")):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    # The rest follows from the arguments, which already hold the launcher's settings.
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {**dict.fromkeys((*automatic, "gradient_clipping"), "auto"), "zero_optimization": zero}
    return LauncherSetting("deepspeed", config, f"{prefix}ZERO_STAGE")


def _merged(setting: LauncherSetting, args: TrainingArguments) -> Any:
    """The one value of a setting that both may give."""
    given = getattr(args, setting.name)
    default = {"fsdp": "", "fsdp_config": None}.get(setting.name, field_map(args)[setting.name].default)
    if setting.name == "fsdp":  # the modes must agree; offload and auto_wrap add up
        words, theirs = given.split() if isinstance(given, str) else list(given or []), setting.value.split()
        if any(word in _WAYS and word not in theirs for word in words):
            raise _contradiction("fsdp", given, setting.value, setting.source)
        return " ".join(dict.fromkeys([*theirs, *words]))
    if given is None or given == default or given == setting.value:
        return setting.value
    if setting.name in ("fsdp_config", "deepspeed"):
        if isinstance(given, str) and isinstance(setting.value, str):
            raise _contradiction(setting.name, given, setting.value, setting.source)
        ours, theirs = (
            read_mapping(Path(value), field=setting.name) if isinstance(value, str) else value
            for value in (given, setting.value)
        )
        return _merged_mappings(ours, theirs, setting.name, setting.source)
    raise _contradiction(setting.name, given, setting.value, setting.source)


def _merged_mappings(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """Merge key by key; "auto" yields to a value. Keys of fsdp_config may have the prefix ``fsdp_``."""
    merged = dict(ours)
    known = {key.removeprefix("fsdp_"): key for key in ours}
    for key, value in theirs.items():
        own = known.get(key.removeprefix("fsdp_"), key)
        present = merged.get(own)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            merged[own] = _merged_mappings(present, value, f"{name}.{own}", source)
        elif present is None or present == "auto":
            merged[own] = value
        elif value != "auto" and _comparable(present) != _comparable(value):
            raise _contradiction(f"{name}.{own}", present, value, source)
    return merged


def _comparable(value: Any) -> Any:
    """A setting in the form to compare: older JSON files hold truth values as texts, and one class without a list."""
    if isinstance(value, list):
        return [str(item).lower() for item in value]
    text = str(value).lower()
    return [part.strip() for part in text.split(",")] if "," in text else text


def _contradiction(name: str, given: Any, launched: Any, source: str) -> ConfigError:
    what = f"This contradicts the launcher, which sets {launched} ({source})."
    return ConfigError(what, field=name, value=given, remedy="Remove one of the two, or make them equal.")


def _is_true(text: str | None) -> bool:
    return (text or "").strip().lower() in _TRUE


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        field, remedy = f"environment variable {name}", "Correct it, or unset it."
        raise ConfigError("This is not a number.", field=field, value=text, remedy=remedy) from None
