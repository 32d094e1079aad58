"""DeepSpeed's configuration from a `ZeroPlan`: sizes that follow from the model, batch sizes, schedules."""

from __future__ import annotations

import ctypes.util
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.accelerator_config import accumulation_steps, micro_batch_size
from trainer_lib.arguments.configs.deepspeed_config import AUTO, ZeroPlan, adopt
from trainer_lib.base.paths import expand_home
from trainer_lib.errors import ConfigError, MissingExtraError

_log = logging.getLogger(__name__)
#: Optimizers that update elements independently, so their flats may be cut anywhere.
_ELEMENTWISE = ("Adam", "AdamW", "SGD", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Lion")
_KNOWN_TO_DEEPSPEED = ("Adam", "AdamW", "DeepSpeedCPUAdam")


def resolve_config(args: TrainingArguments) -> None:
    """Copy the arguments that the configuration decides into `args`, and check that this machine can serve it.

    Raises ConfigError or MissingExtraError for what it needs. Forms no process group.
    """
    plan = adopt(args)
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingExtraError("ZeRO needs the package deepspeed.", field="deepspeed", extra="deepspeed")
    if plan.stage == 0:
        unused = sorted({*plan.zero, *plan.automatic, *plan.sections} - {"stage"})
        _log.warning(
            "ZeRO's stage 0 shards nothing, so training runs as without deepspeed. The configuration decides "
            "optimizer, schedule, clipping and number format; these parts have no effect: %s.",
            ", ".join(unused) or "none",
        )
    if plan.compiled_adam:
        _check_compiler("deepspeed.optimizer.params.torch_adam", False, "true: torch's own Adam needs no compiler")
    for name, device in (("offload_optimizer", plan.offload_optimizer), ("offload_param", plan.offload_param)):
        if device == "nvme":
            _check_drive(f"deepspeed.zero_optimization.{name}", plan.zero[name]["nvme_path"])


def _check_compiler(field: str, value: Any, instead: str) -> None:
    # A virtual environment that is not activated has ninja next to its Python, not on PATH.
    beside = str(Path(sys.executable).parent)
    for program, package in (("g++", "g++ (Debian: apt install g++)"), ("ninja", "ninja (pip install ninja)")):
        if shutil.which(program) is None and shutil.which(program, path=beside) is None:
            what = f"DeepSpeed compiles code for this, and the program {program} is not installed."
            raise ConfigError(what, field=field, value=value, remedy=f"Install {package}, or give {instead}.")


def _check_drive(field: str, folder: str) -> None:
    path = expand_home(folder)
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = f"The folder {existing} cannot be written." if existing.is_dir() else f"{existing} is not a folder."
        remedy = "Name a folder on a drive that can be written, or give device: cpu."
        raise ConfigError(what, field=f"{field}.nvme_path", value=folder, remedy=remedy)
    if ctypes.util.find_library("aio") is None:
        what = "Offloading to a drive needs the library libaio, which is not installed."
        remedy = "Install it (Debian: apt install libaio-dev), or give device: cpu."
        raise ConfigError(what, field=f"{field}.device", value="nvme", remedy=remedy)
    _check_compiler(f"{field}.device", "nvme", "device: cpu")


def check_optimizer(optimizer: torch.optim.Optimizer, plan: ZeroPlan, model: nn.Module) -> None:
    """Raise ConfigError for an optimizer that ZeRO cannot shard, or that trains more than the model's parameters.

    One whose update of an element may depend on other elements is refused unless the configuration allows it.
    """
    name = type(optimizer).__name__
    known = {id(param) for param in model.parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if any(id(param) not in known for param in held):
        raise ConfigError(
            "It holds trained parameters that are not the model's, such as a loss module's; "
            "DeepSpeed trains the model's only.",
            field="optimizer",
            value=name,
            remedy="Freeze them, make their module part of the model, or remove deepspeed.",
        )
    if plan.allow_untested is False and name not in _KNOWN_TO_DEEPSPEED:
        what = f"The setting is false, and {name} is not one of the optimizers that DeepSpeed tests."
        remedy = "Remove the setting, or choose AdamW or Adam."
        raise ConfigError(what, field="deepspeed.zero_allow_untested_optimizer", value=False, remedy=remedy)
    if name not in _ELEMENTWISE and not plan.allow_untested:
        what = "This optimizer may need whole parameters for its update, and ZeRO shards them."
        remedy = "Choose AdamW, or allow it by zero_allow_untested_optimizer: true in the configuration."
        raise ConfigError(what, field="optimizers", value=name, remedy=remedy)


def engine_config(
    plan: ZeroPlan, args: TrainingArguments, model: nn.Module | None, *, data_parallel_size: int, trains: bool = True
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`.

    `model` gives the sizes that are "auto"; None leaves them to DeepSpeed. Unless it `trains` no optimizer is
    offloaded.
    """
    zero = {"memory_efficient_linear": False, **plan.zero}  # True replaces torch's linear in the whole process
    zero.update(_sizes(plan.automatic, model))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size(args, data_parallel_size=data_parallel_size),
        "gradient_accumulation_steps": accumulation_steps(args, data_parallel_size=data_parallel_size),
        "gradient_clipping": float(args.max_grad_norm),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": plan.allow_untested is not False,
        **plan.sections,
    }
    if plan.offload_optimizer is not None:
        config["zero_force_ds_cpu_optimizer"] = False  # torch's fused Adam needs no compiler
    if not trains:
        # There is no optimizer whose state could be offloaded.
        zero.pop("offload_optimizer", None)
    return config


def _sizes(automatic: tuple[str, ...], model: nn.Module | None) -> dict[str, int]:
    """Return the sizes that "auto" derives from the model's hidden size; a model without one gets DeepSpeed's."""
    hidden = hidden_size(model)
    if hidden is None:
        return {}
    # The formulas are those of transformers' integration.
    sizes = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    return {name: sizes[name] for name in automatic}


def hidden_size(model: nn.Module | None) -> int | None:
    """Return the width of the model's layers from its configuration (of several, the largest), or None."""
    config = getattr(model, "config", None)
    # Models of several modalities keep the width of their layers in a part of the configuration.
    for part in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes", "d_model"):
            value = getattr(part, name, None)
            if isinstance(value, list | tuple) and value:
                return int(max(value))
            if isinstance(value, int):
                return value
    return None


def schedule_settings(
    kind: str, params: Mapping[str, Any], args: TrainingArguments, num_training_steps: int
) -> dict[str, Any]:
    """Return the settings of DeepSpeed's schedule; "auto" and required settings follow from the arguments."""
    automatic = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": max(1, args.get_warmup_steps(num_training_steps)),
        "total_num_steps": num_training_steps,
    }
    settings = {name: automatic[name] if value == AUTO else value for name, value in params.items()}
    # DeepSpeed's class requires these, and configurations leave them to the Trainer.
    if kind in ("WarmupDecayLR", "WarmupCosineLR"):
        settings.setdefault("total_num_steps", num_training_steps)
    if kind in ("WarmupLR", "WarmupDecayLR"):
        settings.setdefault("warmup_max_lr", args.learning_rate)
    return settings
