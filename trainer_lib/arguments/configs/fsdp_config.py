"""Read `fsdp` and `fsdp_config` into one form, and refuse what is not supported.

The keys are those of every version of the Trainer's documents and of accelerate's files, with or without the prefix
``fsdp_``. docs/distributed.md explains all of them in a table, and a test compares the two. Nothing here imports torch,
so a spec is refused before a process is started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments.coerce import coerce, read_mapping
from trainer_lib.arguments.enums import FSDPOption
from trainer_lib.base.suggestions import require_known
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.arguments.groups import ArgumentGroups

_log = logging.getLogger(__name__)
FIELD = "fsdp_config"
MODES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""The modes in the order of torch's numbers, which start at 1."""

#: Mode -> the mode that differs only in keeping the parameters between forward and backward pass.
KEPT = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
_OFF: tuple[Any, ...] = (False, 0, None, "", "false", "False", [], {})
"""Values that ask for nothing: files that were written out in full have them."""

_FORMATS = {
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
}
_POLICIES = {"transformer_based_wrap": "classes", "size_based_wrap": "size", "no_wrap": "whole"}
# backward_post gathers the next layers when the gradients of these are there, as gathering on demand does.
_PREFETCH = {
    **dict.fromkeys(("backward_pre", "1"), True),
    **dict.fromkeys(("backward_post", "backward_pos", "2", "no_prefetch", "3"), False),
}
_WHOLE = "It needs every parameter as a whole."
# Parts of optimizers' names.
_UNSHARDABLE: Mapping[str, str] = {
    **dict.fromkeys(("lomo", "adalomo"), "It steps inside the backward pass, before gradients are exchanged."),
    **dict.fromkeys(("galore", "apollo", "adafactor"), _WHOLE),
    **dict.fromkeys(("lion_32bit", "ademamix"), "bitsandbytes does not support shards."),
    **dict.fromkeys(("_8bit", "paged_", "_4bit", "rmsprop_bnb"), "Its quantised state does not support shards."),
}
#: Arguments that are not supported together with sharding: the reason, and the alternative.
_UNSERVED: Mapping[str, tuple[str, str]] = {
    "auto_find_batch_size": (
        "a process that runs out of memory leaves the others waiting for its shard.",
        "Remove it; a pipeline's own retry halves the micro-batch between two starts.",
    ),
    "save_on_each_node": ("no machine has the whole state.", "Give an output_dir that all machines see."),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        ("sharded parameters keep their format.", "Remove it, or compute in bf16 with bf16=True."),
    ),
}


@dataclass(frozen=True)
class FsdpSettings:
    """The settings of FSDP."""

    mode: str = "full_shard"  # full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2
    offload: bool = False  # keep parameters, gradients and optimizer state in the host's memory
    # The unit that is gathered: the "whole" model, each layer of some "classes", modules by "size", or layers if they
    # are "known" because the model names their classes, else the whole.
    wrap: str = "whole"
    # Class names of the layers; empty = those that the model names in `_no_split_modules`.
    wrap_classes: tuple[str, ...] = ()
    min_num_params: int = 0  # number of parameters that make a unit, for "size"
    hybrid_group: int | None = None  # processes that share one copy, for the hybrid modes; None = those of one machine
    # backward_prefetch, forward_prefetch: gather the next unit while this one computes.
    backward_prefetch: bool = True
    forward_prefetch: bool = False
    activation_checkpointing: bool = False  # recompute each unit's activations in the backward pass
    cpu_ram_efficient_loading: bool = False  # only the first process builds the model with its values
    sync_module_states: bool = True  # all processes get the first one's values
    sharded_checkpoints: bool = True  # every process writes its own part of a checkpoint
    # param_dtype, reduce_dtype: number formats of gathered parameters and of exchanged gradients; None = their own.
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    ignored_modules: tuple[str, ...] = ()  # patterns of the names of modules that are not sharded

    @property
    def reshards(self) -> bool:
        """True when gathered parameters are released between forward and backward pass."""
        # no_shard as well: its groups have one process each, so that releasing costs nothing.
        return self.mode in ("full_shard", "hybrid_shard", "no_shard")


def read_settings(args: ArgumentGroups) -> FsdpSettings | None:
    """Return the settings, reading their file if there is one; None when `fsdp` is empty. Raises ConfigError."""
    words = str(args.fsdp or "").split()
    config = args.fsdp_config
    values = _unprefixed(read_mapping(Path(config), field=FIELD) if isinstance(config, str) else config or {})
    if not words:
        # A configuration that was written out in full has values that ask for nothing.
        asked = [key for key, value in values.items() if value not in _OFF]
        if asked:
            what = "Without fsdp, these settings have no effect."
            remedy = 'Remove it, or set fsdp="full_shard auto_wrap".'
            raise ConfigError(what, field=FIELD, value=asked[0], remedy=remedy)
        return None
    reading = _Reading({"mode": next(word for word in words if word in MODES)})  # validation has left exactly one
    if FSDPOption.OFFLOAD in words:
        reading.set_value("offload", True, by="fsdp")
    for key, value in values.items():
        require_known(key, KEYS, "No setting has this name.", field=FIELD)
        # null in a file that was written out in full asks for nothing.
        if value is not None:
            KEYS[key](reading, f"{FIELD}.{key}", value)
    _choose_parts(reading.values, asked=FSDPOption.AUTO_WRAP in words)
    _choose_formats(reading.values, args)
    settings = replace(FsdpSettings(), **{name: v for name, v in reading.values.items() if v is not None})
    _check(settings, args)
    return settings


def _unprefixed(config: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in config.items():
        # transformers accepts every key with and without the prefix.
        name = str(key).removeprefix("fsdp_")
        if name in values and values[name] != value:
            twice = f"The setting is given twice: {values[name]!r} and {value!r}."
            raise ConfigError(twice, field=f"{FIELD}.{name}", remedy="Keep one.")
        values[name] = value
    return values


# -- one key -----------------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """Settings that are being read, with the key that set each, which an error about a contradiction names."""

    values: dict[str, Any]
    set_by: dict[str, str] = field(default_factory=dict)

    def set_value(self, name: str, value: Any, *, by: str) -> None:
        """Set `name` on behalf of the key `by`. Raises ConfigError when another key set another value."""
        if name in self.set_by and self.values[name] != value:
            remedy = "Keep one of the two."
            raise ConfigError(f"This contradicts {self.set_by[name]}.", field=by, value=value, remedy=remedy)
        self.values[name] = value
        self.set_by.setdefault(name, by)


_Reader = Callable[[_Reading, str, Any], None]


def _sets(name: str, convert: Callable[[str, Any], Any]) -> _Reader:
    """A reader of a key that sets `name` to the converted value."""
    return lambda reading, key, value: reading.set_value(name, convert(key, value), by=key)


def _flag(key: str, value: Any) -> Any:
    return coerce(value, bool, field=key)


def _choice(options: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    def convert(key: str, value: Any) -> Any:
        word = str(value).strip().lower()
        require_known(word, options, field=key, value=value)
        return options[word]

    return convert


def _names(key: str, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ConfigError("This is not a list of names.", field=key, value=value, remedy="Give names.")
    return tuple(part.strip() for part in parts if part.strip())


def _count(key: str, value: Any) -> int | None:
    count: int = coerce(value, int, field=key)
    if count < 0:
        raise ConfigError("The number must be at least 0.", field=key, value=count, remedy="Give a number.")
    return count or None  # 0 is accelerate's way of writing "not given"


def sharded_checkpoints(key: str, value: Any) -> bool:
    """Whether the state_dict_type in `key` has each process write its part of a checkpoint. Raises ConfigError."""
    options = {"full_state_dict": False, "sharded_state_dict": True}
    word = str(value).strip().lower()
    if word not in options:
        local = "Local pieces are not supported: they fit one number of processes only."
        what = local if word == "local_state_dict" else "No state dict type has this name."
        remedy = "Give SHARDED_STATE_DICT, which any number of processes loads, or FULL_STATE_DICT."
        raise ConfigError(what, field=key, value=value, remedy=remedy)
    return options[word]


def _always(why: str) -> _Reader:
    """A reader of a setting that FSDP's second version has no switch for, and whose other value changes no result."""

    def read(reading: _Reading, key: str, value: Any) -> None:
        if not _flag(key, value):
            _log.warning("%s is always True here: %s", key, why)

    return read


def _refused(why: str, remedy: str) -> _Reader:
    """A reader that refuses a setting unless it is off."""

    def read(reading: _Reading, key: str, value: Any) -> None:
        if value not in _OFF:
            raise ConfigError(f"This setting is not supported: {why}", field=key, value=value, remedy=remedy)

    return read


def _sharding(reading: _Reading, key: str, value: Any) -> None:
    """Read ``sharding_strategy``, torch's name or number of a mode, which must agree with `fsdp`."""
    numbers = {str(number): name for number, name in enumerate(MODES, 1)}
    if _choice({**numbers, **{name: name for name in MODES}})(key, value) != reading.values["mode"]:
        contradicts = f"This contradicts fsdp = {reading.values['mode']}."
        raise ConfigError(contradicts, field=key, value=value, remedy="Keep one of the two.")


def _reshard(reading: _Reading, key: str, value: Any) -> None:
    """Read ``reshard_after_forward``: on or off, or in accelerate's first version a mode's name or number."""
    if isinstance(value, str) and value.strip().lower() not in ("true", "false", "yes", "no", "on", "off"):
        _sharding(reading, key, value)
        return
    mode = reading.values["mode"]
    # False turns a mode into the one that keeps parameters; True must not contradict such a mode.
    if not _flag(key, value):
        reading.values["mode"] = KEPT.get(mode, mode)
    elif mode in KEPT.values():
        what = f"This contradicts fsdp = {mode}, which keeps the parameters until the backward pass."
        remedy = f"Remove it, or give fsdp = {next(name for name, kept in KEPT.items() if kept == mode)}."
        raise ConfigError(what, field=key, value=value, remedy=remedy)


def _version(reading: _Reading, key: str, value: Any) -> None:
    if coerce(value, int, field=key) != 2:
        what = "Only torch's second version of FSDP (fully_shard) is supported; it has all modes of the first."
        raise ConfigError(what, field=key, value=value, remedy="Remove it.")


def _precision(reading: _Reading, key: str, value: Any) -> None:
    parts = {"param_dtype": value, "reduce_dtype": value} if isinstance(value, str) else value
    if not isinstance(parts, Mapping):
        raise ConfigError("This is not a mapping.", field=key, value=value, remedy='Give {"param_dtype": "bf16"}.')
    for name, given in parts.items():
        if name not in ("param_dtype", "reduce_dtype"):
            what = "No setting has this name: buffers keep their own format, outputs that of the computation."
            raise ConfigError(what, field=key, value=name, remedy="Give param_dtype and reduce_dtype.")
        if given is not None:
            # str(torch.bfloat16) is "torch.bfloat16": configurations from Python hold it.
            chosen = _choice(_FORMATS)(f"{key}.{name}", str(given).removeprefix("torch."))
            reading.set_value(str(name), chosen, by=f"{key}.{name}")


_XLA = _refused(
    "torch_xla's own FSDP is not served.", "Remove it; on several TPUs use the transformers Trainer with torch_xla."
)

#: Key without the prefix ``fsdp_`` -> the function that reads it.
KEYS: Mapping[str, _Reader] = {
    "sharding_strategy": _sharding,
    "reshard_after_forward": _reshard,
    **dict.fromkeys(("offload_params", "cpu_offload"), _sets("offload", _flag)),
    "auto_wrap_policy": _sets("wrap", _choice(_POLICIES)),
    **dict.fromkeys(("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"), _sets("wrap_classes", _names)),
    "min_num_params": _sets("min_num_params", _count),
    "hybrid_group_size": _sets("hybrid_group", _count),
    **dict.fromkeys(("backward_prefetch", "backward_prefetch_policy"), _sets("backward_prefetch", _choice(_PREFETCH))),
    "forward_prefetch": _sets("forward_prefetch", _flag),
    "limit_all_gathers": _always("memory for a unit is allocated only when its turn has come."),
    "use_orig_params": _always("every parameter keeps its name, its shape and its own requires_grad."),
    "sync_module_states": _sets("sync_module_states", _flag),
    "cpu_ram_efficient_loading": _sets("cpu_ram_efficient_loading", _flag),
    "activation_checkpointing": _sets("activation_checkpointing", _flag),
    "activation_checkpointing_offload": _refused(
        "activations stay on the device.",
        'Give gradient_checkpointing=True with gradient_checkpointing_kwargs={"offload": true}.',
    ),
    "state_dict_type": _sets("sharded_checkpoints", sharded_checkpoints),
    **dict.fromkeys(("mixed_precision", "mixed_precision_policy"), _precision),
    "ignored_modules": _sets("ignored_modules", _names),
    "version": _version,
    **dict.fromkeys(("xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2"), _XLA),
}

# -- what follows from several of them ---------------------------------------------------------------------------------


def _error(key: str, value: Any, message: str, remedy: str) -> ConfigError:
    return ConfigError(message, field=f"{FIELD}.{key}", value=value, remedy=remedy)


def _choose_parts(values: dict[str, Any], *, asked: bool) -> None:
    """Choose the units by class or by size: as the policy says, else by the given key; `auto_wrap` is by class."""
    classes, size, policy = values.get("wrap_classes"), values.get("min_num_params"), values.get("wrap")
    if classes and size:
        both = (
            "This cannot be used together with transformer_layer_cls_to_wrap: layers are wrapped by class or by size."
        )
        raise _error("min_num_params", size, both, "Keep one of them.")
    if policy == "size" and not size:
        remedy = "Give the number of parameters that make a unit."
        raise _error("min_num_params", 0, "SIZE_BASED_WRAP needs a size.", remedy)
    wanted = "classes" if classes else "size" if size else "classes" if asked else None
    if policy is not None and wanted is not None and policy != wanted:
        other = "auto_wrap" if asked and not (classes or size) else "the layers to wrap"
        remedy = "Remove it: the policy follows from the other settings."
        raise _error("auto_wrap_policy", policy, f"This contradicts {other}.", remedy)
    values["wrap"] = policy or wanted or "whole"


def _choose_formats(values: dict[str, Any], args: ArgumentGroups) -> None:
    """Choose the default formats: parameters as the forward pass computes, gradients in float32."""
    asked = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    if values.get("param_dtype") == "float16" and not args.fp16:
        remedy = "Set fp16=True, or use bf16."
        raise _error("mixed_precision", "float16", "float16 needs a loss scaler.", remedy)
    if asked is not None:
        # setdefault: mixed_precision in fsdp_config wins over bf16 and fp16.
        values.setdefault("param_dtype", asked)
        values.setdefault("reduce_dtype", "float32")


def _check(settings: FsdpSettings, args: ArgumentGroups) -> None:
    if settings.cpu_ram_efficient_loading and not settings.sync_module_states:
        why = "This contradicts cpu_ram_efficient_loading: the values of the other processes come from the first."
        raise _error("sync_module_states", False, why, "Remove it.")
    if settings.hybrid_group is not None and "hybrid" not in settings.mode:
        remedy = "Remove it, or give fsdp = hybrid_shard."
        raise _error("hybrid_group_size", settings.hybrid_group, f"This has no effect on {settings.mode}.", remedy)
    if settings.activation_checkpointing and args.gradient_checkpointing:
        why = "This cannot be on together with gradient_checkpointing: both recompute the same activations."
        remedy = "Keep activation_checkpointing, which saves an all-gather."
        raise _error("activation_checkpointing", True, why, remedy)
    if settings.activation_checkpointing and settings.wrap == "whole":
        why = "This needs wrapped layers whose activations are recomputed."
        remedy = "Add auto_wrap to fsdp, or give gradient_checkpointing instead."
        raise _error("activation_checkpointing", True, why, remedy)
    refuse_unshardable(args, "fsdp")


def refuse_unshardable(args: ArgumentGroups, field: str) -> None:
    """Raise ConfigError for arguments that divided parameters do not serve; `field` divides them."""
    for name, (why, remedy) in _UNSERVED.items():
        if getattr(args, name, False):
            message = f"This is not supported together with {field}: {why}"
            raise ConfigError(message, field=name, value=True, remedy=remedy)
    for part, why in _UNSHARDABLE.items():
        if part in str(args.optim):
            what = f"This optimizer cannot be used together with {field}. {why}"
            raise ConfigError(what, field="optim", value=str(args.optim), remedy="Use adamw_torch.")


def as_plugin_settings(settings: FsdpSettings) -> dict[str, Any]:
    """Return the settings by the names of accelerate's `FullyShardedDataParallelPlugin`, for code that builds one."""
    named: dict[str, Any] = {
        "fsdp_version": 2,
        "reshard_after_forward": settings.reshards,
        "auto_wrap_policy": next(
            (policy.upper() for policy, wrap in _POLICIES.items() if wrap == settings.wrap), "TRANSFORMER_BASED_WRAP"
        ),
        "cpu_ram_efficient_loading": settings.cpu_ram_efficient_loading,
        "state_dict_type": "SHARDED_STATE_DICT" if settings.sharded_checkpoints else "FULL_STATE_DICT",
        "activation_checkpointing": settings.activation_checkpointing,
    }
    more = {
        "cpu_offload": settings.offload,
        "transformer_cls_names_to_wrap": ",".join(settings.wrap_classes),
        "min_num_params": settings.min_num_params,
    }
    return {**named, **{name: value for name, value in more.items() if value}}
