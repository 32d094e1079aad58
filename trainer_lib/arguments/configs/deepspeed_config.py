"""DeepSpeed's configuration and the arguments. Settings given in both must be equal; one given once is used.

An argument is given when it is not at its default; "auto" in the file leaves a setting to the argument. After `adopt`
the arguments alone hold learning rate, decay, clipping, warm-up and number format, and a `ZeroPlan` holds everything
else from the file. Nothing here imports torch or DeepSpeed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments.coerce import read_mapping
from trainer_lib.arguments.configs.accelerator_config import BatchSettings, micro_batch_size, total_batch_size
from trainer_lib.arguments.fields import field_map
from trainer_lib.base.paths import expand_home
from trainer_lib.base.suggestions import require_known, suggestion
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.arguments.groups import ArgumentGroups
    from trainer_lib.arguments.training import TrainingArguments

_STACK = 10  # of a warning: the line that makes the arguments
AUTO = "auto"
_NO_VALUE = "No value follows from the model or the arguments here."
#: Settings of a schedule whose "auto" follows from the arguments and the length of training.
AUTOMATIC = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
#: Key -> the argument that it follows from. A value in the file must be equal, or "auto".
BATCH_KEYS: Mapping[str, str] = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
#: Keys that this module translates.
MAPPED = (
    *BATCH_KEYS,
    *("gradient_clipping", "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
#: Keys that go to DeepSpeed as they are.
PASSED = (
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "flops_profiler", "log_level"),
    *("prescale_gradients", "gradient_predivide_factor", "communication_data_type", "aio"),
)
#: Keys that DeepSpeed knows and that are refused: they would change how the Trainer steps, saves, logs or divides.
REFUSED = (
    *("tensorboard", "wandb", "comet", "csv_monitor", "checkpoint", "load_universal_checkpoint", "nebula", "amp"),
    *("torch_autocast", "data_types", "tensor_parallel", "sequence_parallel_size", "autotuning", "curriculum_learning"),
    *("data_efficiency", "compression_training", "quantize_training", "progressive_layer_drop", "eigenvalue"),
    *("sparse_attention", "sparse_gradients", "hybrid_engine", "pipeline", "disable_allgather", "graph_harvesting"),
    *("use_data_before_expert_parallelism", "compile", "managed_gradient_accumulation", "gradient_allreduce_op"),
    *("activation_checkpointing", "elasticity", "dataloader_drop_last"),
)
_DECIDED = (
    "Remove it: the Trainer decides this, most of it by arguments, which the table of DeepSpeed's keys in "
    "docs/distributed.md names."
)

ZERO_MAPPED = ("stage", "cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory")
OFFLOADS = ("offload_optimizer", "offload_param")
#: Sizes whose "auto" follows from the model's hidden size.
ZERO_AUTO = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
#: Accepted and always on, whatever the file says: weights are always gathered for saving.
ZERO_ALWAYS_ON = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
ZERO_PASSED = (
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "contiguous_gradients"),
    *("round_robin_gradients", "sub_group_size", "ignore_unused_parameters", "use_multi_rank_bucket_allreduce"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold"),
    *("stage3_module_granularity_threshold", "stage3_allgather_sequential", "memory_efficient_linear", "leaf_module"),
    *("log_trace_cache_warnings", "pipeline_loading_checkpoint", "enable_sanity_checks"),
    *("parameter_alignment", "stage3_use_all_reduce_for_fetch_params", "override_module_apply"),
)
#: Keys of zero_optimization that are refused: they lose digits, skip steps or norms, or divide and save otherwise.
ZERO_REFUSED = (
    *("elastic_checkpoint", "load_from_fp32_weights", "legacy_stage1", "zero_quantized_weights"),
    *("zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zeropp_loco_param"),
    *("zero_hpz_partition_size", "mics_shard_size", "mics_hierarchical_params_gather", "compute_grad_norm", "zenflow"),
    "save_muon_momentum_buffer_in_memory",
)

#: Optimizers of DeepSpeed and torch that update each element by itself, so that ZeRO may shard them -> `optim`.
OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adam", "adamw"), "adamw_torch_fused"),  # Adam decays like AdamW unless adam_w_mode is false
    **{name: name for name in ("sgd", "rmsprop", "adadelta", "adamax", "nadam", "radam", "asgd", "rprop", "lion")},
}
#: Schedule of DeepSpeed -> `lr_scheduler_type`; None where there is no equivalent.
SCHEDULES: Mapping[str, str | None] = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
    "OneCycle": None,
    "LRRangeTest": None,
}
#: Argument that is not supported together with DeepSpeed, why, and what to remove.
_UNSERVED = (
    ("auto_find_batch_size", "gradients are sharded while they are computed, so no step can be undone.", "it"),
    ("torch_compile", "DeepSpeed's hooks and a compiled graph exclude each other.", "it, its backend and its mode"),
    ("fp16_full_eval", "the engine keeps the weights in its own number format.", "it"),
    ("bf16_full_eval", "the engine keeps the weights in its own number format.", "it"),
)
#: Values of the argument `optim` that ZeRO may shard.
ELEMENTWISE = (*sorted({*OPTIMIZERS.values()}), "adamw_torch", "adam")


@dataclass(frozen=True)
class ZeroPlan:
    """The settings of a configuration, combined with the arguments."""

    stage: int  # 0 = nothing is sharded, 1 = the optimizer state is, 2 = gradients too, 3 = parameters too
    precision: str  # "fp32", "bf16" or "fp16"
    zero: dict[str, Any]  # the section zero_optimization, without the sizes in `automatic`
    automatic: tuple[str, ...] = ()  # names of the sizes (in elements) that follow from the model
    # offload_optimizer, offload_param: "cpu", "nvme" or None.
    offload_optimizer: str | None = None
    offload_param: str | None = None
    compiled_adam: bool = False  # True when the file asks for DeepSpeed's own compiled Adam for the CPU
    # Type and settings of DeepSpeed's schedule; None leaves it to lr_scheduler_type.
    schedule: tuple[str, dict[str, Any]] | None = None
    clipping: float | None = None  # gradient_clipping, an L2 norm; None when the file has none
    allow_untested: bool | None = None  # zero_allow_untested_optimizer, as written
    # All sections that go to DeepSpeed as they are, fp16 and bf16 among them.
    sections: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)  # argument -> value that the file decides


def adopt(args: TrainingArguments) -> ZeroPlan:
    """Return the plan, after setting the arguments that the file decides. Raises ConfigError."""
    found = plan(args)
    for name, value in found.arguments.items():
        setattr(args, name, value)
    if found.arguments:
        args.validate()
    return found


def plan(args: ArgumentGroups, *, data_parallel_size: int | None = None) -> ZeroPlan:
    """Return what `args.deepspeed`, a mapping or the name of a JSON file, asks for; `args` stay as they are.

    Only train_batch_size depends on `data_parallel_size`; None: not known yet. Raises ConfigError, for a contradiction
    with both values.
    """
    config = read(args.deepspeed)
    _check_keys("", config, (*MAPPED, *PASSED), REFUSED)
    for name, why, remedy in _UNSERVED:
        if getattr(args, name):
            what = f"This is not supported together with deepspeed: {why}"
            raise ConfigError(what, field=name, value=True, remedy=f"Remove {remedy}.")
    resolved: dict[str, Any] = {}
    _batches(args, config, data_parallel_size)
    zero = _zero(_part_of(config, "zero_optimization"))
    precision, sections = _precision(args, config, resolved)
    clipping = _resolve_setting(args, config, "gradient_clipping", "max_grad_norm", resolved)
    compiled = _optimizer(args, _part_of(config, "optimizer"), resolved, offloaded=zero.get("offload_optimizer"))
    schedule = _schedule(args, _part_of(config, "scheduler"), resolved)
    sections.update({name: config[name] for name in PASSED if name in config})
    if zero["stage"]:
        name = str(resolved.get("optim", args.optim))
        if name not in ELEMENTWISE:
            what = "ZeRO cannot shard this optimizer, because it does not update each element by itself."
            raise ConfigError(what, field="optim", value=name, remedy=f"Choose one of: {', '.join(ELEMENTWISE)}.")
    return ZeroPlan(
        stage=zero["stage"],
        precision=precision,
        automatic=tuple(name for name in ZERO_AUTO if zero.get(name) == AUTO),
        zero={name: value for name, value in zero.items() if value != AUTO},
        offload_optimizer=zero.get("offload_optimizer", {}).get("device"),
        offload_param=zero.get("offload_param", {}).get("device"),
        compiled_adam=compiled,
        schedule=schedule,
        clipping=clipping,
        allow_untested=config.get("zero_allow_untested_optimizer"),
        sections=sections,
        arguments={name: value for name, value in resolved.items() if value != getattr(args, name)},
    )


def read(given: Any) -> dict[str, Any]:
    """Return a configuration: a copy of a mapping, or the content of a file. Raises ConfigError when it has none."""
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    return read_mapping(expand_home(str(given)), field="deepspeed")


def _batches(args: ArgumentGroups, config: Mapping[str, Any], data_parallel_size: int | None) -> None:
    settings, accumulation = BatchSettings.of(args.accelerator_config), args.gradient_accumulation_steps
    micro: int | None = args.per_device_train_batch_size
    total: int | None = args.global_batch_size
    if data_parallel_size is not None:
        micro = micro_batch_size(args, data_parallel_size=data_parallel_size, settings=settings)
        total = total_batch_size(args, data_parallel_size=data_parallel_size, settings=settings)
    elif settings.split_batches:
        micro = None  # known once the processes are counted
    derived: dict[str, int | None] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": None if args.global_batch_size else accumulation,
        "train_batch_size": total,
    }
    for key, value in derived.items():
        written = config.get(key)
        if written in (None, AUTO) or value is None or written == value:
            continue
        argument, remedy = BATCH_KEYS[key], f"Remove it, and give {BATCH_KEYS[key]}."
        if key == "train_batch_size" and not args.global_batch_size:
            argument = "per_device_train_batch_size x gradient_accumulation_steps x processes"
            argument += f" = {micro} x {accumulation} x {data_parallel_size}"
            remedy = "Remove it from the file."
        raise _refused(key, written, f"This contradicts {argument} = {value}.", remedy)


# -- ZeRO --------------------------------------------------------------------------------------------------------------


def _zero(given: dict[str, Any]) -> dict[str, Any]:
    known = (*ZERO_MAPPED, *OFFLOADS, *ZERO_AUTO, *ZERO_ALWAYS_ON, *ZERO_PASSED)
    _check_keys("zero_optimization.", given, known, ZERO_REFUSED)
    stage = given.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise _refused("zero_optimization.stage", stage, "ZeRO has no such stage.", "Give 0, 1, 2 or 3.")
    zero = {name: value for name, value in given.items() if name in (*ZERO_AUTO, *ZERO_PASSED)}
    for name, value in zero.items():
        if value == AUTO and name not in ZERO_AUTO:
            raise _refused(f"zero_optimization.{name}", AUTO, _NO_VALUE, "Write a value, or remove it.")
    zero["stage"] = int(stage)
    given.setdefault("cpu_offload_param", given.get("cpu_offload_params"))  # old files have either spelling
    for name, legacy in zip(OFFLOADS, ("cpu_offload", "cpu_offload_param"), strict=True):
        offload = _offload(given, name, legacy, int(stage))
        if offload:
            zero[name] = offload
    return zero


def _offload(given: Mapping[str, Any], name: str, legacy: str, stage: int) -> dict[str, Any]:
    """The section `name`, or its equivalent of an old file's truth value; empty when nothing is offloaded."""
    key = f"zero_optimization.{name}"
    offload = _part_of({key: given.get(name)}, key)
    if given.get(legacy):
        if offload and offload.get("device") != "cpu":
            raise _contradiction(f"zero_optimization.{legacy}", True, f"{key}.device", offload.get("device"))
        offload.setdefault("device", "cpu")
        if "cpu_offload_use_pin_memory" in given:
            offload.setdefault("pin_memory", bool(given["cpu_offload_use_pin_memory"]))
    device = offload.get("device", "none")
    if device in ("none", None):
        return {}
    if device not in ("cpu", "nvme"):
        raise _refused(f"{key}.device", device, "Nothing can be offloaded to this device.", "Give cpu, nvme or none.")
    if name == "offload_param" and stage < 3:
        # accelerate's questionnaire writes it for every stage, and DeepSpeed itself passes over it.
        warnings.warn(f"{key} is dropped: only stage 3 shards parameters, and the stage is {stage}.", stacklevel=_STACK)
        return {}
    least = 3 if device == "nvme" else 1
    if stage < least:
        what = f"This needs stage {least}, and zero_optimization.stage is {stage}."
        raise _refused(f"{key}.device", device, what, f"Give stage {least}, or remove the section.")
    path = offload.get("nvme_path")
    if device == "nvme" and not path:
        raise _refused(f"{key}.nvme_path", path, "The path is missing.", "Name a folder on the drive.")
    return offload


# -- number format -----------------------------------------------------------------------------------------------------


def _precision(
    args: ArgumentGroups, config: Mapping[str, Any], resolved: dict[str, Any]
) -> tuple[str, dict[str, dict[str, Any]]]:
    if "bfloat16" in config and "bf16" in config:
        raise _refused("bfloat16", None, "This is the old name of bf16, which is there too.", "Keep bf16.")
    written = {"bf16": _part_of(config, "bf16" if "bf16" in config else "bfloat16"), "fp16": _part_of(config, "fp16")}
    sections: dict[str, dict[str, Any]] = {}
    for name, section in written.items():
        asked = section.get("enabled", AUTO if not section else False)
        if asked != AUTO and not isinstance(asked, bool):
            raise _refused(f"{name}.enabled", asked, "This is neither true nor false.", 'Write true, false or "auto".')
        if asked is False and getattr(args, name):
            raise _contradiction(f"{name}.enabled", False, name, True)
        if asked is True or (asked == AUTO and getattr(args, name)):
            sections[name] = {**section, "enabled": True}
            resolved[name] = True
    if len(sections) == 2:
        raise _refused("fp16.enabled", True, "fp16 and bf16 are both on.", "Keep one number format.")
    for name, section in sections.items():
        _check_format(name, section)
    if "fp16" in sections and args.use_cpu:
        raise _refused("fp16.enabled", True, "fp16 is not supported on the CPU.", "Use bf16, or neither.")
    return next(iter(sections), "fp32"), sections


def _check_format(name: str, section: dict[str, Any]) -> None:
    for key in ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if section.get(key):
            raise _refused(f"{name}.{key}", True, "This format keeps too few digits to resume exactly.", "Remove it.")
    if section.get("check_grad_overflow") is False:
        key = f"{name}.check_grad_overflow"
        raise _refused(key, False, "Training would step on gradients that are not finite.", "Remove it.")
    if name == "bf16":
        section["check_grad_overflow"] = True
    section.pop("auto_cast", None)  # inputs are always cast to the model's format


# -- optimizer and schedule --------------------------------------------------------------------------------------------


def _optimizer(args: ArgumentGroups, section: dict[str, Any], resolved: dict[str, Any], *, offloaded: Any) -> bool:
    """Record the file's optimizer in `resolved`; return whether the file asks for DeepSpeed's compiled one."""
    if not section:
        return False
    kind = str(section.get("type", "")).lower()
    if kind not in OPTIMIZERS:
        remedy = f"Choose one of: {', '.join(OPTIMIZERS)}."
        raise _refused("optimizer.type", section.get("type"), "This optimizer is not supported with ZeRO.", remedy)
    params = _part_of({"optimizer.params": section.get("params")}, "optimizer.params")
    decoupled = params.pop("adam_w_mode", True)
    name = "adam" if kind == "adam" and decoupled is False else OPTIMIZERS[kind]
    # `adamw_torch` is the same optimizer without the fused kernel: the file's name does not contradict it.
    if _is_given(args, "optim") and not (name.startswith("adamw") and str(args.optim) == "adamw_torch"):
        if str(args.optim) != name:
            raise _contradiction("optimizer.type", section["type"], "optim", str(args.optim))
    elif name != str(args.optim):
        resolved["optim"] = name
    compiled = params.pop("torch_adam", None) is False and bool(offloaded) and "adam" in kind
    for key, argument, index in (
        ("lr", "learning_rate", None),
        ("weight_decay", "weight_decay", None),
        ("eps", "adam_epsilon", None),
        ("betas", "adam_beta1", 0),
        ("betas", "adam_beta2", 1),
    ):
        _resolve_setting(args, params, key, argument, resolved, prefix="optimizer.params.", index=index)
    _further(args, {key: value for key, value in params.items() if key not in _PARAMS}, resolved)
    return compiled


_PARAMS = ("lr", "weight_decay", "eps", "betas", "bias_correction", "fp32_optimizer_states")


def _further(args: ArgumentGroups, params: Mapping[str, Any], resolved: dict[str, Any]) -> None:
    """Put the settings of the optimizer that have no argument of their own into optim_args."""
    if "max_grad_norm" in params:
        key = "optimizer.params.max_grad_norm"
        raise _refused(key, params["max_grad_norm"], "This setting has another place.", "Give gradient_clipping.")
    text = ",".join(f"{key}={value}" for key, value in sorted(params.items()) if value != AUTO)
    if not text:
        return
    if args.optim_args and args.optim_args != text:
        raise _contradiction("optimizer.params", text, "optim_args", args.optim_args)
    resolved["optim_args"] = text


def _schedule(
    args: ArgumentGroups, section: dict[str, Any], resolved: dict[str, Any]
) -> tuple[str, dict[str, Any]] | None:
    if not section:
        return None
    kind = str(section.get("type"))
    what = "DeepSpeed has no schedule of this name."
    require_known(kind, SCHEDULES, what, field="deepspeed.scheduler.type", value=section.get("type"))
    equivalent = SCHEDULES[kind]
    if _is_given(args, "lr_scheduler_type") and str(args.lr_scheduler_type) != equivalent:
        raise _contradiction("scheduler.type", kind, "lr_scheduler_type", str(args.lr_scheduler_type))
    params = _part_of({"scheduler.params": section.get("params")}, "scheduler.params")
    if kind.startswith("Warmup"):
        for key, argument in (
            ("warmup_max_lr", "learning_rate"),
            ("warmup_num_steps", "warmup_steps"),
            ("total_num_steps", "max_steps"),
        ):
            if not (key == "total_num_steps" and args.max_steps < 0):  # -1: the number follows from the data
                _resolve_setting(args, params, key, argument, resolved, prefix="scheduler.params.")
    if equivalent is not None:
        resolved["lr_scheduler_type"] = equivalent
    for key, value in params.items():
        if value == AUTO and key not in AUTOMATIC:
            raise _refused(f"scheduler.params.{key}", AUTO, _NO_VALUE, "Write a value.")
    return kind, params


# -- settings that both may give --------------------------------------------------------------------------------------


def _part_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of a part of the configuration, empty when it is absent."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _refused(name, value, "This must be a section.", 'Write {"name": value, …}.')
    return dict(value)


def _check_keys(prefix: str, given: Mapping[str, Any], known: tuple[str, ...], refused_keys: tuple[str, ...]) -> None:
    for key, value in given.items():
        # One that is switched off may stay.
        asks = value.get("enabled", bool(value)) if isinstance(value, Mapping) else value
        if key in refused_keys and asks:
            raise _refused(prefix + key, value, "This setting is not supported.", _DECIDED)
        if key not in known and key not in refused_keys:
            raise _refused(prefix + str(key), None, "DeepSpeed has no such setting.", suggestion(str(key), known))


def _refused(key: str, value: Any, message: str, remedy: str) -> ConfigError:
    return ConfigError(message, field=f"deepspeed.{key}", value=value, remedy=remedy)


def _is_given(args: ArgumentGroups, name: str) -> bool:
    return bool(getattr(args, name) != field_map(args)[name].default)


def _resolve_setting(
    args: ArgumentGroups,
    given: Mapping[str, Any],
    key: str,
    argument: str,
    resolved: dict[str, Any],
    *,
    prefix: str = "",
    index: int | None = None,
) -> Any:
    """The number that a section has for an argument, noted in `resolved`; None: it has none."""
    written = given.get(key)
    if isinstance(written, list | tuple) and index is not None:
        written = written[index] if index < len(written) else None
    if written is None or written == AUTO:
        return None
    if isinstance(written, bool) or not isinstance(written, int | float):
        raise _refused(prefix + key, written, "This is not a number.", 'Write a number, or "auto".')
    current = resolved.get(argument, getattr(args, argument))
    # In `resolved`: two sections of a file may give one argument, such as the learning rate.
    if written != current and (_is_given(args, argument) or argument in resolved):
        raise _contradiction(prefix + key, written, argument, current)
    resolved[argument] = written
    return written


def _contradiction(key: str, written: Any, argument: str, current: Any) -> ConfigError:
    remedy = 'Remove one of them, or write "auto" in the file.'
    return _refused(key, written, f"This contradicts {argument} = {current}.", remedy)
