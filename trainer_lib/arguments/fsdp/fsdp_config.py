"""Read `fsdp` and `fsdp_config` into one form, and refuse what is not supported.

The keys are those of every version of the Trainer's documents and of accelerate's files, with or without the prefix
``fsdp_``. docs/distributed.md explains each in a table, and a test compares the two. Nothing here imports torch, so a
spec is refused before a process is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trainer_lib.arguments.enums import FSDPOption
from trainer_lib.arguments.fsdp.fsdp_keys import FIELD, KEYS, MODES, Reading
from trainer_lib.arguments.io import read_mapping
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

_WHOLE = "It needs every parameter as a whole."
# Parts of optimizers' names.
_UNSHARDABLE: Mapping[str, str] = {
    **dict.fromkeys(("lomo", "adalomo"), "It steps inside the backward pass, before gradients are exchanged."),
    **dict.fromkeys(("galore", "apollo", "adafactor"), _WHOLE),
    **dict.fromkeys(("lion_32bit", "ademamix"), "bitsandbytes does not support shards."),
    **dict.fromkeys(("_8bit", "paged_", "_4bit", "rmsprop_bnb"), "Its quantised state does not support shards."),
}


class FsdpArguments(Protocol):
    """The training arguments that this module reads."""

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
    """The settings of FSDP.

    Attributes:
        mode: full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2.
        offload: keep parameters, gradients and optimizer state in the host's memory.
        wrap: the unit that is gathered: the "whole" model, each layer of some "classes", or modules by "size".
        wrap_classes: class names of the layers; empty = those that the model names in `_no_split_modules`.
        min_num_params: number of parameters that make a unit, for "size".
        hybrid_group: processes that share one copy, for the hybrid modes; None = those of one machine.
        backward_prefetch, forward_prefetch: gather the next unit while this one computes.
        activation_checkpointing: recompute each unit's activations in the backward pass.
        cpu_ram_efficient_loading: only the first process builds the model with its values.
        sync_module_states: all processes get the first one's values.
        sharded_checkpoints: every process writes its own part of a checkpoint.
        param_dtype, reduce_dtype: number formats of gathered parameters and of exchanged gradients; None = their own.
        ignored_modules: patterns of the names of modules that are not sharded.
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
        """True when gathered parameters are released between forward and backward pass."""
        # no_shard as well: its groups have one process each, so that releasing costs nothing.
        return self.mode in ("full_shard", "hybrid_shard", "no_shard")


def read_settings(args: FsdpArguments) -> FsdpSettings | None:
    """Return the settings, reading their file if there is one; None when `fsdp` is empty.

    Raises:
        ConfigError: the file cannot be read, or a key, a value or a combination is not supported.
    """
    words = str(args.fsdp or "").split()
    config = read_mapping(Path(args.fsdp_config), field=FIELD) if isinstance(args.fsdp_config, str) else None
    values = _unprefixed(config if config is not None else args.fsdp_config or {})
    if not words:
        _refuse_without_fsdp(values)
        return None
    reading = Reading({"mode": next(word for word in words if word in MODES)})  # validation has left exactly one
    if FSDPOption.OFFLOAD in words:
        reading.set_value("offload", True, by="fsdp")
    for key, value in values.items():
        if key not in KEYS:
            raise ConfigError("No setting has this name.", field=FIELD, value=key, remedy=suggestion(key, KEYS))
        # null in a file that was written out in full asks for nothing.
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
        # transformers accepts every key with and without the prefix.
        name = str(key).removeprefix("fsdp_")
        if name in values and values[name] != value:
            raise ConfigError(
                f"The setting is given twice: {values[name]!r} and {value!r}.",
                field=f"{FIELD}.{name}",
                remedy="Keep one.",
            )
        values[name] = value
    return values


def _refuse_without_fsdp(values: Mapping[str, Any]) -> None:
    # A configuration that was written out in full has these values, and they ask for nothing.
    asked = [key for key, value in values.items() if value not in (0, False, None, "", "false", "False", [], {})]
    if asked:
        raise ConfigError(
            "Without fsdp, these settings have no effect.",
            field=FIELD,
            value=asked[0],
            remedy='Remove it, or set fsdp="full_shard auto_wrap".',
        )


# -- what follows from several of them ---------------------------------------------------------------------------------


def _choose_parts(reading: Reading, *, asked: bool) -> None:
    """Choose the units by class or by size: as the policy says, else by the given key; `auto_wrap` is by class."""
    values = reading.values
    classes, size = values.get("wrap_classes"), values.get("min_num_params")
    if classes and size:
        raise ConfigError(
            "This cannot be used together with transformer_layer_cls_to_wrap: layers are wrapped by class or by size.",
            field=f"{FIELD}.min_num_params",
            value=size,
            remedy="Keep one of them.",
        )
    wanted = "classes" if classes else "size" if size else "classes" if asked else None
    policy = values.get("wrap")
    if policy == "size" and not size:
        raise ConfigError(
            "SIZE_BASED_WRAP needs a size.",
            field=f"{FIELD}.min_num_params",
            value=0,
            remedy="Give the number of parameters that make a unit.",
        )
    if policy is not None and wanted is not None and policy != wanted:
        raise ConfigError(
            f"This contradicts {'auto_wrap' if asked and not (classes or size) else 'the layers to wrap'}.",
            field=f"{FIELD}.auto_wrap_policy",
            value=policy,
            remedy="Remove it: the policy follows from the other settings.",
        )
    values["wrap"] = policy or wanted or "whole"


def _choose_formats(reading: Reading, args: FsdpArguments) -> None:
    """Choose the default formats: parameters as the forward pass computes, gradients in float32."""
    values = reading.values
    asked = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    if values.get("param_dtype") == "float16" and not args.fp16:
        raise ConfigError(
            "float16 needs a loss scaler.",
            field=f"{FIELD}.mixed_precision",
            value="float16",
            remedy="Set fp16=True, or use bf16.",
        )
    if asked is not None:
        # setdefault: mixed_precision in fsdp_config wins over bf16 and fp16.
        values.setdefault("param_dtype", asked)
        values.setdefault("reduce_dtype", "float32")


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
    "predict_with_generate": (
        "processes would generate different numbers of tokens and wait for each other.",
        "Remove it, and generate with a Trainer of its own without fsdp and the saved model.",
    ),
}


def _check(settings: FsdpSettings, args: FsdpArguments) -> None:
    _check_parts(settings, args)
    for name, (why, remedy) in _UNSERVED.items():
        if getattr(args, name, False):
            raise ConfigError(f"This is not supported together with fsdp: {why}", field=name, value=True, remedy=remedy)
    for part, why in _UNSHARDABLE.items():
        if part in str(args.optim):
            raise ConfigError(
                f"This optimizer cannot be used together with fsdp. {why}",
                field="optim",
                value=str(args.optim),
                remedy="Use adamw_torch.",
            )


def _check_parts(settings: FsdpSettings, args: FsdpArguments) -> None:
    if settings.cpu_ram_efficient_loading and not settings.sync_module_states:
        raise ConfigError(
            "This contradicts cpu_ram_efficient_loading: the values of the other processes come from the first.",
            field=f"{FIELD}.sync_module_states",
            value=False,
            remedy="Remove it.",
        )
    if settings.hybrid_group is not None and "hybrid" not in settings.mode:
        raise ConfigError(
            f"This has no effect on {settings.mode}.",
            field=f"{FIELD}.hybrid_group_size",
            value=settings.hybrid_group,
            remedy="Remove it, or give fsdp = hybrid_shard.",
        )
    if not settings.activation_checkpointing:
        return
    if args.gradient_checkpointing:
        raise ConfigError(
            "This cannot be on together with gradient_checkpointing: both recompute the same activations.",
            field=f"{FIELD}.activation_checkpointing",
            value=True,
            remedy="Keep activation_checkpointing, which saves an all-gather.",
        )
    if settings.wrap == "whole":
        raise ConfigError(
            "This needs wrapped layers whose activations are recomputed.",
            field=f"{FIELD}.activation_checkpointing",
            value=True,
            remedy="Add auto_wrap to fsdp, or give gradient_checkpointing instead.",
        )


def as_plugin_settings(settings: FsdpSettings) -> dict[str, Any]:
    """Return the settings by the names of accelerate's `FullyShardedDataParallelPlugin`, for code that builds one."""
    policy = {"classes": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "whole": "NO_WRAP"}[settings.wrap]
    named: dict[str, Any] = {
        "fsdp_version": 2,
        "reshard_after_forward": settings.reshards,
        "auto_wrap_policy": policy,
        "cpu_ram_efficient_loading": settings.cpu_ram_efficient_loading,
        "state_dict_type": "SHARDED_STATE_DICT" if settings.sharded_checkpoints else "FULL_STATE_DICT",
        "activation_checkpointing": settings.activation_checkpointing,
    }
    if settings.offload:
        named["cpu_offload"] = True
    if settings.wrap_classes:
        named["transformer_cls_names_to_wrap"] = ",".join(settings.wrap_classes)
    if settings.min_num_params:
        named["min_num_params"] = settings.min_num_params
    return named
