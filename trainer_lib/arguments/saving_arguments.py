"""Arguments about checkpoints: when they are written, how many are kept, what resuming restores."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.enums import SaveStrategy
from trainer_lib.arguments.fields import arg


@dataclass
class SavingArguments:
    """When checkpoints are written, and what they hold."""

    save_strategy: SaveStrategy | str = arg("steps", "When a checkpoint is written.", affects="selection")
    save_steps: int | float = arg(
        500,
        "Steps between two checkpoints; a number below 1 is a share of all steps.",
        affects="selection",
        unit="steps, or a share",
        ge=0,
    )
    save_total_limit: int | None = arg(
        None,
        "Checkpoints to keep; the best and the newest intact one are never removed. All when not given.",
        affects="nothing",
        unit="checkpoints",
        ge=1,
    )
    save_only_model: bool = arg(
        False,
        "Leave out what resuming needs (optimizer, schedule, random states): smaller, but not resumable.",
        affects="nothing",
    )
    save_async: bool = arg(
        False,
        "Block training only while the state is copied to host memory (one copy of it); write and commit meanwhile.",
        affects="nothing",
    )
    max_failed_saves: int = arg(
        1,
        "Saves in a row that fail, for want of space or of the store, after which the run ends.",
        affects="nothing",
        unit="saves",
        ge=1,
    )
    save_on_each_node: bool = arg(
        False, "Write the checkpoint once per machine, for disks that are not shared.", affects="nothing"
    )
    restore_callback_states_from_checkpoint: bool = arg(
        False, "On resume, restore the callbacks' states too, replacing those given.", affects="weights"
    )
    enable_jit_checkpoint: bool = arg(
        True, "On SIGTERM, write a checkpoint at the next step boundary before stopping.", affects="nothing"
    )
    allow_global_batch_change: bool = arg(
        False,
        "On resume, accept another global batch: no sample is lost, up to a batch of them is trained on again, and the "
        "schedule ends elsewhere.",
        affects="nothing",
    )
    ignore_data_skip: bool = arg(
        False, "On resume, start at the beginning of the data instead of where it stopped.", affects="weights"
    )
