"""`AcceleratorSlot`: the place of `trainer.accelerator`. The import of accelerate takes long, so it waits for a use."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from trainer_lib.data.loading.iterable import IterableLoader
from trainer_lib.data.loading.loader import EvalLoader
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.trainer.accelerator.trainer_accelerator import TrainerAccelerator
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_ACCELERATE = "accelerate"


def unwrap_prepared(prepared: Any) -> Any:
    """The original of a loader, optimizer or schedule from `accelerator.prepare`; anything else as it is.

    Raises ConfigError when another Accelerator has divided the loader among the processes.
    """
    if _ACCELERATE not in sys.modules:
        return prepared
    from trainer_lib.trainer.accelerator import shared_state

    return shared_state.unwrap(prepared)


class AcceleratorSlot:
    """Makes the Trainer's accelerator at its first use."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self._made: TrainerAccelerator | None = None
        self.in_dummy_batch = False  # an evaluation computes one, which this rank has instead of samples
        self._watched: weakref.WeakSet[EvalLoader | IterableLoader] = weakref.WeakSet()

    def set_up(self) -> None:
        """Take over the world and the engine that follow from new arguments."""
        if _ACCELERATE not in sys.modules:
            return
        # Libraries read accelerate's state by themselves, and would otherwise find out the ranks in their own way.
        from trainer_lib.trainer.accelerator import shared_state

        shared_state.publish_state(self._internals.world, self._internals.engine)
        if self._made is not None:
            self._made._refresh()

    def refuse_foreign(self) -> None:
        """Raise ConfigError when an override of `create_accelerator_and_postprocess` made an Accelerator of its own.

        An accelerator that a subclass keeps under this name for itself, without the override, is left alone.
        """
        if "create_accelerator_and_postprocess" not in self._internals.signatures.overridden:
            return
        made: Any = getattr(self._trainer, "accelerator")  # noqa: B009  # collaborators reach it through this slot
        if made is self._made:
            return
        what = "The Trainer's engine would not follow an Accelerator of your own."
        remedy = "Set accelerator_config and the ddp_* arguments, or change self.accelerator after super()."
        raise ConfigError(what, field="create_accelerator_and_postprocess", value=type(made).__name__, remedy=remedy)

    def get(self) -> TrainerAccelerator:
        """The accelerator of this Trainer."""
        if self._made is None:
            from trainer_lib.trainer.accelerator.trainer_accelerator import TrainerAccelerator

            self._made = TrainerAccelerator(self._trainer, self._internals)
        return self._made

    def watch(self, loader: EvalLoader | IterableLoader) -> None:
        """Note a loader that the user may iterate: its ranks get equally many batches, so that they can gather."""
        if isinstance(loader, EvalLoader):
            loader.equal_rounds = True
        self._watched.add(loader)

    def has_own_batch(self) -> bool:
        """Whether the batch that is computed now holds samples of this rank's own, and is not a dummy batch."""
        run = self._internals.run
        if run is not None and run.weights.computing:
            return run.weights.has_items
        return not self.in_dummy_batch and not any(loader.in_dummy_batch for loader in self._watched)
