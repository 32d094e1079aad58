"""The folder of a run: one run's checkpoints are never mixed with those of an earlier run or another program.

The newest checkpoint is the one of the highest step. So a new run may write among an earlier run's checkpoints if all
of its own are of higher steps: none is replaced, and a later resume finds its own. Checkpoints of another program are
never found by a resume, so it is enough that none is replaced.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from trainer_lib.arguments import TrainingArguments
from trainer_lib.checkpoint.catalogue import CheckpointInfo, delete_leftovers, list_checkpoints, list_foreign
from trainer_lib.checkpoint.layout import parse_step
from trainer_lib.commit import withdraw_folder
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store

IMPORT = "`trainflow checkpoints import SOURCE DESTINATION` makes a checkpoint of it that can be resumed."
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavePlan:
    """The steps at which a training will save.

    Attributes:
        every: optimizer steps between saves; 0 = it saves none, None = it may save any.
        last: the last step of the training.
    """

    every: int | None
    last: int

    @classmethod
    def of(cls, args: TrainingArguments, max_steps: int, steps_per_epoch: int | None) -> SavePlan:
        """What the arguments ask for; `steps_per_epoch`: None when the data has no length."""
        if args.save_strategy == "no":
            return cls(0, max_steps)
        if args.save_strategy == "steps":
            return cls(
                int(args.save_steps if args.save_steps >= 1 else math.ceil(max_steps * args.save_steps)), max_steps
            )
        return cls(steps_per_epoch if args.save_strategy == "epoch" else None, max_steps)

    @property
    def first(self) -> int | None:
        """The first step that is saved; None when none is."""
        return None if self.every == 0 else min(self.every or 1, self.last)

    def includes(self, step: int) -> bool:
        """Whether a step is saved, or may be."""
        if self.every == 0 or step > self.last:
            return False
        return self.every is None or step == self.last or step % self.every == 0


@dataclass(frozen=True)
class Occupied:
    """The checkpoints in a run's folder that are not the run's own.

    Attributes:
        names: folders of an earlier run's.
        newest: the highest step of an earlier run's; 0 without any.
        foreign: steps of another program's.
    """

    names: tuple[str, ...] = ()
    newest: int = 0
    foreign: tuple[int, ...] = ()

    def forbids(self, step: int) -> bool:
        """Whether a checkpoint of this step would replace one, or lie below a newer one."""
        return step <= self.newest or step in self.foreign


def claim_output_dir(
    root: Store,
    args: TrainingArguments,
    plan: SavePlan,
    *,
    recorded: Collection[str] | None,
    is_own: Callable[[str], bool],
) -> Occupied:
    """Prepare the folder of checkpoints for this run, and remove what interrupted saves left.

    Args:
        root: the folder.
        plan: what this run will save.
        recorded: folders of an earlier run's checkpoints, as the checkpoint that this run continues names them; None
            for a new run.
        is_own: whether this process committed the checkpoint at a URL.

    Returns:
        What stays in the folder beside this run's checkpoints.

    Raises:
        ConfigError: this run would replace a checkpoint of an earlier run or of another program, or its checkpoints
            would lie below those of an earlier run, whose newest a later resume would find.
    """
    foreign = _check_foreign(root, args, plan)
    if recorded is None:
        earlier = _check_earlier_run(root, args, plan, is_own)
    else:
        earlier = [info for info in list_checkpoints(root) if info.name in recorded]
    delete_leftovers(root)
    return Occupied(tuple(info.name for info in earlier), max((info.step for info in earlier), default=0), foreign)


def _check_foreign(root: Store, args: TrainingArguments, plan: SavePlan) -> tuple[int, ...]:
    """The steps of another program's checkpoints, which a new checkpoint of the step would replace."""
    foreign = list_foreign(root)
    steps = tuple(step for name in foreign if (step := parse_step(name)) is not None)
    if args.overwrite_output_dir or not steps:
        return ()
    if any(plan.includes(step) for step in steps):
        raise ConfigError(
            f"The folder holds checkpoints that another program wrote ({foreign[0]}), and this run would replace some.",
            field="output_dir",
            value=root.url,
            remedy=f"Choose another. {IMPORT}",
        )
    _log.warning("%s holds checkpoints that another program wrote (%s); they stay.", root.url, foreign[0])
    return steps


def _check_earlier_run(
    root: Store, args: TrainingArguments, plan: SavePlan, is_own: Callable[[str], bool]
) -> list[CheckpointInfo]:
    """An earlier run's checkpoints, which stay; those of this Trainer's last `train` are removed."""
    present = list_checkpoints(root)
    earlier = [] if args.overwrite_output_dir else [i for i in present if not is_own(root.child(i.name).url)]
    if earlier:
        newest, first = earlier[0], plan.first
        if first is not None and first <= newest.step:
            raise ConfigError(
                f"The folder holds checkpoints of an earlier run ({newest.name} is the newest), and this run would "
                f"save from step {first} on. It would replace some, or a later resume would find them and not its own.",
                field="output_dir",
                value=root.url,
                remedy='Resume (resume_from_checkpoint="auto"), set overwrite_output_dir=True, or choose another.',
            )
        _log.warning(
            "%s holds checkpoints of an earlier run (%s is the newest); they stay, also beyond save_total_limit.",
            *(root.url, newest.name),
        )
    kept = {info.name for info in earlier}
    for info in present:
        if info.name not in kept:
            withdraw_folder(root.child(info.name))
    return earlier
