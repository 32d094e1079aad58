"""Every key of `fsdp_config`, and how it is read. docs/distributed.md has them as a table; a test compares the two."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.arguments.coerce import coerce
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

_log = logging.getLogger(__name__)
FIELD = "fsdp_config"
MODES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""The modes in the order of torch's numbers, which start at 1."""

#: Mode -> the mode that differs only in keeping the parameters between forward and backward pass.
_KEPT = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
_FORMATS = {
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
}


@dataclass
class Reading:
    """Settings that are being read, with the key that set each, which an error about a contradiction names.

    Attributes:
        values: settings by name.
        set_by: name of a setting -> the key that set it.
    """

    values: dict[str, Any]
    set_by: dict[str, str] = field(default_factory=dict)

    def set_value(self, name: str, value: Any, *, by: str) -> None:
        """Set `name` on behalf of the key `by`. Raises ConfigError when another key set another value."""
        if name in self.set_by and self.values[name] != value:
            raise ConfigError(
                f"This contradicts {self.set_by[name]}.", field=by, value=value, remedy="Keep one of the two."
            )
        self.values[name] = value
        self.set_by.setdefault(name, by)


_Reader = Callable[[Reading, str, Any], None]


def _flag(name: str) -> _Reader:
    """Read a setting that is on or off."""

    def read(reading: Reading, key: str, value: Any) -> None:
        reading.set_value(name, coerce(value, bool, field=f"{FIELD}.{key}"), by=f"{FIELD}.{key}")

    return read


def _always(default: bool, why: str) -> _Reader:
    """Read a setting that FSDP's second version has no switch for, and whose other value would change no result."""

    def read(reading: Reading, key: str, value: Any) -> None:
        if coerce(value, bool, field=f"{FIELD}.{key}") is not default:
            _log.warning("%s.%s is always %s here: %s", FIELD, key, default, why)

    return read


def _refused(why: str, remedy: str) -> _Reader:
    """Refuse a setting that is not supported, unless it is off."""

    def read(reading: Reading, key: str, value: Any) -> None:
        # "Off" asks for nothing, and files that were written out in full hold it.
        if value not in (False, "false", "False", 0, "", {}, []):
            raise ConfigError(
                f"This setting is not supported: {why}", field=f"{FIELD}.{key}", value=value, remedy=remedy
            )

    return read


def _choice(key: str, value: Any, options: Mapping[str, Any]) -> Any:
    word = str(value).strip().lower()
    if word not in options:
        raise ConfigError(
            "This is not one of the choices.", field=f"{FIELD}.{key}", value=value, remedy=suggestion(word, options)
        )
    return options[word]


def _sharding(reading: Reading, key: str, value: Any) -> None:
    """Read ``sharding_strategy``, torch's name or number of a mode, which must agree with `fsdp`."""
    # torch counts the members of its enum from 1.
    numbers = {str(number): name for number, name in enumerate(MODES, 1)}
    mode = _choice(key, value, {**numbers, **{name: name for name in MODES}})
    if mode != reading.values["mode"]:
        raise ConfigError(
            f"This contradicts fsdp = {reading.values['mode']}.",
            field=f"{FIELD}.{key}",
            value=value,
            remedy="Keep one of the two.",
        )


def _reshard(reading: Reading, key: str, value: Any) -> None:
    """Read ``reshard_after_forward``: on or off, or in accelerate's first version a mode's name or number."""
    if isinstance(value, str) and value.strip().lower() not in ("true", "false", "yes", "no", "on", "off"):
        _sharding(reading, key, value)
        return
    mode = reading.values["mode"]
    # False turns a mode into the one that keeps parameters; True must not contradict such a mode.
    if not coerce(value, bool, field=f"{FIELD}.{key}"):
        reading.values["mode"] = _KEPT.get(mode, mode)
    elif mode in _KEPT.values():
        raise ConfigError(
            f"This contradicts fsdp = {mode}, which keeps the parameters until the backward pass.",
            field=f"{FIELD}.{key}",
            value=value,
            remedy=f"Remove it, or give fsdp = {next(one for one, kept in _KEPT.items() if kept == mode)}.",
        )


def _policy(reading: Reading, key: str, value: Any) -> None:
    names = {"transformer_based_wrap": "classes", "size_based_wrap": "size", "no_wrap": "whole"}
    reading.set_value("wrap", _choice(key, value, names), by=f"{FIELD}.{key}")


def _names(name: str) -> _Reader:
    """Read a list of names, or one text of names separated by commas."""

    def read(reading: Reading, key: str, value: Any) -> None:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
            raise ConfigError("This is not a list of names.", field=f"{FIELD}.{key}", value=value, remedy="Give names.")
        reading.set_value(name, tuple(part.strip() for part in parts if part.strip()), by=f"{FIELD}.{key}")

    return read


def _count(name: str) -> _Reader:
    def read(reading: Reading, key: str, value: Any) -> None:
        count = coerce(value, int, field=f"{FIELD}.{key}")
        if count < 0:
            raise ConfigError(
                "The number must be at least 0.", field=f"{FIELD}.{key}", value=count, remedy="Give a number."
            )
        # 0 is accelerate's way of writing "not given".
        reading.set_value(name, count or None, by=f"{FIELD}.{key}")

    return read


def _prefetch(reading: Reading, key: str, value: Any) -> None:
    # backward_post gathers the next layers when the gradients of these are there, as gathering on demand does.
    options = {"backward_pre": True, "1": True, "backward_post": False, "backward_pos": False, "2": False}
    reading.set_value("backward_prefetch", _choice(key, value, options | {"no_prefetch": False, "3": False}), by=key)


def _state_dict(reading: Reading, key: str, value: Any) -> None:
    where = f"{FIELD}.{key}"
    reading.set_value("sharded_checkpoints", sharded_checkpoints(value, field=where), by=where)


def sharded_checkpoints(value: Any, *, field: str) -> bool:
    """Return whether a state_dict_type asks every process to write its own part of a checkpoint.

    Raises:
        ConfigError: it is not a type that any number of processes can load. The error names `field`.
    """
    options = {"full_state_dict": False, "sharded_state_dict": True}
    word = str(value).strip().lower()
    if word not in options:
        local = word == "local_state_dict"
        raise ConfigError(
            "Local pieces are not supported: they fit one number of processes only."
            if local
            else "No state dict type has this name.",
            field=field,
            value=value,
            remedy="Give SHARDED_STATE_DICT, which any number of processes loads, or FULL_STATE_DICT.",
        )
    return options[word]


def _version(reading: Reading, key: str, value: Any) -> None:
    if coerce(value, int, field=f"{FIELD}.{key}") != 2:
        raise ConfigError(
            "Only torch's second version of FSDP (fully_shard) is supported; it has all modes of the first.",
            field=f"{FIELD}.{key}",
            value=value,
            remedy="Remove it.",
        )


def _precision(reading: Reading, key: str, value: Any) -> None:
    where = f"{FIELD}.{key}"
    parts = {"param_dtype": value, "reduce_dtype": value} if isinstance(value, str) else value
    if not isinstance(parts, Mapping):
        raise ConfigError("This is not a mapping.", field=where, value=value, remedy='Give {"param_dtype": "bf16"}.')
    for name, given in parts.items():
        if name not in ("param_dtype", "reduce_dtype"):
            raise ConfigError(
                "No setting has this name: buffers keep their own format, outputs that of the computation.",
                field=where,
                value=name,
                remedy="Give param_dtype and reduce_dtype.",
            )
        if given is not None:
            # str(torch.bfloat16) is "torch.bfloat16": configurations from Python hold it.
            chosen = _choice(f"{key}.{name}", str(given).removeprefix("torch."), _FORMATS)
            reading.set_value(str(name), chosen, by=f"{where}.{name}")


_XLA = _refused(
    "torch_xla's own FSDP is not served.", "Remove it; on several TPUs use the transformers Trainer with torch_xla."
)

#: Key without the prefix ``fsdp_`` -> the function that reads it.
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
    "limit_all_gathers": _always(True, "memory for a unit is allocated only when its turn has come."),
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
