"""Old names of arguments: translated with a DeprecationWarning that has the new name, or refused with an alternative.

A *neutral* value is the old default, as configurations hold it that an older version wrote out in full. It asks for
nothing and is dropped with the same warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_lib.arguments.coerce import coerce
from trainer_lib.errors import ConfigError

Changes = dict[str, Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OldName:
    """The replacement of an old argument."""

    use: str  # the new form, for the warning
    neutral: tuple[Any, ...]  # values that ask for nothing
    # Value -> new arguments; None when every value that is not neutral is refused.
    translate: Callable[[Any], Changes] | None = None
    way_out: str = ""  # the alternative, for the refusal
    read: Callable[[Any], Any] = lambda args: None  # arguments -> value of the old attribute


def _renamed(new: str, *neutral: Any) -> OldName:
    return OldName(new, neutral, lambda value: {new: value}, read=lambda args: getattr(args, new))


def _refused(way_out: str, *neutral: Any) -> OldName:
    first = neutral[0] if neutral else None  # code that reads the old attribute finds its old default
    return OldName("", neutral, way_out=way_out, read=lambda args: first)


def _amp_backend(value: Any) -> Changes:
    word = str(value).lower()
    if word == "apex":
        _log.warning("NVIDIA Apex is gone. torch's own autocast takes its place; with fp16 it does what level O1 did.")
    elif word not in ("auto", "amp", "cuda_amp", "cpu_amp"):
        remedy = "Remove it; torch's own is used."
        raise ConfigError("No backend for mixed precision has this name.", value=value, remedy=remedy)
    return {}


def _apex_level(value: Any) -> Changes:
    level = re.sub("^0", "O", str(value).upper())  # the documents write a zero in place of the letter
    if level == "O1":
        return {}
    if level == "O0":
        _log.warning("Apex's level O0 computes in float32: fp16 is off.")
        return {"fp16": False}
    if level in ("O2", "O3"):
        what = "This level of NVIDIA Apex keeps the weights in float16, which is not supported."
        remedy = "Use torch's own mixed precision: fp16=True, which is level O1, or bf16=True."
        raise ConfigError(what, value=value, remedy=remedy)
    raise ConfigError("Apex has no such level.", value=value, remedy="Remove it; fp16=True is what was level O1.")


def _warmup_share(value: Any) -> Changes:
    share = coerce(value, float, field="warmup_ratio")
    if not 0 <= share < 1:
        remedy = "Give warmup_steps a number of steps."
        raise ConfigError("The share must be at least 0 and below 1.", value=value, remedy=remedy)
    # One argument holds both forms today: below 1 it is a share.
    return {"warmup_steps": share}


def _sharded_ddp(value: Any) -> Changes:
    words = str(value).lower().split() if isinstance(value, str | bool) else [str(word) for word in value]
    # The flag alone is true; the documents write cpu_offload, and FairScale's option is offload.
    table = {"true": "shard_grad_op", "simple": "shard_grad_op", "zero_dp_2": "shard_grad_op"}
    table |= {"zero_dp_3": "full_shard", "offload": "offload", "cpu_offload": "offload", "auto_wrap": "auto_wrap"}
    unknown = [word for word in words if word not in table]
    if unknown:
        remedy = "Set fsdp; see its help for the modes."
        raise ConfigError("No sharding mode has this name.", value=unknown[0], remedy=remedy)
    return {"fsdp": " ".join(table[word] for word in words)}


def _into(target: str, key: str) -> Callable[[Any], Changes]:
    return lambda value: {target: {key: value}}


def _switch(new: str, value: Any, read: Callable[[Any], bool]) -> OldName:
    """A flag that stands for one value of the argument `new`."""
    use = f"{new}={json.dumps(value)}"
    return OldName(use, (False,), lambda flag: {new: value} if coerce(flag, bool, field=new) else {}, read=read)


_TRUTH = {"true": True, "false": False}
_NATIVE = "torch's own mixed precision is always used."
_SHARE = "warmup_steps (a number below 1 is a share of all steps)"

OLD_NAMES: Mapping[str, OldName] = {
    "evaluation_strategy": _renamed("eval_strategy", None),
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size", None),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size", None),
    "no_cuda": _renamed("use_cpu", False),
    "push_to_hub_model_id": _renamed("hub_model_id", None),
    "push_to_hub_token": _renamed("hub_token", None),
    "push_to_hub_organization": OldName(
        'hub_model_id="owner/name"',
        (None,),
        lambda value: {"push_to_hub_organization": value},  # joined with the model id by `translate`
        read=lambda args: (args.hub_model_id or "").rpartition("/")[0] or None,
    ),
    "warmup_ratio": OldName(
        _SHARE, (0, 0.0, None), _warmup_share, read=lambda args: args.warmup_steps if args.warmup_steps < 1 else 0.0
    ),
    "adafactor": _switch("optim", "adafactor", lambda args: args.optim == "adafactor"),
    "group_by_length": _switch(
        "train_sampling_strategy", "group_by_length", lambda args: args.train_sampling_strategy == "group_by_length"
    ),
    "include_inputs_for_metrics": _switch(
        "include_for_metrics", ["inputs"], lambda args: "inputs" in args.include_for_metrics
    ),
    "torchdynamo": _renamed("torch_compile_backend", None),
    "tpu_metrics_debug": _switch("debug", "tpu_metrics_debug", lambda args: "tpu_metrics_debug" in args.debug),
    "use_mps_device": OldName(
        "", (False, True), way_out="An Apple GPU is used where there is one.", read=lambda args: not args.use_cpu
    ),
    "fp16_backend": OldName("", ("auto",), _amp_backend, way_out=_NATIVE, read=lambda args: "auto"),
    "half_precision_backend": OldName("", ("auto",), _amp_backend, way_out=_NATIVE, read=lambda args: "auto"),
    "sharded_ddp": OldName("fsdp", ("", False, None), _sharded_ddp, read=lambda args: args.fsdp),
    "fsdp_min_num_params": OldName(
        'fsdp_config={"min_num_params": …}', (0,), _into("fsdp_config", "min_num_params"), read=lambda args: 0
    ),
    "fsdp_transformer_layer_cls_to_wrap": OldName(
        'fsdp_config={"transformer_layer_cls_to_wrap": […]}',
        (None,),
        # The old argument held one class, the new one holds a list.
        lambda value: {"fsdp_config": {"transformer_layer_cls_to_wrap": value if isinstance(value, list) else [value]}},
    ),
    "dispatch_batches": OldName(
        'accelerator_config={"dispatch_batches": …}', (None,), _into("accelerator_config", "dispatch_batches")
    ),
    "split_batches": OldName(
        'accelerator_config={"split_batches": …}', (None,), _into("accelerator_config", "split_batches")
    ),
    "save_safetensors": _refused(
        "Weights are always written as safetensors: a pickle can run code when it is loaded.", True
    ),
    "fp16_opt_level": OldName(
        "", ("O1",), _apex_level, way_out="torch's own autocast does what level O1 did.", read=lambda args: "O1"
    ),
    "mp_parameters": _refused(
        'SageMaker\'s model parallelism is gone. Give fsdp="full_shard auto_wrap", which shards the model.', "", None
    ),
    "jit_mode_eval": _refused("Tracing is gone. Use torch_compile=True, which compiles the model.", False),
    "use_ipex": OldName("", (False, True), way_out="torch itself has Intel's optimisations.", read=lambda args: False),
    "xpu_backend": _renamed("ddp_backend", None),
    "tpu_num_cores": _refused("The launcher decides how many processes there are.", None),
    "ray_scope": _refused("hyperparameter_search compares trials by what they reported last.", "last"),
}


def translate(given: Mapping[str, Any], *, keep: Collection[str] = (), stacklevel: int = 2) -> Changes:
    """Return `given` with every old name but those in `keep`, fields of a subclass, replaced by the new arguments.

    `stacklevel` of the warning is counted from the caller. Raises ConfigError for an old name that is not supported, or
    contradicts its new one.
    """
    old_names = [name for name in given if name in OLD_NAMES and name not in keep]
    out = {name: value for name, value in given.items() if name not in old_names}
    for name in old_names:
        for new, value in changes_for(name, given[name], stacklevel=stacklevel + 1).items():
            _merge(out, name, new, value)
    organization = out.pop("push_to_hub_organization", None)
    if organization is not None:
        # Only now, because the model id may have come after the organization.
        model_id = out.get("hub_model_id")
        if not model_id:
            what = "An organization needs the name of a model."
            remedy = f'Give hub_model_id="{organization}/<name>".'
            raise ConfigError(what, field="push_to_hub_organization", value=organization, remedy=remedy)
        out["hub_model_id"] = model_id if "/" in model_id else f"{organization}/{model_id}"
    return out


def name_as_given(name: str, given: Mapping[str, Any]) -> str:
    """Return the old name in `given` that stands for the argument `name`; `name` itself if none does."""
    for old_name in given.keys() & OLD_NAMES.keys() if name not in given else ():
        translate = OLD_NAMES[old_name].translate
        with contextlib.suppress(ConfigError):
            if translate is not None and name in translate(given[old_name]):
                return old_name
    return name


def changes_for(name: str, value: Any, *, stacklevel: int = 2) -> Changes:
    """Return the new arguments of one old argument, and warn once. Raises ConfigError when it is not supported."""
    old = OLD_NAMES[name]
    value = _TRUTH.get(value.lower(), value) if isinstance(value, str) else value  # a word of a command line
    # The type counts: 1 is not True.
    neutral = any(value == usual and type(value) is type(usual) for usual in old.neutral)
    if not neutral and old.translate is None:
        raise ConfigError("This argument no longer exists.", field=name, value=value, remedy=old.way_out)
    warn(name, stacklevel=stacklevel + 1)
    if neutral or old.translate is None:
        return {}
    try:
        return old.translate(value)
    except ConfigError as error:
        # The translation knows only the new name, and the user wrote the old one.
        error.field = name
        raise


def warn(name: str, *, stacklevel: int = 2) -> None:
    """Issue a DeprecationWarning with the new form of `name`."""
    old = OLD_NAMES[name]
    advice = f"Use {old.use}." if old.use else f"Remove it. {old.way_out}"
    warnings.warn(f"{name} is an old name. {advice}", DeprecationWarning, stacklevel=stacklevel + 1)


def _merge(out: Changes, old: str, new: str, value: Any) -> None:
    present = out.get(new)
    if isinstance(present, dict) and isinstance(value, dict):
        out[new] = {**present, **value}  # several old names are keys of one mapping, such as accelerator_config
    elif old == "fp16_opt_level":
        out[new] = value  # level O0 means that fp16, which asked for Apex, is off
    elif new == "warmup_steps" and present not in (None, 0):
        return  # as in the reference: a number of steps wins over the share
    elif new == "include_for_metrics" and present:
        out[new] = [*present, *(item for item in value if item not in present)]
    elif present is not None and present != value:
        remedy = f"Keep {new} and remove {old}."
        raise ConfigError(f"This contradicts {new} = {present!r}.", field=old, value=value, remedy=remedy)
    else:
        out[new] = value
