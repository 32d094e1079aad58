"""`Rollbacks`: after a loss spike, train again from the checkpoint before it, without the samples in between.

::

    a step spikes (`spikes`)     -> every rank learns of it from the same numbers, which rank 0 gave to all
    back to a good checkpoint    -> the newest that was due before the spike. One that a stop made does not count,
                                    nor one among non-finite steps; without any, the start
    skip                         -> the samples of the steps from there to the spike are read and not trained on. Steps,
                                    schedule, logs, evaluations and saves go on, so every later step has its own samples
    again                        -> at most `max_loss_spikes` times; then the run fails

A rollback removes the checkpoints of the steps that it takes back, and writes nothing. A run that is killed before its
next save resumes from a checkpoint without the record, trains to the same spike, and goes back again: it ends bit for
bit like one that was not killed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer_lib.checkpoint.layout import parse_step
from trainer_lib.data.foreign import ForeignLoader
from trainer_lib.errors import LossSpikeError
from trainer_lib.outputs import TrainOutput
from trainer_lib.state import TrainerControl
from trainer_lib.trainer.micro_batch_search import Backup
from trainer_lib.trainer.run import TrainingRun
from trainer_lib.trainer.spikes import Spike, SpikeFound

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class Rollbacks:
    """Owns the record of the newest rollback until a training has taken it over.

    Attributes:
        began_at: URL of the checkpoint that the newest attempt continues; None at the start.
    """

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self._pending: list[Spike] = []
        self.began_at: str | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the training that begins now follows a rollback."""
        return bool(self._pending)

    def train(self, url: str | None, attempt: Callable[[str | None], TrainOutput]) -> TrainOutput:
        """Call `attempt(checkpoint's URL)` until no step spikes.

        Raises:
            LossSpikeError: more steps spiked than `max_loss_spikes` allows, or there is nothing to go back to.
        """
        trainer, internals, args = self._trainer, self._internals, self._trainer.args
        self._pending, self.began_at = [], url
        if args.loss_spike_sigma is None:
            return attempt(url)
        # A sharded model cannot take its first values back; its checkpoints hold all that it needs.
        backup = None if args.fsdp or args.deepspeed else Backup.of(trainer, internals)
        first_step: int | None = None
        with internals.engine.outside.first_values_kept():
            while True:
                try:
                    return attempt(self.began_at)
                except SpikeFound as error:
                    found = error.step, error.reason  # the error itself would keep the attempt's tensors alive
                internals.checkpoints.finish()  # a save under way may become the one to go back to
                run = internals.loop.current_run()
                first_step = run.first_step if first_step is None else first_step
                self.began_at = internals.restore.newest_good(run.rollback_step)
                after = _step_of(self.began_at)
                if self.began_at is None and self._starts_at_url(run, url, has_backup=backup is not None):
                    self.began_at, after = url, first_step
                elif self.began_at is None and backup is None:
                    raise _nothing_to_go_back_to(*found)
                self._record(run, after, *found)
                # A later resume would find those of the steps that are taken back, and not the one of this rollback.
                internals.checkpoints.withdraw(after=after, until=trainer.state.global_step)
                if after < first_step:
                    url, first_step = None, 0  # among them
                run.source.close()  # before the next attempt makes a source of the same loader
                if isinstance(run.source, ForeignLoader):
                    run.source.rewind()
                internals.micro_batches.release_attempt()
                if backup is None:
                    internals.events.use_control(TrainerControl())
                else:
                    backup.restore(trainer, internals)

    def _starts_at_url(self, run: TrainingRun, url: str | None, *, has_backup: bool) -> bool:
        """Whether a rollback without a checkpoint of its own goes to the one that the user resumed from."""
        if url is None or run.rollback_step > 0:
            return url is not None
        # A stop made it before the first save: a run that was not stopped goes back to its start.
        if not has_backup and self._trainer.is_world_process_zero():
            _log.warning(
                "No checkpoint was due before the spike: training goes back to %s, which a stop made. "
                "A sharded model that was not stopped has nothing to go back to, and fails here.",
                url,
            )
        return not has_backup

    def _record(self, run: TrainingRun, after: int, step: int, reason: str) -> None:
        limit = self._trainer.args.max_loss_spikes
        known = [each for each in run.spikes if each.after <= after]
        if len(known) >= limit:
            raise LossSpikeError(
                f"The loss spiked at step {step} ({reason}), after {len(known)} rollbacks in this training.",
                field="max_loss_spikes",
                value=limit,
                step=step,
                remedy="Lower learning_rate, clip gradients, check the data, or allow more rollbacks.",
            )
        # Records up to the checkpoint are in it.
        self._pending = [*(each for each in known if each.after == after), Spike(after, step, reason)]
        if self._trainer.is_world_process_zero():
            _log.warning(
                "The loss spiked at step %d (%s): training goes back to step %d and skips the samples of steps %d to "
                "%d (rollback %d of %d).",
                *(step, reason, after, after + 1, step, len(known) + 1, limit),
            )

    def apply(self, run: TrainingRun, step: int) -> None:
        """Give a training that begins after `step` the record of the rollback that led there."""
        run.spikes += [each for each in self._pending if each.after == step]
        run.skip_until = max((each.step for each in run.spikes), default=0)
        self._pending = []


def _step_of(url: str | None) -> int:
    return 0 if url is None else parse_step(url.rpartition("/")[2]) or 0


def _nothing_to_go_back_to(step: int, reason: str) -> LossSpikeError:
    return LossSpikeError(
        f"The loss spiked at step {step} ({reason}), and no checkpoint was due before.",
        field="loss_spike_sigma",
        step=step,
        remedy="Save earlier (save_steps): a sharded model can only go back to a checkpoint.",
    )
