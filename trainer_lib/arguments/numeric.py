"""The part of the arguments that can change a result: what belongs in a content key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_lib.arguments.coerce import plain
from trainer_lib.arguments.configs.accelerator_config import BatchSettings, total_batch_size
from trainer_lib.arguments.configs.deepspeed_config import read
from trainer_lib.arguments.enums import SaveStrategy, SchedulerType
from trainer_lib.arguments.fields import Affects, declarations, field_map
from trainer_lib.base.paths import expand_home

if TYPE_CHECKING:
    from trainer_lib.arguments.training import TrainingArguments

#: How one global batch is cut up: recorded as provenance, never part of a key.
_BATCH_FIELDS = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")
#: With `loss_spike_sigma`, they decide when training rolls back, and how far.
_SPIKE_FIELDS = ("loss_spike_window", "max_nonfinite_steps", "save_strategy", "save_steps")
#: The one batch setting that reaches the numbers: sums of gradients are formed in another order.
_EXCHANGED_EACH_TIME = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
#: The parts of DeepSpeed's configuration that reach the numbers; the rest says where tensors live.
_DEEPSPEED_KEYS = ("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "gradient_clipping", "prescale_gradients")


def evaluation_matters(args: TrainingArguments) -> bool:
    """Whether what evaluations report can change which weights come out."""
    schedules = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    return (
        args.load_best_model_at_end
        or args.save_strategy == SaveStrategy.BEST
        or args.lr_scheduler_type in schedules
        or args.metric_for_best_model is not None  # an early-stopping callback watches it
    )


def numeric_fields(
    args: TrainingArguments, *, data_parallel_size: int, evaluations_choose: bool = False
) -> dict[str, Any]:
    """The arguments that can change the trained weights or the exported model, as plain JSON values.

    Args:
        data_parallel_size: processes that train on different samples; only the global batch that results counts.
        evaluations_choose: code around the arguments lets evaluations change the weights.
    """
    batching = BatchSettings.of(args.accelerator_config)
    chosen_by = ("evaluation", "selection") if evaluations_choose or evaluation_matters(args) else ()
    out = _affecting(args, "weights", "outputs", *chosen_by)
    out["global_batch_size"] = total_batch_size(args, data_parallel_size=data_parallel_size, settings=batching)
    out["accelerator_config"] = _EXCHANGED_EACH_TIME if batching.sync_each_batch else None
    if args.loss_spike_sigma is None:
        del out["loss_spike_sigma"]  # as it was before there was one
    else:
        out |= {name: plain(getattr(args, name)) for name in _SPIKE_FIELDS}
    if args.max_steps > 0:
        del out["num_train_epochs"]  # overridden: changing it changes nothing
    return out


def evaluation_fields(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that can change what evaluate reports and predict puts out, as plain JSON values.

    Batch size and processes cannot: an evaluation weighs its batches by their samples.
    """
    return _affecting(args, "outputs", "evaluation")


def _affecting(args: TrainingArguments, *wanted: Affects) -> dict[str, Any]:
    """The arguments that affect one of `wanted`; a field that a subclass adds in its own way affects the weights."""
    declared = declarations(type(args))
    out = {
        name: plain(getattr(args, name))
        for name in field_map(args)
        if declared[name].affects in wanted and name not in _BATCH_FIELDS
    }
    if isinstance(args.deepspeed, str) and expand_home(args.deepspeed).is_file():
        out["deepspeed"] = read(args.deepspeed)  # what the file says counts, not its name
    if isinstance(out.get("deepspeed"), dict):
        out["deepspeed"] = {key: value for key, value in out["deepspeed"].items() if key in _DEEPSPEED_KEYS}
    return out
