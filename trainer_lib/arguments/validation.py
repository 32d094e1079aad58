"""Check a set of arguments, as far as this is possible without a model, data or devices.

`validate` converts every field to its declared type and checks its choices and bounds, then fills the fields that
follow from others, then looks for contradictions. Every refusal is a `ConfigError` with field, value and remedy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_lib.arguments.coerce import coerce, coerce_fields
from trainer_lib.arguments.configs import deepspeed_config as deepspeed
from trainer_lib.arguments.configs.accelerator_config import AcceleratorConfig, refuse_unknown
from trainer_lib.arguments.configs.deepspeed_config import AUTO
from trainer_lib.arguments.configs.fsdp_config import read_settings
from trainer_lib.arguments.configs.parallelism_config import PeerSizes, check_layout
from trainer_lib.arguments.enums import DebugOption, FSDPOption, IntervalStrategy, SaveStrategy, SchedulerType
from trainer_lib.arguments.fields import Unset, field_map
from trainer_lib.base.suggestions import require_known
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.arguments.groups import ArgumentGroups


class Reporter(NamedTuple):
    """A name that `report_to` accepts."""

    callback: str  # the class that serves it, in `trainer_lib`
    title: str = ""  # the product's name; empty for a tracker of our own
    package: str | None = None  # the package that it needs and a plain installation lacks
    variable: str | None = None  # an environment variable that the tracker's launcher sets

    @property
    def is_ours(self) -> bool:
        """Whether a tracker of `trainer_lib.trackers` serves it; else the callback that transformers has for it."""
        return not self.title


#: Names that `report_to` accepts. `trainer_lib.trackers` decides which of them this machine can serve.
REPORTERS = {
    "jsonl": Reporter("JsonlCallback"),
    "mlflow": Reporter("MLflowCallback"),
    "tensorboard": Reporter("TensorBoardCallback", package="tensorboard"),
    "wandb": Reporter("WandbCallback", "Weights & Biases", "wandb"),
    "azure_ml": Reporter("AzureMLCallback", "Azure Machine Learning", "azureml"),
    "clearml": Reporter("ClearMLCallback", "ClearML", "clearml"),
    "codecarbon": Reporter("CodeCarbonCallback", "CodeCarbon", "codecarbon"),
    "comet_ml": Reporter("CometCallback", "Comet", "comet_ml"),
    "dagshub": Reporter("DagsHubCallback", "DagsHub", "dagshub"),
    "dvclive": Reporter("DVCLiveCallback", "DVCLive", "dvclive"),
    "flyte": Reporter("FlyteCallback", "Flyte", "flytekit"),
    "kubeflow": Reporter("KubeflowCallback", "Kubeflow Trainer", variable="KUBEFLOW_TRAINER_SERVER_URL"),
    "neptune": Reporter("NeptuneCallback", "Neptune", "neptune"),
    "swanlab": Reporter("SwanLabCallback", "SwanLab", "swanlab"),
    "trackio": Reporter("TrackioCallback", "Trackio", "trackio"),
}
#: Fields that may name a file instead of being a mapping; the code that needs the mapping reads the file.
FILE_FIELDS = ("fsdp_config", "deepspeed", "accelerator_config")
#: Mappings that go to a function of another library as they are.
_FREE_MAPPINGS = ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs")
_TRUTH_WORDS = {"yes": True, "on": True, "no": False, "off": False}
#: torchao's names of the recipes of `fp8`; the settings of torchao that do not distinguish them.
_FLOAT8_RECIPES = ("tensorwise", "rowwise")
_SET_FOR_FLOAT8 = ("emulate", "pad_inner_dim", "enable_fsdp_float8_all_gather")
_NO_RECIPE, _RECIPES = "torchao has no such recipe that is served here.", "Give tensorwise or rowwise."
_CHECKPOINTING = ("gradient_checkpointing", "gradient_checkpointing_kwargs")
_STACK = 6  # of a warning: the line that makes the arguments
_METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def validate(args: ArgumentGroups) -> None:
    """Convert, fill and check all fields of `args` in place. Raises the first ConfigError that it finds."""
    args.fp8 = _float8_recipe(args.fp8)
    coerce_fields(args)
    normalise(args)
    fill(args)
    # Last, because a contradiction may lie in a value that was filled.
    for is_wrong, name, message, remedy in _contradictions(args):
        if is_wrong:
            value = getattr(args, name)
            raise ConfigError(message, field=name, value="none" if value is None else value, remedy=remedy)
    if args.max_steps > 0 and args.warmup_steps > args.max_steps:
        warnings.warn(
            f"warmup_steps = {args.warmup_steps}: The warm-up is longer than training (max_steps = {args.max_steps}), "
            "so the learning rate never reaches its peak. Lower it, or give a share below 1.",
            stacklevel=_STACK,
        )
    _check_mappings(args)


def normalise(args: ArgumentGroups) -> None:
    """Convert arguments that may be written in several forms to one form."""
    # Older versions have a truth value for it.
    if isinstance(args.include_num_input_tokens_seen, bool):
        args.include_num_input_tokens_seen = "all" if args.include_num_input_tokens_seen else "no"
    for name in _FREE_MAPPINGS:
        settings = getattr(args, name)
        # YAML 1.2 reads these words as text, and no type is declared here; the text "no" would count as true.
        setattr(args, name, settings and {key: _TRUTH_WORDS.get(str(value), value) for key, value in settings.items()})
    args.output_dir, args.logging_dir = _expanded(args.output_dir), _expanded(args.logging_dir)
    if not isinstance(args.accelerator_config, str | AcceleratorConfig):
        args.accelerator_config = AcceleratorConfig(args.accelerator_config or {})
    args.parallelism_config = PeerSizes.of(args.parallelism_config)
    args.debug = _words("debug", args.debug, [option.value for option in DebugOption])
    args.fp8 = "tensorwise" if args.fp8 is True else args.fp8 or None
    if args.fsdp is True:
        args.fsdp = FSDPOption.FULL_SHARD.value
    if isinstance(args.fsdp, str):
        args.fsdp = args.fsdp.replace("full shard", "full_shard")  # as the documents about XLA write it
    args.fsdp = " ".join(_words("fsdp", args.fsdp or "", [option.value for option in FSDPOption]))
    args.report_to = _reporters(args.report_to)
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = getattr(args, name)
        if isinstance(value, float) and value >= 1:
            if value != int(value):
                what = "This must be a whole number of steps, or a share below 1."
                raise ConfigError(what, field=name, value=value, remedy=f"Give {int(value)} or {int(value) + 1}.")
            setattr(args, name, int(value))
    if isinstance(args.warmup_steps, float) and args.warmup_steps >= 1:
        args.warmup_steps = coerce(args.warmup_steps, int, field="warmup_steps")


def _expanded(folder: str | None) -> str | None:
    """Return a folder with the home folder in place of "~", which a store would take for a name."""
    in_home = folder is not None and (folder == "~" or folder.startswith("~/"))
    return str(Path(folder).expanduser()) if folder is not None and in_home else folder


def _words(name: str, value: Any, allowed: list[str]) -> list[str]:
    words = value.replace(",", " ").split() if isinstance(value, str) else [str(word) for word in value or []]
    for word in words:
        require_known(word, allowed, field=name)
    return words


def _reporters(value: Any) -> list[str]:
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value or [])
    names = [name for name in dict.fromkeys(names) if name and name != "none"]
    for name in names:
        require_known(name, [*REPORTERS, "all", "none"], "No tracker has this name.", field="report_to")
    return names


def fill(args: ArgumentGroups) -> None:
    """Fill the fields that follow from others, also those that an earlier call filled and that are unchanged since."""
    filled: dict[str, tuple[Any, Any]] = args.__dict__.setdefault("_filled", {})
    # Back to what the user gave first: else a value filled from an argument that has changed would stay.
    for name, (raw, value) in filled.items():
        if getattr(args, name) == value:
            setattr(args, name, raw)
    filled.clear()

    for name, value in [*_consequences(args), *_best_model(args), *_twins(args)]:
        filled[name] = (getattr(args, name), value)
        setattr(args, name, value)


def _consequences(args: ArgumentGroups) -> Iterator[tuple[str, Any]]:
    if args.output_dir is None:
        yield "output_dir", "trainer_output"  # transformers' default, as the rule of `greater_is_better` below
    if not args.do_eval and args.eval_strategy != IntervalStrategy.NO:
        yield "do_eval", True
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        yield "eval_steps", args.logging_steps
    if args.use_cpu and args.dataloader_pin_memory:
        yield "dataloader_pin_memory", False
    if (args.torch_compile_backend or args.torch_compile_mode) and not args.torch_compile:
        yield "torch_compile", True
    # Not where a step cannot be tried again with half of it, or where one number is for all processes.
    config = args.accelerator_config
    cannot_change = (
        args.fsdp
        or args.deepspeed
        or args.parallelism
        or args.parallelism_config
        or isinstance(config, str)
        or (config or {}).get("split_batches")
    )
    if args.global_batch_size and isinstance(args.per_device_train_batch_size, Unset) and not cannot_change:
        yield "per_device_train_batch_size", args.global_batch_size


def _best_model(args: ArgumentGroups) -> Iterator[tuple[str, Any]]:
    metric = args.metric_for_best_model
    if metric is None and (args.load_best_model_at_end or args.lr_scheduler_type in _METRIC_SCHEDULES):
        metric = "loss"
        yield "metric_for_best_model", metric
    if args.greater_is_better is None and metric is not None:
        yield "greater_is_better", not metric.endswith("loss")


def _twins(args: ArgumentGroups) -> Iterator[tuple[str, Any]]:
    fields = field_map(args)
    for name in _CHECKPOINTING:
        twin = name.replace("gradient", "activation")
        one, other = getattr(args, name), getattr(args, twin)
        # A derived class may have a default of its own, which yields to what is given under the other name.
        if other is not None and one in (None, fields[name].default) and one != other:
            yield name, other
        elif one is not None and other in (None, fields[twin].default) and one != other:
            yield twin, one


_NEEDS_EVALUATIONS = ("This needs evaluations during training.", 'Give eval_strategy="steps" or "epoch".')
#: (whether it is wrong, the argument, what is wrong, the remedy)
_Finding = tuple[Any, str, str, str]


def _contradictions(args: ArgumentGroups) -> Iterator[_Finding]:
    yield args.max_steps == 0, "max_steps", "Zero steps train nothing.", "Give -1 to follow num_train_epochs."
    yield (
        args.global_batch_size is not None and args.gradient_accumulation_steps != 1,
        "gradient_accumulation_steps",
        "The accumulation follows from global_batch_size, the micro-batch and the number of processes.",
        "Keep global_batch_size and remove it.",
    )
    yield from _about_the_optimizer(str(args.optim))
    for name in ("logging", "eval", "save"):
        steps = f"{name}_steps"
        yield (
            getattr(args, f"{name}_strategy") == IntervalStrategy.STEPS and not getattr(args, steps),
            steps,
            f'{name}_strategy = "steps" needs a number of steps.',
            f'Give {steps} above 0, or {name}_strategy="no".',
        )
    for half, bfloat in (("fp16", "bf16"), ("fp16_full_eval", "bf16_full_eval")):
        what = f"This cannot be on together with {bfloat}: one number format at a time."
        remedy = f"Keep {bfloat} (wider range, no loss scaling) or {half}."
        yield getattr(args, half) and getattr(args, bfloat), half, what, remedy
    yield args.fp8 not in (None, *_FLOAT8_RECIPES), "fp8", _NO_RECIPE, _RECIPES
    yield args.fp8 and not args.bf16, "fp8", "What is not multiplied in float8 needs bfloat16.", "Give bf16=True too."
    what = "DeepSpeed keeps the weights in its own number format."
    yield args.fp8 and args.deepspeed, "fp8", what, "Give fsdp instead of deepspeed."
    what = "A loss spike goes back to a checkpoint, and save_only_model leaves out what training continues from."
    yield args.loss_spike_sigma is not None and args.save_only_model, "loss_spike_sigma", what, "Remove one of the two."
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        alone = "This has an effect only with processes that load data."
        remedy = "Give dataloader_num_workers above 0, or remove it."
        yield args.dataloader_num_workers == 0 and getattr(args, name), name, alone, remedy
    yield from _about_the_best_model(args)
    both = "This cannot be used together with deepspeed: one strategy shards the model."
    yield args.fsdp and args.deepspeed, "fsdp", both, "Keep one of them."
    modes = [word for word in str(args.fsdp).split() if word not in ("offload", "auto_wrap")]
    remedy = "Give full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2 or no_shard."
    yield args.fsdp and len(modes) != 1, "fsdp", "This needs exactly one way of sharding.", remedy
    is_blind = args.lr_scheduler_type in _METRIC_SCHEDULES and args.eval_strategy == IntervalStrategy.NO
    yield is_blind, "lr_scheduler_type", *_NEEDS_EVALUATIONS
    for name in _CHECKPOINTING:
        twin = name.replace("gradient", "activation")
        what = f"This contradicts {twin} = {getattr(args, twin)}: they are two names of one argument."
        yield getattr(args, name) != getattr(args, twin), name, what, f"Keep {name} and remove {twin}."


def _about_the_optimizer(optimizer: str) -> Iterator[_Finding]:
    yield (
        optimizer.endswith("_layerwise"),
        "optim",
        "A layerwise optimizer steps inside the backward pass, which rules out accumulation, clipping and exact "
        "resuming, so it is not supported.",
        f'Give "{optimizer.removesuffix("_layerwise")}", and gradient_checkpointing=true to save memory.',
    )
    yield optimizer == "adamw_torch_xla", "optim", "XLA is not served.", 'Give "adamw_torch".'


def _about_the_best_model(args: ArgumentGroups) -> Iterator[_Finding]:
    save, evaluation = args.save_steps, args.eval_steps or 0
    is_best = args.save_strategy == SaveStrategy.BEST  # a save follows its evaluation: the intervals need not match
    needs = "load_best_model_at_end needs"
    what = 'With save_strategy = "best", a metric must decide which checkpoint is best.'
    remedy = 'Give a metric\'s name, such as "loss" or "accuracy".'
    yield is_best and args.metric_for_best_model is None, "metric_for_best_model", what, remedy
    name = "save_strategy" if is_best else "load_best_model_at_end"
    watched = is_best or args.load_best_model_at_end
    yield watched and args.eval_strategy == IntervalStrategy.NO, name, *_NEEDS_EVALUATIONS
    if is_best or not args.load_best_model_at_end:
        return
    what = f"{needs} a checkpoint per evaluation, but eval_strategy = {args.eval_strategy}."
    remedy = f'Give save_strategy="{args.eval_strategy}" or "best".'
    yield str(args.eval_strategy) != str(args.save_strategy), "save_strategy", what, remedy
    if args.eval_strategy != IntervalStrategy.STEPS:
        return
    what = f"load_best_model_at_end cannot compare a share with a number of steps (eval_steps = {evaluation})."
    remedy = "Give both as numbers of steps, or both as shares below 1."
    yield (save < 1) != (evaluation < 1), "save_steps", what, remedy
    yield (
        # Fractions, because 0.3 is not a multiple of 0.1 in binary floating point.
        Fraction(str(save)) % Fraction(str(evaluation)),
        "save_steps",
        f"{needs} save_steps to be a multiple of eval_steps = {evaluation}.",
        f"Give {evaluation}, or a multiple of it.",
    )


def _float8_recipe(given: Any) -> Any:
    """The recipe's name out of accelerate's AORecipeKwargs or torchao's configuration; any other value as it is.

    Emulation, padding and gathering do not count: the Trainer sets them, and FSDP gathers bfloat16. Raises ConfigError.
    """
    if given is None or isinstance(given, str | bool):
        return given
    if getattr(given, "module_filter_func", None) is not None:
        why, remedy = "Layers are chosen by accelerate's default.", "Remove module_filter_func."
        raise ConfigError(why, field="fp8", value=type(given).__name__, remedy=remedy)
    config = getattr(given, "config", given)
    if hasattr(type(config), "from_recipe_name"):
        for name in _FLOAT8_RECIPES:
            recipe = type(config).from_recipe_name(name)
            if replace(config, **{field: getattr(recipe, field) for field in _SET_FOR_FLOAT8}) == recipe:
                return name
    raise ConfigError(_NO_RECIPE, field="fp8", value=str(config)[:200], remedy=_RECIPES)


def _check_mappings(args: ArgumentGroups) -> None:
    """Read what is not in a file, which may exist only where the training runs."""
    for name in FILE_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str) and not value.strip():
            what = "This is neither a mapping nor the name of a file."
            raise ConfigError(what, field=name, value='""', remedy="Remove it.")
    if isinstance(args.accelerator_config, dict):
        refuse_unknown(args.accelerator_config)
    if not isinstance(args.fsdp_config, str):
        read_settings(args)
    check_layout(args)
    if isinstance(args.deepspeed, dict):
        zero = args.deepspeed.get("zero_optimization")
        if not isinstance(zero, dict) or zero.get("stage") != AUTO:  # accelerate's launcher gives an "auto" stage
            deepspeed.plan(args)
