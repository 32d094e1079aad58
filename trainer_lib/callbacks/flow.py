"""Decides when to log, evaluate, save and stop, from the strategies and intervals of the arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trainer_lib.arguments.enums import IntervalStrategy, SaveStrategy
from trainer_lib.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.state import TrainerControl, TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Sets the switches of `control` by the strategies and intervals of the arguments.

    With the strategy "steps", the last step is also evaluated and saved, whatever the interval. `save_strategy="best"`
    is handled by the Trainer, which saves after an evaluation that is the best so far.
    """

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step = state.global_step
        last = step >= state.max_steps
        if args.logging_strategy == IntervalStrategy.STEPS and _is_due(step, state.logging_steps):
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.STEPS and (last or _is_due(step, state.eval_steps)):
            # Another callback may have asked for an evaluation before the delay is over.
            control.should_evaluate = control.should_evaluate or args.eval_delay <= step
        if args.save_strategy == SaveStrategy.STEPS and (last or _is_due(step, state.save_steps)):
            control.should_save = True
        if last:
            control.should_training_stop = True
        return control

    @override
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = True
        return control


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
