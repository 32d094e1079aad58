"""`Internals`: the collaborators of one Trainer, which keeps them under the one reserved name `_trainflow`.

A collaborator calls a documented method of the Trainer and never its own version of it: an override in a subclass runs.
The Trainer's default body of such a method calls the collaborator back.

::

    Trainer ── overridable methods ──▶ Internals ──▶ collaborator ──▶ the Trainer's methods

World         this process among the others          Loaders            from datasets to loaders
Signatures    what overrides take                    Forward            one batch through the model
ModelFacts    what is known of the model             Engine             what trains: optimizer, precision, strategy
TrainedModel  the model                              Evaluator          evaluation and prediction
Events        callbacks, state, control              Counters           tokens and operations
TrainingRun   what lives as long as one training     TrainingLoop       the order of it all
Checkpoints   saving (Snapshots: what)               Restore            resuming
Publisher     the Hub                                TrialRunner        the trials of a search
Attempts      after short memory and spikes      AcceleratorSlot     `trainer.accelerator`
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainer_lib.callbacks.base import (
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.hub.publisher import Publisher
from trainer_lib.search.trials import TrialRunner
from trainer_lib.state import TrainerControl, TrainerState, has_exportable_state
from trainer_lib.trackers.vendors import TrackingCallback, is_reporter, reporters
from trainer_lib.trainer.accelerator.slot import AcceleratorSlot
from trainer_lib.trainer.api.reporting import Counters
from trainer_lib.trainer.attempts import Attempts
from trainer_lib.trainer.checkpoints.checkpointing import Checkpoints
from trainer_lib.trainer.checkpoints.restore import Restore
from trainer_lib.trainer.checkpoints.snapshots import Snapshots
from trainer_lib.trainer.engine import Engine
from trainer_lib.trainer.evaluator import Evaluator
from trainer_lib.trainer.loaders import Loaders
from trainer_lib.trainer.loop import TrainingLoop
from trainer_lib.trainer.model.forward import Forward
from trainer_lib.trainer.model.models import ModelFacts
from trainer_lib.trainer.model.trained_model import TrainedModel
from trainer_lib.trainer.overrides import Signatures, takes_positionals, takes_trial
from trainer_lib.trainer.run import StopRequest, TrainingRun
from trainer_lib.trainer.world import World

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer


class Events:
    """Owner of `callback_handler`, `state` and `control`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def create(self, given: Sequence[TrainerCallback | type[TrainerCallback]], *, rank: int) -> None:
        """Make the handler with the default callbacks and those given; fires `on_init_end`."""
        trainer = self._trainer
        own: list[TrainerCallback | type[TrainerCallback]] = [DefaultFlowCallback]
        # Every rank looks for the trackers, so that all ranks refuse one that cannot be served; rank 0 uses them.
        reporting = reporters(trainer.args.report_to or ())
        own += reporting if rank == 0 else []
        shown = PrinterCallback if trainer.args.disable_tqdm else ProgressCallback
        # First the one that sets `control`, so that the user's callbacks see it; last the one that shows the step.
        trainer.callback_handler = CallbackHandler(
            [*own, *given, shown], trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
        )
        self.use_control(TrainerControl())
        self.use_state(
            TrainerState(
                is_local_process_zero=trainer.is_local_process_zero(),
                is_world_process_zero=trainer.is_world_process_zero(),
                stateful_callbacks=self.stateful(),
            )
        )
        self.fire("on_init_end")

    def fire(self, event: str, *more: Any, state: TrainerState | None = None) -> None:
        """Call one event ("on_step_end") of every callback and keep the control that they return.

        `more`: what it takes besides arguments, state and control; `state`: in place of the current one.
        """
        trainer = self._trainer
        call = getattr(trainer.callback_handler, event)
        trainer.control = call(trainer.args, trainer.state if state is None else state, trainer.control, *more)

    def report(self, values: dict[str, Any], step: int | None = None) -> None:
        """Pass numbers by name to the trackers of `report_to` alone, on the main process; the log history has none.

        `step`: that they belong to; default: the Trainer's.
        """
        trainer = self._trainer
        state = trainer.state if step is None else dataclasses.replace(trainer.state, global_step=step)
        for callback in trainer.callback_handler.callbacks:
            if is_reporter(callback):
                callback.on_log(trainer.args, state, trainer.control, logs=dict(values), model=trainer.model)

    def use_state(self, state: TrainerState) -> None:
        """Make `state` the Trainer's."""
        self._trainer.state = state

    def use_control(self, control: TrainerControl) -> None:
        """Make `control` the Trainer's."""
        self._trainer.control = control

    def show_parts(self) -> None:
        """Give callbacks the model, optimizer and schedule that train now."""
        handler, trainer = self._trainer.callback_handler, self._trainer
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler

    def stateful(self) -> list[Any]:
        """The callbacks, and the control, whose state checkpoints hold."""
        every = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [part for part in every if has_exportable_state(part)]

    def close_trackers(self, status: str) -> None:
        """Finish every tracker's run with `status`: FINISHED, FAILED or KILLED."""
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, TrackingCallback):
                callback.close(status)


class Internals:
    """A Trainer's collaborators; `run` and `stop` (its request to stop) are None outside of `train`."""

    world: World
    signatures: Signatures
    facts: ModelFacts
    engine: Engine

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.run: TrainingRun | None = None
        self.stop: StopRequest | None = None
        self.events = Events(trainer)
        self.engine = Engine(trainer, self.events)
        self.model = TrainedModel(trainer, self)
        self.loaders = Loaders(trainer, self)
        self.forward = Forward(trainer, self)
        self.counters = Counters(trainer, self)
        self.evaluator = Evaluator(trainer, self)
        self.snapshots = Snapshots(trainer, self)
        self.checkpoints = Checkpoints(trainer, self)
        self.restore = Restore(trainer, self)
        self.attempts = Attempts(trainer, self)
        self.loop = TrainingLoop(trainer, self)
        # A function, because `world` is set later.
        self.publisher = Publisher(trainer, comm=lambda: self.world.comm)
        self.accelerator = AcceleratorSlot(trainer, self)
        self.trials = TrialRunner(trainer, self, takes_trial=takes_trial)

    def read_signatures(self) -> None:
        """Find out what overrides take. Methods may also be replaced on a finished Trainer: every run looks again."""
        self.signatures = Signatures(self._trainer, self._trainer._trainflow_defaults)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Call the Trainer's `log` with the arguments that its (possibly older) override takes."""
        if start_time is not None and takes_positionals(self._trainer.log, 2):
            self._trainer.log(logs, start_time)
        else:
            self._trainer.log(logs)

    @property
    def comm(self) -> Communicator:
        """All ranks."""
        return self.world.comm

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Afterwards model, trained modules besides it, optimizer, schedule, state and control are what they were."""
        trainer = self._trainer
        model, wrapped, optimizer = trainer.model, trainer.model_wrapped, trainer.optimizer
        schedule, state, control = trainer.lr_scheduler, trainer.state, trainer.control
        try:
            with self.engine.outside.first_values_kept():
                yield
        finally:
            self.model.use(model)
            self.engine.use_wrapped(wrapped)
            self.engine.use_optimizers(optimizer, schedule)
            self.events.use_state(state)
            self.events.use_control(control)
            self.events.show_parts()
            # The facts belong to a model, and this is the first one again.
            trainer._trainflow_look_at_model()

    def release_model(self) -> None:
        """Free the model and the optimizer of a trial, and undo what it trained besides the model.

        Another model must follow.
        """
        nothing: Any = None  # typed `Any`: everywhere else the attributes are modules
        self.model.use(nothing)
        self.engine.use_wrapped(nothing)
        self._trainer.callback_handler.model = None
        self.engine.outside.put_back()
        self.engine.reset()
