"""Arguments about checkpoints: when they are written, how many are kept, and what a resume restores."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.enums import SaveStrategy
from trainer_lib.arguments.fields import Steps, arg


@dataclass
class SavingArguments:
    """When checkpoints are written, what they hold, and what a resume restores."""

    # "selection": a save decides nothing by itself, but with `best` it follows the evaluations.
    save_strategy: SaveStrategy | str = arg("steps", "When a checkpoint is written.", affects="selection")
    save_steps: Steps = arg(
        500,
        "Steps between two checkpoints; a number below 1 is a share of all steps.",
        affects="selection",
        unit="steps, or a share",
        ge=0,
    )
    save_total_limit: int | None = arg(
        None,
        "Checkpoints to keep; rotation never removes the best and the newest intact one. When not given, all are kept.",
        affects="nothing",
        unit="checkpoints",
        ge=1,
    )
    save_only_model: bool = arg(
        False,
        "Save only the model, without optimizer, schedule and random states: smaller, but training cannot resume.",
        affects="nothing",
    )
    save_async: bool = arg(
        False,
        "Block training only while the state is copied to host memory; write and commit it in the background.",
        affects="nothing",
    )
    # Ours: in the reference the first failed save ends the run.
    max_failed_saves: int = arg(
        1,
        "The run fails after so many failed saves in a row, because no space is left or the store cannot be reached.",
        affects="nothing",
        unit="saves",
        ge=1,
    )
    save_on_each_node: bool = arg(
        False, "Write the checkpoint once per machine, for machines without a shared disk.", affects="nothing"
    )
    restore_callback_states_from_checkpoint: bool = arg(
        False, "On resume, restore the callbacks' states too, in place of those given.", affects="weights"
    )
    enable_jit_checkpoint: bool = arg(
        True, "On SIGTERM, write a checkpoint after the current step, then stop.", affects="nothing"
    )
    allow_global_batch_change: bool = arg(
        False,
        "On resume, accept another global batch: no sample is lost, up to one batch of samples is repeated, and the "
        "schedule ends at another step.",
        affects="nothing",
    )
    ignore_data_skip: bool = arg(
        False, "On resume, start at the beginning of the data instead of after the last sample.", affects="weights"
    )
