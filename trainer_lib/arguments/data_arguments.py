"""Arguments about how samples are ordered and loaded, and how they become inputs."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.enums import SamplingStrategy
from trainer_lib.arguments.fields import arg


@dataclass
class DataArguments:
    """Data loading, column selection, sampling order."""

    dataloader_drop_last: bool = arg(False, "Drop the last batch if it is not full.", affects="weights")
    # Not in a key: the order is a function of the seed, whichever process loads a sample.
    dataloader_num_workers: int = arg(
        0, "Processes that load data; 0 = the training process loads it.", affects="nothing", unit="processes", ge=0
    )
    dataloader_pin_memory: bool = arg(True, "Load into memory that copies to an accelerator faster.", affects="nothing")
    dataloader_persistent_workers: bool = arg(False, "Keep the loading processes between epochs.", affects="nothing")
    dataloader_prefetch_factor: int | None = arg(
        None, "Batches that each loading process prepares in advance.", affects="nothing", unit="batches", ge=1
    )
    dataloader_multiprocessing_context: str | None = arg(
        None, "How loading processes start.", affects="nothing", choices=("fork", "spawn", "forkserver")
    )
    # In the train key: without order, batches come as workers finish, which no resume can repeat.
    dataloader_in_order: bool = arg(
        True, "Yield batches in order, even when a later one is ready first.", affects="weights"
    )
    remove_unused_columns: bool = arg(True, "Drop columns that the model's forward does not accept.", affects="outputs")
    label_names: list[str] | None = arg(
        None, "Columns that hold labels; taken from the model's signature when not given.", affects="outputs"
    )
    train_sampling_strategy: SamplingStrategy | str = arg(
        "random", "Order of the training samples; group_by_length saves padding.", affects="weights"
    )
    length_column_name: str = arg(
        "length", "Column that holds precomputed lengths, for group_by_length.", affects="outputs"
    )
