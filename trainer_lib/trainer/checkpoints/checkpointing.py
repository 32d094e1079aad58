"""`Checkpoints`: saving a step, in the foreground or the background, and what follows once it is committed.

::

    save          -> wait for the save under way; take a snapshot; write it, or start writing it in the background;
                     the files of an overridden `save_model` are written here and now, from weights that stand still
    committed     -> the older checkpoints beyond `save_total_limit` are removed, except the best, the newest intact
                     one, and those that are read, kept or pushed
    observed      -> at the next step boundary: `on_save`, and the push
    failed        -> training continues until `max_failed_saves` in a row have failed
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_lib.arguments import TrainingArguments
from trainer_lib.checkpoint.catalogue import (
    IMPORT,
    CheckpointInfo,
    delete_leftovers,
    list_checkpoints,
    list_foreign,
    rotate_checkpoints,
)
from trainer_lib.checkpoint.layout import checkpoint_name, parse_step
from trainer_lib.checkpoint.reader import Checkpoint
from trainer_lib.checkpoint.writer import BackgroundSaver, WriteFiles, save_checkpoint
from trainer_lib.errors import ConfigError, LeaseLostError, OutOfMemoryError, StorageError
from trainer_lib.locks.removal import is_kept, withdraw_if_unread
from trainer_lib.state import TrainerState
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, withdraw_folder
from trainer_lib.trainer.overrides import takes
from trainer_lib.trainer.run import TrainingRun

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavePlan:
    """The steps at which a training will save: `every` so many (0: none, None: any) up to `last`, the last step."""

    every: int | None
    last: int

    @classmethod
    def of(cls, args: TrainingArguments, max_steps: int, steps_per_epoch: int | None) -> SavePlan:
        """The settings of the arguments; `steps_per_epoch`: None when the data has no length."""
        if args.save_strategy == "no":
            return cls(0, max_steps)
        if args.save_strategy == "steps":
            every = args.save_steps if args.save_steps >= 1 else math.ceil(max_steps * args.save_steps)
            return cls(int(every), max_steps)
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
    """The checkpoints in a run's folder that are not its own: an earlier run's (folders), another program's (steps).

    `newest`: the highest step of an earlier run; 0 without any.
    """

    names: Sequence[str] = ()
    newest: int = 0
    foreign: Sequence[int] = ()

    def forbids(self, step: int) -> bool:
        """Whether a checkpoint of this step would replace one, or lie below a newer one."""
        return step <= self.newest or step in self.foreign


@dataclass(frozen=True)
class Saving:
    """A save that has started: its destination, whether it is the best model so far, and the state at its step.

    `rollback_step`: what the run's is once the save is committed.
    """

    url: str
    best: bool
    state: TrainerState
    rollback_step: int


_STATE = ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


class Checkpoints:
    """Saves checkpoints; knows which of them are this Trainer's own, and which in the folder are not (`occupied`)."""

    _saving: Saving  # the newest save that has started

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self._saver: BackgroundSaver | None = None
        self._own: set[str] = set()
        self.is_adding_model = False  # an overridden `save_model` writes into a checkpoint now
        self.occupied = Occupied()

    def root(self) -> Store:
        """The folder that holds the checkpoints of this training."""
        return Store.open(self._trainer._get_output_dir(self._trainer._trial), field="output_dir")

    def claim_folder(self, plan: SavePlan, *, resumed: Checkpoint | None) -> None:
        """Prepare the folder for a training that continues `resumed` (None: a new run). Collective. Raises ConfigError.

        An earlier run's checkpoints stay as long as any attempt of this run lasts: its own checkpoints name them.
        """
        self.close()  # a save whose wait was interrupted is this Trainer's own, however it ends
        world = self._internals.world
        recorded: Sequence[str] | None = None if resumed is None else resumed.earlier_runs
        if self._internals.attempts.spikes:  # back at the start of a resumed run, nothing of it names them
            recorded = self.occupied.names
        found = world.run_on_main_process(lambda: self._claim(self.root(), plan, recorded))
        self.occupied = Occupied(*world.comm.broadcast_json(None if found is None else astuple(found)))

    def _claim(self, root: Store, plan: SavePlan, recorded: Collection[str] | None) -> Occupied:
        """Remove what interrupted saves left in the folder of checkpoints; returns what stays. Raises ConfigError.

        `recorded` names the earlier run's checkpoints, as the checkpoint that this run continues has them; None for a
        new run.
        """
        foreign = list_foreign(root)
        found = (parse_step(name) for name in foreign)
        steps = [] if self._trainer.args.overwrite_output_dir else [step for step in found if step is not None]
        if any(plan.includes(step) for step in steps):
            raise ConfigError(
                f"The folder holds checkpoints that another program wrote ({foreign[0]}), and this run would replace "
                "some.",
                field="output_dir",
                value=root.url,
                remedy=f"Choose another. {IMPORT}",
            )
        if steps:
            _log.warning("%s holds checkpoints that another program wrote (%s); they stay.", root.url, foreign[0])
        if recorded is None:
            earlier = self._earlier_run(root, plan)
        else:
            earlier = [info for info in list_checkpoints(root) if info.name in recorded]
        delete_leftovers(root)
        return Occupied([info.name for info in earlier], max((info.step for info in earlier), default=0), steps)

    def _earlier_run(self, root: Store, plan: SavePlan) -> list[CheckpointInfo]:
        """An earlier run's checkpoints, which stay; those of this Trainer's last `train` are removed."""
        overwrites, first = self._trainer.args.overwrite_output_dir, plan.first
        earlier, own = list[CheckpointInfo](), list[CheckpointInfo]()
        for info in list_checkpoints(root):
            (own if overwrites or root.child(info.name).url in self._own else earlier).append(info)
        if earlier:
            newest = earlier[0]
            if first is not None and first <= newest.step:
                raise ConfigError(
                    f"The folder holds checkpoints of an earlier run ({newest.name} is the newest), and this run would "
                    f"save from step {first} on. It would replace some, or a later resume would find them and not its "
                    "own.",
                    field="output_dir",
                    value=root.url,
                    remedy='Resume (resume_from_checkpoint="auto"), set overwrite_output_dir=True, or choose another.',
                )
            _log.warning(
                "%s holds checkpoints of an earlier run (%s is the newest); they stay, also beyond save_total_limit.",
                *(root.url, newest.name),
            )
        for info in own:
            withdraw_folder(root.child(info.name))
        return earlier

    def withdraw(self, *, after: int, until: int) -> None:
        """Remove this run's checkpoints of the steps after `after` up to `until`. Collective."""
        spared = {*self.occupied.names, *self._internals.publisher.checkpoints_being_pushed}

        def remove() -> None:
            for info in list_checkpoints(self.root()):
                if after < info.step <= until and info.name not in spared:
                    # Also the best of an evaluation alongside this training: its weights are given up.
                    withdraw_if_unread(self.root().child(info.name), even_kept=True)

        try:
            self._internals.world.run_on_main_process(remove)
        except StorageError as error:
            _log.warning("A checkpoint from before the rollback could not be removed: %s", error)

    def newest_committed(self) -> Store | None:
        """The newest checkpoint that the training under way has committed or resumed from; None without one."""
        run = self._internals.run
        return None if run is None or run.saved_step < 0 else self.root().child(checkpoint_name(run.saved_step))

    def _training_run(self) -> TrainingRun:
        if self._internals.run is None:
            raise ConfigError("A checkpoint can only be saved while training.", field="save", remedy="Use save_model.")
        return self._internals.run

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the step that is done. Collective; `Trainer._save_checkpoint` documents it."""
        trainer, run = self._trainer, self._training_run()
        self.finish()
        step = trainer.state.global_step
        if run.saved_step == step and not (run.stopping and trainer.args.save_only_model):
            return  # resumed from it with an evaluation still to do: its weights are these
        if self.occupied.forbids(step):
            _log.warning("Step %d is not saved: checkpoints of another run are in the way (output_dir).", step)
            return
        run.history.collect(step)  # losses since the last log are part of the position
        trainer.store_flos()
        root, is_best = self.root(), trainer.state.best_global_step == step
        url = root.child(checkpoint_name(step)).url
        snapshot = self._internals.snapshots.take(run, best_url=url if is_best else None)
        # Not one that a stop made: an uninterrupted run does not have it, and would go back further.
        rollback_step = run.rollback_step if run.stopping or run.history.in_trouble else step
        snapshot.data["rollback_step"] = rollback_step
        # A copy of the state: when the save is committed, training may be steps ahead.
        self._saving = saving = Saving(url, is_best, TrainerState.from_dict(snapshot.trainer_state), rollback_step)
        add = self._own_files()
        if add is None and self._saver is not None:
            try:
                self._saver.start(root, snapshot, after_commit=lambda: self._rotate(root, saving))
                return
            except OutOfMemoryError as error:
                _log.warning("Training waits for the checkpoint of step %d: %s", step, error)
        try:
            group, keep = self._internals.world.save_group, trainer.args.save_total_limit
            save_checkpoint(root, snapshot, group, keep=keep, add=add)
        except StorageError as error:
            self._note_failure(run, error)
            return
        self._note_commit(run)
        self._rotate(root, saving)

    def _own_files(self) -> WriteFiles | None:
        """Writes the files of an overridden `save_model` or `_save`, and of state; None without an override."""
        own, trainer, save = self._internals.signatures.overridden, self._trainer, self._trainer.save_model
        saves_model = not own.isdisjoint(("save_model", "_save"))
        state = [getattr(trainer, name) for name in _STATE if name in own and not trainer.args.save_only_model]
        if not saves_model and not state:
            return None
        internal = {"_internal_call": True} if takes(save, "_internal_call") else {}

        def write(folder: Path) -> None:
            # Training continues with the random numbers that the snapshot has.
            with self._internals.evaluator.random_numbers_kept():
                self.is_adding_model = True
                try:
                    if saves_model:
                        save(str(folder), **internal)
                    for save_part in state:
                        save_part(str(folder))
                finally:
                    self.is_adding_model = False

        return write

    def _rotate(self, root: Store, saving: Saving) -> None:
        """Remove old checkpoints after a commit, in the thread that saved."""
        keep = self._trainer.args.save_total_limit
        if keep is None or self._internals.world.save_group.rank != 0:
            return
        best = saving.state.best_model_checkpoint
        protected = {best.rsplit("/", 1)[-1]} if best else set()
        protected |= set(self.occupied.names)
        protected |= self._internals.publisher.checkpoints_being_pushed
        if self._trainer.args.loss_spike_sigma is not None:
            protected.add(checkpoint_name(saving.rollback_step))
        newest = checkpoint_name(saving.state.global_step)
        try:
            rotate_checkpoints(root, keep=keep, protect=protected, just_written=newest)
        except StorageError as error:  # one checkpoint too many is not a reason to stop
            _log.warning("An old checkpoint could not be removed: %s", error)

    # -- what follows a save ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """With `save_async`: make the background saver of a training. Collective."""
        self.close()
        args, world = self._trainer.args, self._internals.world
        if args.save_async:
            self._saver = BackgroundSaver(
                world.comm, world.save_group, timeout_s=args.ddp_timeout, keep=args.save_total_limit
            )

    def observe(self) -> None:
        """At a step boundary: look after a background save that has ended on every rank. Collective."""
        if self._saver is not None and self._saver.has_ended():
            self.finish()

    def finish(self) -> None:
        """Wait for the background save under way, if any, and act on its outcome. Collective."""
        if self._saver is None or not self._saver.is_busy:
            return
        run = self._training_run()
        try:
            self._saver.finish()
        except StorageError as error:
            self._note_failure(run, error)
            return
        self._note_commit(run)
        control = self._trainer.control
        requested = control.should_save  # for the step that has just ended
        self.announce(self._saving.state)
        control = self._trainer.control
        control.should_save = control.should_save or requested

    def _note_commit(self, run: TrainingRun) -> None:
        saving = self._saving
        run.saved_step, run.save_error, run.failed_saves = saving.state.global_step, None, 0
        run.rollback_step = saving.rollback_step
        self._own.add(saving.url)
        if saving.best:
            self._trainer.state.best_model_checkpoint = saving.url
            run.kept_best = (saving.state.best_metric, saving.state.best_global_step)

    def _note_failure(self, run: TrainingRun, error: StorageError) -> None:
        """Log a failed save, and raise it after too many. A best model that was lost with it is not the best."""
        saving, state = self._saving, self._trainer.state
        run.save_error, run.failed_saves = error, run.failed_saves + 1
        if saving.best and state.best_global_step == saving.state.global_step:
            state.best_metric, state.best_global_step = run.kept_best
        limit = self._trainer.args.max_failed_saves
        # A stop raises the error itself, after its last attempt.
        too_many = run.failed_saves >= limit and not run.stopping
        # A lost lease is final: another process writes to the folder now.
        if too_many or isinstance(error, LeaseLostError):
            raise error
        _log.error(
            "The checkpoint of step %d could not be saved (%d in a row, training ends at %d); others are intact. %s",
            *(saving.state.global_step, run.failed_saves, limit, error),
        )

    def announce(self, state: TrainerState) -> None:
        """Fire `on_save` and push, once the newest save is committed; `state`: the state at its step."""
        trainer, run = self._trainer, self._training_run()
        trainer.control.should_save = False
        is_committed = run.save_error is None and (self._saver is None or not self._saver.is_busy)
        is_committed = is_committed and run.saved_step == state.global_step
        if not is_committed or run.announced_step == state.global_step:
            return
        run.announced_step = state.global_step
        self._internals.events.fire("on_save", state=state)
        if trainer.args.push_to_hub and not run.stopping:
            trainer._push_from_checkpoint(self.root().child(checkpoint_name(state.global_step)).url)

    # -- the end of training ------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Finish the save under way, and save this step after a failed one. Collective. Raises StorageError."""
        run = self._training_run()
        self.finish()
        if run.save_error is not None:
            self.save_now(run)

    def keep_best_alone(self) -> None:
        """After training, with `save_total_limit=1`: remove the newest checkpoint where another one is the best."""
        trainer, root = self._trainer, self.root()
        best = (trainer.state.best_model_checkpoint or "").rsplit("/", 1)[-1]
        newest = self.newest_committed()
        if trainer.args.save_total_limit != 1 or newest is None or self._internals.world.save_group.rank != 0:
            return
        spared = {best, *self.occupied.names, *self._internals.publisher.checkpoints_being_pushed}
        try:
            is_free = newest.url.rsplit("/", 1)[-1] not in spared and not is_kept(newest)
            if best and is_free and all(store.exists(COMMIT) for store in (newest, root.child(best))):
                withdraw_if_unread(newest)
        except StorageError as error:
            _log.warning("The newest checkpoint could not be removed: %s", error)

    def save_now(self, run: TrainingRun) -> None:
        """Save this step, and wait until it is committed. Collective. Raises StorageError when it cannot be."""
        trainer = self._trainer
        trainer._save_checkpoint(trainer.model_wrapped, run.trial)
        self.finish()
        self.announce(trainer.state)
        if run.save_error is not None:
            raise run.save_error

    def close(self) -> None:
        """However training ends: finish the save under way and log its outcome. Not collective."""
        saver = self._saver
        if saver is None:
            return
        if saver.is_busy:
            _log.warning("A checkpoint is still being written: waiting for it.")
            try:
                # Without agreement: this also runs while an error unwinds, when other ranks may be gone.
                url = saver.finish_without_agreement().url
                self._own.add(url)
                _log.warning("%s is committed.", url)
            except KeyboardInterrupt:
                _log.error("Interrupted while waiting: the checkpoint that is being written does not count.")
                raise
            except Exception as error:  # the reason why training ends is raised or logged elsewhere
                _log.error("The checkpoint was not committed; earlier ones are intact: %s", error)
        saver.close()
        self._saver = None
