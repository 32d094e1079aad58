"""One `train()` may take several attempts: memory runs out, or the loss spikes. `TrainingLoop.train` loops over them.

::

    a step runs out of memory    -> every rank learns of it before any rank waits for a gradient
    halve the micro-batch        -> more micro-batches per step, the same global batch; losses and gradients keep their
                                    exact weights. Back to this training's newest checkpoint, or to the state before it

    a step spikes (`history`)    -> every rank learns of it from the same numbers, which rank 0 gave to all
    back to a good checkpoint    -> the newest that was due before the spike. One that a stop made does not count,
                                    nor one among non-finite steps; without any, the start
    skip                         -> the samples of the steps from there to the spike are read and not trained on. Steps,
                                    schedule, logs, evaluations and saves go on, so every later step has its own samples
    again                        -> at most `max_loss_spikes` times; then the run fails

Micro-batches are halved with `auto_find_batch_size`, and in a process alone whose micro-batch follows from
`global_batch_size`. The result is that of a run with the smaller micro-batch, bit for bit. With several processes,
micro-batches keep their gradients local; they are exchanged once per step, after all ranks reported enough memory.

A rollback removes the checkpoints of the steps that it takes back, and writes nothing. A run that is killed before its
next save resumes from a checkpoint without the record, trains to the same spike, and goes back again: it ends bit for
bit like one that was not killed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainer_lib.arguments.configs.accelerator_config import follows_global_batch
from trainer_lib.base.memory import empty_device_cache
from trainer_lib.checkpoint.layout import parse_step
from trainer_lib.checkpoint.optimizer import restore_optimizer, snapshot_optimizer
from trainer_lib.checkpoint.values import capture_rng, restore_rng
from trainer_lib.data.loading.foreign import ForeignLoader
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import LossSpikeError, OutOfMemoryError, first_line, is_out_of_memory
from trainer_lib.state import TrainerControl
from trainer_lib.trainer.history import Spike, SpikeFound

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.run import TrainingRun
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)
T = TypeVar("T")


class MemoryRanOut(Exception):  # control flow inside the Trainer; never leaves it
    """A step needed more memory than there is; raised on every rank."""


def call_within_memory(comm: Communicator, work: Callable[[], T]) -> T:
    """Return `work()`; raise MemoryRanOut on every rank when memory ran out on one. Collective."""
    reason, result = "", None
    try:
        result = work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    # A rank that still had memory must not wait in the next collective for one that had none.
    if comm.any(bool(reason)):
        raise MemoryRanOut(reason or "it ran out on another process")
    return result  # type: ignore[return-value]


class Attempts:
    """Chooses where the next attempt begins, and puts back what the failed one changed."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self.spikes: list[Spike] = []  # the record of the newest rollback, until a training takes it over
        self._resumed: str | None = None
        self._first_step: int | None = None
        self._backup: Backup | None = None
        self._keeps_start = True
        self.allowed: int | None = None  # the micro-batch that memory allows; None = that of the arguments
        self.url: str | None = None  # the checkpoint that the next attempt continues; None = the start
        self.halves = False  # short memory halves the micro-batch; of several processes, which exchange more, if asked

    def adopt_limit(self, saved: Any) -> None:
        """Use the micro-batch that a checkpoint records, when it is smaller: memory need not run out again."""
        trainer = self._trainer
        may_change = trainer.args.auto_find_batch_size or follows_global_batch(trainer.args)
        if may_change and isinstance(saved, int) and 0 < saved < trainer._train_batch_size:
            self.allowed = saved

    @contextlib.contextmanager
    def begin(self, url: str | None) -> Iterator[None]:
        """Inside, attempts begin at `self.url`, and `recover` prepares the next one."""
        args, engine = self._trainer.args, self._internals.engine
        self.url = self._resumed = url
        self.spikes, self._first_step = [], None
        alone = self._internals.world.comm.world_size == 1
        self.halves = args.auto_find_batch_size or (follows_global_batch(args) and alone)
        if not self.halves and args.loss_spike_sigma is None:
            yield
            return
        # After a spike, a sharded model cannot take its first values back; its checkpoints hold all that it needs.
        self._keeps_start = not (args.fsdp or args.deepspeed)
        if self.halves or self._keeps_start:
            self._backup = Backup(self._trainer, self._internals)
        with engine.outside.first_values_kept():
            try:
                yield
            finally:
                self._backup = None

    def recover(self, error: MemoryRanOut | SpikeFound) -> None:
        """Choose where the next attempt begins, and put the state before the first one back. Collective.

        Raises OutOfMemoryError or LossSpikeError where no attempt is left, or nothing to go back to.
        """
        internals = self._internals
        internals.checkpoints.finish()  # a save under way may become the one to continue from
        run, backup = internals.loop.current_run(), self._backup
        if isinstance(error, SpikeFound):
            self._go_back(run, error)
            backup = backup if self._keeps_start else None
        else:
            self._halve(run, str(error))
            has_saved = run.saved_step > run.first_step and not self._trainer.args.save_only_model
            newest = internals.checkpoints.newest_committed() if has_saved else None
            self.url = self._resumed = self.url if newest is None else newest.url
            self.spikes, self._first_step = [], None
        run.source.close()  # before the next attempt makes a source of the same loader
        if isinstance(run.source, ForeignLoader):
            run.source.rewind()
        # What the attempt holds is freed before the next one needs the memory.
        trainer = self._trainer
        internals.loop.drop_run()
        internals.engine.use_wrapped(trainer.model)  # a wrapper holds buckets of gradients
        trainer.model.zero_grad(set_to_none=True)
        internals.engine.reset()
        internals.events.show_parts()
        trainer.callback_handler.train_dataloader = None
        internals.counters.reset_flos()
        gc.collect()  # reference cycles hold tensors, and only free memory can be returned to the device
        empty_device_cache(internals.world.device)
        if backup is None:
            internals.events.use_control(TrainerControl())
        else:
            backup.restore(trainer, internals)

    def _halve(self, run: TrainingRun, reason: str) -> None:
        trainer, step = self._trainer, self._trainer.state.global_step + 1
        global_batch = trainer.get_total_train_batch_size(trainer.args)
        # With a small global batch, the micro-batches were smaller than the arguments allow.
        size = min(trainer._train_batch_size, -(-global_batch // self._internals.world.comm.data_parallel.size))
        if isinstance(run.source, ForeignLoader):
            what = f"Memory ran out in step {step}, and the batches come from a loader of your own: {reason}"
            remedy = "Make its batches smaller, and raise gradient_accumulation_steps."
            raise OutOfMemoryError(what, field="auto_find_batch_size", value=True, step=step, remedy=remedy)
        if size == 1:
            what = f"Memory ran out in step {step} with a single sample: {reason}"
            remedy = "Use gradient_checkpointing, bf16 or shorter samples, or shard the model."
            raise OutOfMemoryError(what, field="per_device_train_batch_size", value=size, step=step, remedy=remedy)
        self.allowed = size // 2
        _log.warning(
            "Memory ran out in step %d with micro-batches of %d: training continues with %d (global batch %d): %s",
            *(step, size, self.allowed, global_batch, reason),
        )

    def apply_rollback(self, run: TrainingRun, step: int) -> None:
        """Give a training that begins after `step` the record of the rollback that led there."""
        run.spikes += [spike for spike in self.spikes if spike.after == step]
        run.skip_until = max((spike.step for spike in run.spikes), default=0)
        self.spikes = []

    def _go_back(self, run: TrainingRun, spike: SpikeFound) -> None:
        internals = self._internals
        first_step = run.first_step if self._first_step is None else self._first_step
        url = internals.restore.newest_good(run.rollback_step)
        after = 0 if url is None else parse_step(url.rpartition("/")[2]) or 0
        if url is None and self._starts_at_resumed(run):
            url, after = self._resumed, first_step
        elif url is None and not self._keeps_start:
            what = f"The loss spiked at step {spike.step} ({spike.reason}), and no checkpoint was due before."
            remedy = "Save earlier (save_steps): a sharded model can only go back to a checkpoint."
            raise LossSpikeError(what, field="loss_spike_sigma", step=spike.step, remedy=remedy)
        self._record(run, Spike(after, spike.step, spike.reason))
        # A later resume would find those of the steps that are taken back, and not the one of this rollback.
        internals.checkpoints.withdraw(after=after, until=self._trainer.state.global_step)
        if after < first_step:
            self._resumed, first_step = None, 0  # among them
        self.url, self._first_step = url, first_step

    def _starts_at_resumed(self, run: TrainingRun) -> bool:
        """Whether a rollback without a checkpoint to return to goes to the one that the user resumed from."""
        if self._resumed is None or run.rollback_step > 0:
            return self._resumed is not None
        # A stop made it before the first save: a run that was not stopped goes back to its start.
        if not self._keeps_start and self._trainer.is_world_process_zero():
            _log.warning(
                "No checkpoint was due before the spike: training goes back to %s, which a stop made. "
                "A sharded model that was not stopped has nothing to go back to, and fails here.",
                self._resumed,
            )
        return not self._keeps_start

    def _record(self, run: TrainingRun, spike: Spike) -> None:
        limit = self._trainer.args.max_loss_spikes
        known = [earlier for earlier in run.spikes if earlier.after <= spike.after]
        if len(known) >= limit:
            what = (
                f"The loss spiked at step {spike.step} ({spike.reason}), after {len(known)} rollbacks in this training."
            )
            remedy = "Lower learning_rate, clip gradients, check the data, or allow more rollbacks."
            raise LossSpikeError(what, field="max_loss_spikes", value=limit, step=spike.step, remedy=remedy)
        # Records up to the checkpoint are in it.
        self.spikes = [*(earlier for earlier in known if earlier.after == spike.after), spike]
        if self._trainer.is_world_process_zero():
            _log.warning(
                "The loss spiked at step %d (%s): training goes back to step %d and skips the samples of steps %d to "
                "%d (rollback %d of %d).",
                *(spike.step, spike.reason, spike.after, spike.after + 1, spike.step, len(known) + 1, limit),
            )


class Backup:
    """State that training changes, before the first attempt; `OutsideParameters` keeps parameters of others."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        engine = internals.engine
        # Parameters and buffers on the CPU; none with `model_init`, which builds the weights again.
        tensors = {} if trainer.model_init is not None else _named_tensors(trainer.model)
        self._tensors = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
        self._rng = capture_rng()
        optimizer, schedule = engine.given_optimizers
        taken = None if optimizer is None else copy.deepcopy(snapshot_optimizer(optimizer, _numbered(optimizer)))
        self._optimizer = optimizer, taken
        # The user's own schedule and stateful dataset, and the loss scaler.
        stateful = [schedule, trainer.train_dataset, engine.precision.scaler]
        given = [part for part in stateful if part is not None and callable(getattr(part, "load_state_dict", None))]
        self._given = [(part, copy.deepcopy(part.state_dict())) for part in given]
        self._callbacks = [(callback, copy.deepcopy(callback.state())) for callback in internals.events.stateful()]

    def restore(self, trainer: Trainer, internals: Internals) -> None:
        """Put everything back, for another attempt."""
        present = _named_tensors(trainer.model) if self._tensors else {}
        with torch.no_grad():
            for name, value in self._tensors.items():
                present[name].copy_(value)
        internals.engine.outside.put_back()
        optimizer, snapshot = self._optimizer
        if optimizer is not None and snapshot is not None:
            restore_optimizer(optimizer, _numbered(optimizer), snapshot)
        # Copies: a third attempt needs the same states again.
        for part, state in self._given:
            part.load_state_dict(copy.deepcopy(state))
        for callback, state in self._callbacks:
            for name, value in copy.deepcopy(state.get("attributes", {})).items():
                setattr(callback, name, value)
        internals.events.use_control(TrainerControl())
        restore_rng(self._rng)


def _numbered(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [(str(number), param) for number, param in enumerate(params)]


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers: training also changes those buffers that a state_dict leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
