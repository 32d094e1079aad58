"""Resuming with another global batch: refused with the difference shown, or, when allowed, what it means for the data.

A position is a number of samples. Under another global batch it need not be a whole number of steps: then the samples
since the last whole one are trained on a second time, and none is lost.
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
    """The global batch of a checkpoint's position, if it is another one than the source's; None if not, or unknown."""
    saved = data.get("source", {}).get("global_batch")
    return saved if saved and source.global_batch and saved != source.global_batch else None


def position_in(data: Mapping[str, Any], source: TrainSource) -> tuple[int, int]:
    """(steps of its epoch that are done, samples of it that are trained on again) for a position under this source."""
    samples = int(data["position"])
    if source.epoch_samples is not None and source.steps_per_epoch is not None and samples >= source.epoch_samples:
        return source.steps_per_epoch, 0
    return divmod(samples, source.global_batch)


def refusal(loaded: Checkpoint, source: TrainSource, args: TrainingArguments, data_parallel_size: int) -> ConfigError:
    """What to raise when a changed global batch was not allowed."""
    then, now = _made_of(loaded.training_args, loaded.world_size), _made_of(args.to_dict(), data_parallel_size)
    return ConfigError(
        f"was {saved_batch(loaded.data, source)} when the checkpoint was written ({then}) and is {source.global_batch} "
        f"now ({now}), so its position in the data does not fit.",
        field="global_batch_size",
        value=source.global_batch,
        remedy="Restore it (for a change of processes: set global_batch_size to the old product), start anew, or set "
        "allow_global_batch_change=True.",
    )


def total_steps(loaded: Checkpoint, source: TrainSource, args: TrainingArguments, max_steps: int) -> int:
    """Steps to do in all: those done under the old batch, and what the epochs have left under this one."""
    if args.max_steps > 0 or source.steps_per_epoch is None:
        return max_steps
    done = int(loaded.data["epoch"]) * source.steps_per_epoch + position_in(loaded.data, source)[0]
    return loaded.step + max(0, math.ceil(args.num_train_epochs * source.steps_per_epoch) - done)


def consequence(loaded: Checkpoint, source: TrainSource, max_steps: int) -> str:
    """What an allowed change means, in a line."""
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
