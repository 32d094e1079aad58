"""What `trainflow prove-resume` adds to a training: an end at a given step, and a checkpoint of the very last one."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.requests import Proof

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.state import TrainerControl, TrainerState


def proof_callbacks(proof: Proof | None) -> list[TrainerCallback]:
    """The callbacks of a training that is part of a proof; none for any other."""
    return [] if proof is None else [ProofCallback(proof.stop_at, kill=proof.kill)]


class ProofCallback(TrainerCallback):
    """Sends this process the signal that ends it, as a scheduler or the kernel would; saves where training ends.

    Every rank has one, so all are hit at the same step. It reads no tensor and draws no random number.
    """

    def __init__(self, stop_at: int | None, *, kill: bool) -> None:
        self._stop_at = stop_at
        self._signal = signal.SIGKILL if kill else signal.SIGTERM

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Send the signal at its step; save the last step, whatever the interval."""
        if state.global_step == self._stop_at:
            self._stop_at = None
            os.kill(os.getpid(), self._signal)
        # A proof compares final checkpoints, and the interval of saves may miss the last step.
        self._save_the_end(control, last=state.global_step >= state.max_steps)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save where an evaluation ends the training (early stopping)."""
        self._save_the_end(control, last=False)

    def _save_the_end(self, control: TrainerControl, *, last: bool) -> None:
        if last or control.should_training_stop:
            control.should_save = True
