"""`fsdp` and `fsdp_config`: what their words and keys ask for, in one form, and which of them cannot be had.

Keys are those of the Trainer's documents of all ages and of accelerate's files, with or without ``fsdp_`` before them.
What each one means here is the table in docs/distributed.md; a test holds the two against each other. No torch here:
a specification is refused before any process is started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from trainer_lib.arguments.coerce import coerce
from trainer_lib.arguments.enums import FSDPOption
from trainer_lib.arguments.fields import suggestion
from trainer_lib.arguments.io import read_mapping
from trainer_lib.errors import ConfigError

_log = logging.getLogger(__name__)
_FIELD = "fsdp_config"
_MODES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
#: The same mode, with the parameters kept between forward and backward.
_KEPT = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
_FORMATS = {
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
}
_WHOLE = "Every parameter of it would have to be whole for that."
_UNSHARDABLE: Mapping[str, str] = {
    **dict.fromkeys(("lomo", "adalomo"), "It steps inside the backward, where gradients are not yet those of all."),
    **dict.fromkeys(("galore", "apollo"), _WHOLE),
    **dict.fromkeys(("_8bit", "paged_", "_4bit", "rmsprop_bnb"), "Its quantised state does not know pieces."),
}


class FsdpArguments(Protocol):
    """The arguments read here (`TrainingArguments` has them)."""

    fsdp: Any
    fsdp_config: Any
    bf16: bool
    fp16: bool
    optim: Any
    gradient_checkpointing: bool | None
    auto_find_batch_size: bool
    save_on_each_node: bool
    bf16_full_eval: bool
    fp16_full_eval: bool


@dataclass(frozen=True)
class FsdpSettings:
    """What is asked for.

    Attributes:
        mode: full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2.
        offload: whether parameters, gradients and optimizer state live in the host's memory.
        wrap: what is gathered at a time: "whole" model, each layer of some "classes", or parts by "size".
        wrap_classes: names of the layers' classes; empty = those that the model names in `_no_split_modules`.
        min_num_params: parameters that make a part, for "size".
        hybrid_group: processes that share one copy, for the hybrid modes; None = those of one machine.
        backward_prefetch, forward_prefetch: whether the next part is gathered while this one computes.
        activation_checkpointing: whether each part's activations are computed again in the backward.
        cpu_ram_efficient_loading: whether only the first process builds the model with its values.
        sync_module_states: whether all processes take the first one's values.
        sharded_checkpoints: whether every process writes its own part of a checkpoint.
        param_dtype, reduce_dtype: what parameters are gathered and gradients are exchanged in; None = their own.
        ignored_modules: patterns of the names of modules that are left whole.
    """

    mode: str = "full_shard"
    offload: bool = False
    wrap: str = "whole"
    wrap_classes: tuple[str, ...] = ()
    min_num_params: int = 0
    hybrid_group: int | None = None
    backward_prefetch: bool = True
    forward_prefetch: bool = False
    activation_checkpointing: bool = False
    cpu_ram_efficient_loading: bool = False
    sync_module_states: bool = True
    sharded_checkpoints: bool = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    ignored_modules: tuple[str, ...] = ()

    @property
    def reshards(self) -> bool:
        """Whether gathered parameters are let go between forward and backward."""
        return self.mode in ("full_shard", "hybrid_shard", "no_shard")


@dataclass
class _Reading:
    """Settings in the making, and who said what, for contradictions."""

    values: dict[str, Any]
    said: dict[str, str] = field(default_factory=dict)

    def say(self, name: str, value: Any, *, by: str) -> None:
        """Set `name`, unless something said otherwise."""
        if name in self.said and self.values[name] != value:
            raise ConfigError(f"contradicts {self.said[name]}.", field=by, value=value, remedy="Keep one of the two.")
        self.values[name] = value
        self.said.setdefault(name, by)


def read_settings(args: FsdpArguments) -> FsdpSettings | None:
    """The settings, or None when `fsdp` asks for nothing.

    Raises ConfigError for a key, a value or a combination that cannot be served; a file of settings is read.
    """
    words = str(args.fsdp or "").split()
    config = read_mapping(Path(args.fsdp_config), field=_FIELD) if isinstance(args.fsdp_config, str) else None
    values = _unprefixed(config if config is not None else args.fsdp_config or {})
    if not words:
        _refuse_without_fsdp(values)
        return None
    reading = _Reading({"mode": next(word for word in words if word in _MODES)})
    if FSDPOption.OFFLOAD in words:
        reading.say("offload", True, by="fsdp")
    for key, value in values.items():
        if key not in KEYS:
            raise ConfigError("is not one of its settings.", field=_FIELD, value=key, remedy=suggestion(key, KEYS))
        if value is not None:
            KEYS[key](reading, key, value)
    _choose_parts(reading, asked=FSDPOption.AUTO_WRAP in words)
    _choose_formats(reading, args)
    settings = replace(FsdpSettings(), **{name: v for name, v in reading.values.items() if v is not None})
    _check(settings, args)
    return settings


def _unprefixed(config: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = str(key).removeprefix("fsdp_")
        if name in values and values[name] != value:
            raise ConfigError(
                f"is given twice: {values[name]!r} and {value!r}.", field=f"{_FIELD}.{name}", remedy="Keep one."
            )
        values[name] = value
    return values


def _refuse_without_fsdp(values: Mapping[str, Any]) -> None:
    # A configuration that was written out in full asks for nothing with these.
    asked = [key for key, value in values.items() if value not in (0, False, None, "", "false", "False", [], {})]
    if asked:
        raise ConfigError(
            "Without fsdp, there is no fsdp to configure.",
            field=_FIELD,
            value=asked[0],
            remedy='Remove it, or set fsdp="full_shard auto_wrap".',
        )


# -- the keys ----------------------------------------------------------------------------------------------------------

_Reader = Callable[[_Reading, str, Any], None]


def _flag(name: str) -> _Reader:
    """A setting that is on or off."""

    def read(reading: _Reading, key: str, value: Any) -> None:
        reading.say(name, coerce(value, bool, field=f"{_FIELD}.{key}"), by=f"{_FIELD}.{key}")

    return read


def _always(default: bool, why: str) -> _Reader:
    """A setting that FSDP's second version has no switch for, and whose other value would change no number."""

    def read(reading: _Reading, key: str, value: Any) -> None:
        if coerce(value, bool, field=f"{_FIELD}.{key}") is not default:
            _log.warning("%s.%s is always %s here: %s", _FIELD, key, default, why)

    return read


def _refused(why: str, remedy: str) -> _Reader:
    """A setting that cannot be served, unless it is off."""

    def read(reading: _Reading, key: str, value: Any) -> None:
        if value not in (False, "false", "False", 0, "", {}, []):
            raise ConfigError(f"cannot be served: {why}", field=f"{_FIELD}.{key}", value=value, remedy=remedy)

    return read


def _choice(key: str, value: Any, options: Mapping[str, Any]) -> Any:
    word = str(value).strip().lower()
    if word not in options:
        raise ConfigError(
            "is not one of the choices.", field=f"{_FIELD}.{key}", value=value, remedy=suggestion(word, options)
        )
    return options[word]


def _sharding(reading: _Reading, key: str, value: Any) -> None:
    """``sharding_strategy``: a name or a number of torch's; it is `fsdp` in other words."""
    numbers = {str(number): name for number, name in enumerate(_in_order(), 1)}
    mode = _choice(key, value, {**numbers, **{name: name for name in _MODES}})
    if mode != reading.values["mode"]:
        raise ConfigError(
            f"contradicts fsdp = {reading.values['mode']}.",
            field=f"{_FIELD}.{key}",
            value=value,
            remedy="Keep one of the two.",
        )


def _in_order() -> tuple[str, ...]:
    return ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")


def _reshard(reading: _Reading, key: str, value: Any) -> None:
    """``reshard_after_forward``: on or off, or (accelerate's first version) a mode's name or number."""
    if isinstance(value, str) and value.strip().lower() not in ("true", "false", "yes", "no", "on", "off"):
        _sharding(reading, key, value)
        return
    mode = reading.values["mode"]
    if not coerce(value, bool, field=f"{_FIELD}.{key}"):
        reading.values["mode"] = _KEPT.get(mode, mode)
    elif mode in _KEPT.values():
        raise ConfigError(
            f"contradicts fsdp = {mode}, which keeps the parameters until the backward.",
            field=f"{_FIELD}.{key}",
            value=value,
            remedy=f"Remove it, or give fsdp = {next(one for one, kept in _KEPT.items() if kept == mode)}.",
        )


def _policy(reading: _Reading, key: str, value: Any) -> None:
    names = {"transformer_based_wrap": "classes", "size_based_wrap": "size", "no_wrap": "whole"}
    reading.say("wrap", _choice(key, value, names), by=f"{_FIELD}.{key}")


def _names(name: str) -> _Reader:
    """A list of names, or one text of them with commas."""

    def read(reading: _Reading, key: str, value: Any) -> None:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
            raise ConfigError("is no list of names.", field=f"{_FIELD}.{key}", value=value, remedy="Give names.")
        reading.say(name, tuple(part.strip() for part in parts if part.strip()), by=f"{_FIELD}.{key}")

    return read


def _count(name: str) -> _Reader:
    def read(reading: _Reading, key: str, value: Any) -> None:
        count = coerce(value, int, field=f"{_FIELD}.{key}")
        if count < 0:
            raise ConfigError("must be at least 0.", field=f"{_FIELD}.{key}", value=count, remedy="Give a number.")
        reading.say(name, count or None, by=f"{_FIELD}.{key}")

    return read


def _prefetch(reading: _Reading, key: str, value: Any) -> None:
    # backward_post gathers the next part once this one's gradients are there, as gathering on demand does.
    options = {"backward_pre": True, "1": True, "backward_post": False, "backward_pos": False, "2": False}
    reading.say("backward_prefetch", _choice(key, value, options | {"no_prefetch": False, "3": False}), by=key)


def _state_dict(reading: _Reading, key: str, value: Any) -> None:
    where = f"{_FIELD}.{key}"
    reading.say("sharded_checkpoints", sharded_checkpoints(value, field=where), by=where)


def sharded_checkpoints(value: Any, *, field: str) -> bool:
    """Whether a state_dict_type says that every process writes its own part. Raises ConfigError for what is none."""
    options = {"full_state_dict": False, "sharded_state_dict": True}
    word = str(value).strip().lower()
    if word not in options:
        local = word == "local_state_dict"
        raise ConfigError(
            "cannot be served: such pieces fit one number of processes only." if local else "is no way of saving.",
            field=field,
            value=value,
            remedy="Give SHARDED_STATE_DICT, which any number of processes loads, or FULL_STATE_DICT.",
        )
    return options[word]


def _version(reading: _Reading, key: str, value: Any) -> None:
    if coerce(value, int, field=f"{_FIELD}.{key}") != 2:
        raise ConfigError(
            "is not served: FSDP is torch's second version (fully_shard), which has all modes of the first.",
            field=f"{_FIELD}.{key}",
            value=value,
            remedy="Remove it.",
        )


def _precision(reading: _Reading, key: str, value: Any) -> None:
    where = f"{_FIELD}.{key}"
    parts = {"param_dtype": value, "reduce_dtype": value} if isinstance(value, str) else value
    if not isinstance(parts, Mapping):
        raise ConfigError("is no mapping.", field=where, value=value, remedy='Give {"param_dtype": "bf16"}.')
    for name, given in parts.items():
        if name not in ("param_dtype", "reduce_dtype"):
            raise ConfigError(
                "is not one of its settings: buffers keep their own format, outputs that of the computation.",
                field=where,
                value=name,
                remedy="Give param_dtype and reduce_dtype.",
            )
        if given is not None:
            chosen = _choice(f"{key}.{name}", str(given).removeprefix("torch."), _FORMATS)
            reading.say(str(name), chosen, by=f"{where}.{name}")


_XLA = _refused("XLA devices are not.", "Remove it; on TPUs use the transformers Trainer with torch_xla.")

#: Every key that is known, without ``fsdp_``, and how it is read.
KEYS: Mapping[str, _Reader] = {
    "sharding_strategy": _sharding,
    "reshard_after_forward": _reshard,
    "offload_params": _flag("offload"),
    "cpu_offload": _flag("offload"),
    "auto_wrap_policy": _policy,
    "transformer_layer_cls_to_wrap": _names("wrap_classes"),
    "transformer_cls_names_to_wrap": _names("wrap_classes"),
    "min_num_params": _count("min_num_params"),
    "hybrid_group_size": _count("hybrid_group"),
    "backward_prefetch": _prefetch,
    "backward_prefetch_policy": _prefetch,
    "forward_prefetch": _flag("forward_prefetch"),
    "limit_all_gathers": _always(True, "memory for parts to come is never taken ahead of its turn."),
    "use_orig_params": _always(True, "every parameter keeps its name, its shape and its own requires_grad."),
    "sync_module_states": _flag("sync_module_states"),
    "cpu_ram_efficient_loading": _flag("cpu_ram_efficient_loading"),
    "activation_checkpointing": _flag("activation_checkpointing"),
    "activation_checkpointing_offload": _refused("activations stay on the device.", "Remove it."),
    "state_dict_type": _state_dict,
    "mixed_precision": _precision,
    "mixed_precision_policy": _precision,
    "ignored_modules": _names("ignored_modules"),
    "version": _version,
    "xla": _XLA,
    "xla_fsdp_settings": _XLA,
    "xla_fsdp_grad_ckpt": _XLA,
    "xla_fsdp_v2": _XLA,
}


# -- what follows from several of them ---------------------------------------------------------------------------------


def _choose_parts(reading: _Reading, *, asked: bool) -> None:
    """By class or by size: as a policy says, else as the key that is there says; `auto_wrap` alone is by class."""
    values = reading.values
    classes, size = values.get("wrap_classes"), values.get("min_num_params")
    if classes and size:
        raise ConfigError(
            "cannot be used together with transformer_layer_cls_to_wrap: the model is cut by class or by size.",
            field=f"{_FIELD}.min_num_params",
            value=size,
            remedy="Keep one of them.",
        )
    wanted = "classes" if classes else "size" if size else "classes" if asked else None
    policy = values.get("wrap")
    if policy == "size" and not size:
        raise ConfigError(
            "SIZE_BASED_WRAP needs a size.",
            field=f"{_FIELD}.min_num_params",
            value=0,
            remedy="Give the number of parameters that make a part.",
        )
    if policy is not None and wanted is not None and policy != wanted:
        raise ConfigError(
            f"contradicts {'auto_wrap' if asked and not (classes or size) else 'what is to be wrapped'}.",
            field=f"{_FIELD}.auto_wrap_policy",
            value=policy,
            remedy="Remove it: the policy follows from the other settings.",
        )
    values["wrap"] = policy or wanted or "whole"


def _choose_formats(reading: _Reading, args: FsdpArguments) -> None:
    """Gathered as the forward computes, exchanged in full digits, unless said otherwise."""
    values = reading.values
    asked = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    if values.get("param_dtype") == "float16" and not args.fp16:
        raise ConfigError(
            "needs a loss scaler.",
            field=f"{_FIELD}.mixed_precision",
            value="float16",
            remedy="Set fp16=True, or use bf16.",
        )
    if asked is not None:
        values.setdefault("param_dtype", asked)
        values.setdefault("reduce_dtype", "float32")


#: Arguments that sharding leaves no room for: why, and the way out.
_UNSERVED: Mapping[str, tuple[str, str]] = {
    "auto_find_batch_size": (
        "a process that runs out of memory leaves the others waiting for its part.",
        "Remove it; a pipeline's own retry halves the micro-batch between two starts.",
    ),
    "save_on_each_node": ("no machine has the whole state.", "Give an output_dir that all machines see."),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        ("divided parameters keep their format.", "Remove it, or compute in bf16 with bf16=True."),
    ),
    "predict_with_generate": (
        "processes would generate different numbers of tokens, and wait for each other.",
        "Remove it, and generate with a Trainer of its own without fsdp and the saved model.",
    ),
}


def _check(settings: FsdpSettings, args: FsdpArguments) -> None:
    _check_parts(settings, args)
    for name, (why, remedy) in _UNSERVED.items():
        if getattr(args, name, False):
            raise ConfigError(f"cannot be served with fsdp: {why}", field=name, value=True, remedy=remedy)
    for part, why in _UNSHARDABLE.items():
        if part in str(args.optim):
            raise ConfigError(
                f"cannot be used with fsdp. {why}", field="optim", value=str(args.optim), remedy="Use adamw_torch."
            )


def _check_parts(settings: FsdpSettings, args: FsdpArguments) -> None:
    if settings.cpu_ram_efficient_loading and not settings.sync_module_states:
        raise ConfigError(
            "contradicts cpu_ram_efficient_loading: the values of the other processes come from the first.",
            field=f"{_FIELD}.sync_module_states",
            value=False,
            remedy="Remove it.",
        )
    if settings.hybrid_group is not None and "hybrid" not in settings.mode:
        raise ConfigError(
            f"has no effect on {settings.mode}.",
            field=f"{_FIELD}.hybrid_group_size",
            value=settings.hybrid_group,
            remedy="Remove it, or give fsdp = hybrid_shard.",
        )
    if not settings.activation_checkpointing:
        return
    if args.gradient_checkpointing:
        raise ConfigError(
            "cannot be on together with gradient_checkpointing: both compute the same activations again.",
            field=f"{_FIELD}.activation_checkpointing",
            value=True,
            remedy="Keep activation_checkpointing, which saves a gathering.",
        )
    if settings.wrap == "whole":
        raise ConfigError(
            "needs parts of the model whose activations are computed again.",
            field=f"{_FIELD}.activation_checkpointing",
            value=True,
            remedy="Add auto_wrap to fsdp, or give gradient_checkpointing instead.",
        )
