"""Resuming with another global batch: an error that shows the difference or, if allowed, the effect on the data.

A position is a number of samples. With another global batch it may lie inside a step: then the samples since that
step's start are trained on a second time, so that no sample is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.data.loader import TrainSource
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.checkpoint.reader import Checkpoint


def saved_batch(data: Mapping[str, Any], source: TrainSource) -> int | None:
    """The global batch of a checkpoint's position if it differs from the source's; None if it is equal or unknown."""
    saved = data.get("source", {}).get("global_batch")
    # 0 is a loader of the user's own whose batch is not known.
    return saved if saved and source.global_batch and saved != source.global_batch else None


def position_in(data: Mapping[str, Any], source: TrainSource) -> tuple[int, int]:
    """(steps of the epoch that are done, samples that are trained on again) for a position under this source."""
    samples = int(data["position"])
    # An epoch that was complete stays complete under any batch.
    if source.epoch_samples is not None and source.steps_per_epoch is not None and samples >= source.epoch_samples:
        return source.steps_per_epoch, 0
    return divmod(samples, source.global_batch)


def refusal(loaded: Checkpoint, source: TrainSource, args: TrainingArguments, data_parallel_size: int) -> ConfigError:
    """The error for a changed global batch that is not allowed."""
    then, now = _made_of(loaded.training_args, loaded.world_size), _made_of(args.to_dict(), data_parallel_size)
    return ConfigError(
        f"The global batch was {saved_batch(loaded.data, source)} when the checkpoint was written ({then}) "
        f"and is {source.global_batch} now ({now}), so its position in the data does not fit.",
        field="global_batch_size",
        value=source.global_batch,
        remedy="Restore it (for a change of processes: set global_batch_size to the old product), start from the "
        "beginning, or set allow_global_batch_change=True.",
    )


def total_steps(loaded: Checkpoint, source: TrainSource, args: TrainingArguments, max_steps: int) -> int:
    """Optimizer steps in all: those done with the old batch, and those that the epochs have left with the new one."""
    # max_steps counts optimizer steps, whatever their batch.
    if args.max_steps > 0 or source.steps_per_epoch is None:
        return max_steps
    done = int(loaded.data["epoch"]) * source.steps_per_epoch + position_in(loaded.data, source)[0]
    return loaded.step + max(0, math.ceil(args.num_train_epochs * source.steps_per_epoch) - done)


def consequence(loaded: Checkpoint, source: TrainSource, max_steps: int) -> str:
    """One line that says what an allowed change does to the data."""
    steps, again = position_in(loaded.data, source)
    twice = f" ({again} samples before it are trained on a second time)" if again else ""
    return (
        f"The global batch was {saved_batch(loaded.data, source)} when the checkpoint was written and is "
        f"{source.global_batch} now: training goes on at sample {steps * source.global_batch} of epoch "
        f"{loaded.data['epoch']}{twice}, and it and its schedule end at step {max_steps}."
    )


def _made_of(args: Mapping[str, Any], processes: int) -> str:
    if args.get("global_batch_size"):
        return "global_batch_size"
    factors = (f"{args.get('per_device_train_batch_size')} per device", str(args.get("gradient_accumulation_steps")))
    return f"{factors[0]} x {factors[1]} micro-batches x {processes} processes"
