"""Arguments about batch sizes and the length of training.

Glossary
    micro-batch   the samples that one process computes at a time (`per_device_train_batch_size`)
    step          one optimizer step: `gradient_accumulation_steps` micro-batches on every process
    global batch  all samples of one step: micro-batch x accumulation x processes
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.fields import Unset, arg


@dataclass
class BatchArguments:
    """Batch sizes and the length of training."""

    per_device_train_batch_size: int = arg(
        Unset(8),
        "Samples that one process trains on at a time (the micro-batch).",
        affects="weights",
        unit="samples",
        ge=1,
    )
    # Not in a key: metrics are weighted by samples, not by batches.
    per_device_eval_batch_size: int = arg(
        8, "Samples that one process evaluates at a time.", affects="nothing", unit="samples", ge=1
    )
    global_batch_size: int | None = arg(
        None,
        "Samples of one optimizer step over all processes. When given, gradient accumulation follows from it for any "
        "number of processes; given alone, a process takes its whole share at a time, halved where memory runs out.",
        affects="weights",
        unit="samples",
        ge=1,
    )
    gradient_accumulation_steps: int = arg(
        1,
        "Micro-batches whose gradients are added up before an optimizer step.",
        affects="weights",
        unit="micro-batches",
        ge=1,
    )
    # Not in a key: the global batch, which the weights depend on, stays the same.
    auto_find_batch_size: bool = arg(
        False,
        "When memory runs out, halve the micro-batch and double the accumulation; the global batch stays the same.",
        affects="nothing",
    )
    average_tokens_across_devices: bool = arg(
        True,
        "Average the loss over the target tokens of all processes at once, instead of per process first.",
        affects="weights",
    )
    num_train_epochs: float = arg(
        3.0,
        "Passes over the training data; a fraction ends inside the last one.",
        affects="weights",
        unit="epochs",
        gt=0,
    )
    # -1 is the reference's way of writing "not given".
    max_steps: int = arg(
        -1,
        "Optimizer steps in all; when positive it overrides num_train_epochs.",
        affects="weights",
        unit="steps",
        ge=-1,
    )
    past_index: int = arg(
        -1,
        "Position of a recurrent memory in the model's outputs, which the next batch gets as `mems`; -1 = none.",
        affects="outputs",
        unit="position",
        ge=-1,
    )
