"""The global batch: the samples of one optimizer step, and how data-parallel processes share them.

::

    micro-batch   per_device_train_batch_size                            or, with split_batches,
                  per_device_train_batch_size / processes
                  global_batch_size / processes                          when only that is given
    global batch  global_batch_size                                      when it is given, else
                  micro-batch x gradient_accumulation_steps x processes

*processes* are the data-parallel ones: those that train on different samples. Every other place that needs one of
these numbers asks here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_lib.arguments.accelerator_config import BatchSettings

if TYPE_CHECKING:
    from trainer_lib.arguments.groups import ArgumentGroups


def total_batch_size(args: ArgumentGroups, *, data_parallel_size: int, settings: BatchSettings | None = None) -> int:
    """Return the samples of one optimizer step over all processes.

    Args:
        args: coerced arguments.
        data_parallel_size: processes that train on different samples.
        settings: the settings in `args.accelerator_config`, if the caller has read them already.

    Raises:
        ConfigError: `accelerator_config` names a file that cannot be read, or holds a setting that is not served.
    """
    if args.global_batch_size:
        return args.global_batch_size
    split = (settings or BatchSettings.of(args.accelerator_config)).split_batches
    processes = 1 if split else data_parallel_size  # a split batch is given for all processes together
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * processes


def micro_batch_size(args: ArgumentGroups, *, data_parallel_size: int, settings: BatchSettings | None = None) -> int:
    """Return the samples that one process trains on at a time; arguments and errors as in `total_batch_size`.

    Raises:
        ConfigError: also when `split_batches` asks for a share that is not a whole number of samples.
    """
    settings = settings or BatchSettings.of(args.accelerator_config)
    return settings.share(args.per_device_train_batch_size, data_parallel_size, field="per_device_train_batch_size")


def rows_at_a_time(args: ArgumentGroups, *, data_parallel_size: int) -> int:
    """Return the samples that a process really trains on at a time: its share of the global batch may be smaller.

    Raises:
        ConfigError: as in `micro_batch_size`.
    """
    share = -(-total_batch_size(args, data_parallel_size=data_parallel_size) // data_parallel_size)
    return min(micro_batch_size(args, data_parallel_size=data_parallel_size), share)


def follows_global_batch(args: ArgumentGroups) -> bool:
    """Whether the micro-batch follows from `global_batch_size`, because no micro-batch was given."""
    return "per_device_train_batch_size" in args.__dict__.get("_filled", ())


def describe_step(args: ArgumentGroups, *, data_parallel_size: int, micro_batch: int | None = None) -> str:
    """Return the samples of a step in words; `micro_batch` where memory allowed fewer than the arguments."""
    total = total_batch_size(args, data_parallel_size=data_parallel_size)
    size = min(micro_batch or total, rows_at_a_time(args, data_parallel_size=data_parallel_size))
    accumulation = -(-total // (size * data_parallel_size))
    processes = f"{data_parallel_size} process{'es' if data_parallel_size > 1 else ''}"
    return f"{total:,} samples a step: micro-batch {size:,} x accumulation {accumulation:,} x {processes}"


def accumulation_steps(args: ArgumentGroups, *, data_parallel_size: int) -> int:
    """Return the micro-batches that a process adds up for one full global batch, at least 1."""
    if args.global_batch_size is None:
        return args.gradient_accumulation_steps
    micro_batch = micro_batch_size(args, data_parallel_size=data_parallel_size)
    # Rounded up: with fewer micro-batches the step would miss samples of the global batch.
    return max(1, -(-args.global_batch_size // (micro_batch * data_parallel_size)))
