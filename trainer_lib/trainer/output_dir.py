"""The folder of a run: one run's checkpoints are never mixed with those of an earlier run or another program."""

from __future__ import annotations

from collections.abc import Callable

from trainer_lib.arguments import TrainingArguments
from trainer_lib.checkpoint.catalogue import delete_leftovers, list_checkpoints, list_foreign
from trainer_lib.commit import withdraw_folder
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store

IMPORT = "`trainflow checkpoints import SOURCE DESTINATION` makes a checkpoint of it that can be resumed."


def claim_output_dir(
    root: Store, args: TrainingArguments, *, resumed_from: str | None, is_own: Callable[[str], bool]
) -> None:
    """Prepare the folder of checkpoints for this run, and remove what interrupted saves left.

    Args:
        root: the folder.
        resumed_from: URL of the checkpoint that this run continues; None for a new run.
        is_own: whether this process committed the checkpoint at a URL.

    Raises:
        ConfigError: the folder holds checkpoints of an earlier run, whose newest a later resume would find, or those
            of another program.
    """
    _refuse_foreign(root, args)
    if resumed_from is None:
        _clear_earlier_run(root, args, is_own)
    delete_leftovers(root)


def _refuse_foreign(root: Store, args: TrainingArguments) -> None:
    """A new checkpoint would replace another program's checkpoint of that step."""
    foreign = list_foreign(root)
    if foreign and args.save_strategy != "no" and not args.overwrite_output_dir:
        raise ConfigError(
            f"The folder holds checkpoints that another program wrote ({foreign[0]}).",
            field="output_dir",
            value=root.url,
            remedy=f"Choose another. {IMPORT}",
        )


def _clear_earlier_run(root: Store, args: TrainingArguments, is_own: Callable[[str], bool]) -> None:
    present = list_checkpoints(root)
    earlier = [info.name for info in present if not is_own(root.child(info.name).url)]
    if earlier and not args.overwrite_output_dir:
        raise ConfigError(
            f"The folder holds checkpoints of an earlier run ({earlier[0]} is the newest).",
            field="output_dir",
            value=root.url,
            remedy='Resume (resume_from_checkpoint="auto"), set overwrite_output_dir=True, or choose another.',
        )
    # What is left was committed by an earlier `train` of this Trainer, or may be overwritten.
    for info in present:
        withdraw_folder(root.child(info.name))
