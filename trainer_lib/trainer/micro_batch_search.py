"""When memory runs out, train with half the micro-batch and the same global batch.

With `auto_find_batch_size`, and in a process alone whose micro-batch follows from `global_batch_size`.

::

    a step runs out of memory on some rank   -> every rank learns of it before any rank waits for a gradient
    halve the micro-batch                    -> more micro-batches per step, uneven ones where it does not divide;
                                                losses and gradients keep their exact weights
    restore the newest checkpoint of this training, or the state before it, and continue from there

The result is that of a run with the smaller micro-batch, bit for bit. With several processes, every micro-batch keeps
its gradients local; they are exchanged once per step, after all ranks reported that memory sufficed.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainer_lib.arguments.global_batch import follows_global_batch
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot, restore_optimizer, snapshot_optimizer
from trainer_lib.checkpoint.rng import capture_rng, restore_rng
from trainer_lib.data.foreign import ForeignLoader
from trainer_lib.distributed import Communicator
from trainer_lib.errors import OutOfMemoryError, first_line, is_out_of_memory
from trainer_lib.memory import empty_device_cache
from trainer_lib.outputs import TrainOutput
from trainer_lib.state import ExportableState, TrainerControl

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
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


class MicroBatchSearch:
    """Owns the micro-batch that memory allows, and restarts training with half of it when memory runs out.

    Attributes:
        is_on: whether a step of the present training is tried again when memory runs out. Several processes exchange
            more for it: only if asked.
    """

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self._allowed: int | None = None
        self.is_on = False

    def forget(self) -> None:
        """Start again with the micro-batch of the arguments: they have changed."""
        self._allowed = None

    def limit(self, batch_size: int) -> int:
        """The micro-batch in samples: `batch_size`, or fewer where memory was short."""
        return min(batch_size, self._allowed or batch_size)

    def adopt(self, saved: Any) -> None:
        """Use the micro-batch that a checkpoint records, when it is smaller: memory need not run out again."""
        trainer = self._trainer
        may_change = trainer.args.auto_find_batch_size or follows_global_batch(trainer.args)
        if may_change and isinstance(saved, int) and 0 < saved < trainer._train_batch_size:
            self._allowed = saved

    def train(self, url: str | None, attempt: Callable[[str | None], TrainOutput]) -> TrainOutput:
        """Call `attempt(checkpoint's URL)` with ever smaller micro-batches until memory suffices.

        Raises:
            OutOfMemoryError: memory does not suffice for a micro-batch of one sample.
        """
        trainer, args = self._trainer, self._trainer.args
        alone = self._internals.world.comm.world_size == 1
        self.is_on = args.auto_find_batch_size or (follows_global_batch(args) and alone)
        if not self.is_on:
            return attempt(url)
        backup = Backup.of(trainer, self._internals)
        with self._internals.engine.outside.first_values_kept():
            while True:
                try:
                    return attempt(url)
                except MemoryRanOut as error:
                    reason = str(error)  # the error itself would keep the attempt's tensors alive
                self._internals.checkpoints.finish()  # a save under way may become the one to continue from
                self._halve(reason)
                url = self._newest_checkpoint() or self._internals.rollbacks.began_at
                self.release_attempt()
                backup.restore(trainer, self._internals)

    def _halve(self, reason: str) -> None:
        run = self._internals.run
        trainer, step = self._trainer, self._trainer.state.global_step + 1
        global_batch = trainer.get_total_train_batch_size(trainer.args)
        # With a small global batch, the micro-batches were smaller than the arguments allow.
        size = min(trainer._train_batch_size, -(-global_batch // self._internals.world.comm.data_parallel.size))
        if run is not None and isinstance(run.source, ForeignLoader):
            raise OutOfMemoryError(
                f"Memory ran out in step {step}, and the batches come from a loader of your own: {reason}",
                field="auto_find_batch_size",
                value=True,
                step=step,
                remedy="Make its batches smaller, and raise gradient_accumulation_steps.",
            )
        if size == 1:
            raise OutOfMemoryError(
                f"Memory ran out in step {step} with a single sample: {reason}",
                field="per_device_train_batch_size",
                value=size,
                step=step,
                remedy="Use gradient_checkpointing, bf16 or shorter samples, or shard the model.",
            )
        self._allowed = size // 2
        _log.warning(
            "Memory ran out in step %d with micro-batches of %d: training continues with %d (global batch %d): %s",
            *(step, size, self._allowed, global_batch, reason),
        )

    def _newest_checkpoint(self) -> str | None:
        """URL of the newest checkpoint that this training committed; None when there is none to resume from."""
        run = self._internals.run
        if run is None or run.saved_step <= run.first_step or self._trainer.args.save_only_model:
            return None
        newest = self._internals.checkpoints.newest_committed()
        return None if newest is None else newest.url

    def release_attempt(self) -> None:
        """Free what an attempt holds, before the next one needs the memory."""
        trainer, internals = self._trainer, self._internals
        internals.loop.drop_run()
        internals.engine.use_wrapped(trainer.model)  # a wrapper holds buckets of gradients
        trainer.model.zero_grad(set_to_none=True)
        internals.engine.reset()
        internals.events.show_parts()
        trainer.callback_handler.train_dataloader = None
        internals.counters.reset_flos()
        gc.collect()  # reference cycles hold tensors, and only free memory can be returned to the device
        empty_device_cache(internals.world.device)


@dataclass
class Backup:
    """What training changes, as it was before the first attempt; `OutsideParameters` keeps what is not the model's.

    Attributes:
        tensors: parameters and buffers by name, on the CPU; empty with `model_init`, which builds the weights again.
        rng: states of the random number generators.
        optimizer: the user's own, with its state by the number of the parameter.
        given: the user's own schedule and stateful dataset, and the loss scaler, with their states.
        callbacks: stateful callbacks, with their states.
    """

    tensors: dict[str, torch.Tensor]
    rng: dict[str, Any]
    optimizer: tuple[torch.optim.Optimizer, OptimizerSnapshot] | None
    given: list[tuple[Any, dict[str, Any]]]
    callbacks: list[tuple[ExportableState, dict[str, Any]]]

    @classmethod
    def of(cls, trainer: Trainer, internals: Internals) -> Backup:
        """Copy it, before the first attempt."""
        tensors = {} if trainer.model_init is not None else _named_tensors(trainer.model)
        engine = internals.engine
        optimizer, schedule = engine.given_optimizers
        stateful = [schedule, trainer.train_dataset, engine.precision.scaler]
        given = [one for one in stateful if one is not None and callable(getattr(one, "load_state_dict", None))]
        return cls(
            tensors={name: value.detach().to("cpu", copy=True) for name, value in tensors.items()},
            rng=capture_rng(),
            optimizer=None if optimizer is None else (optimizer, _copy_state(optimizer)),
            given=[(one, copy.deepcopy(one.state_dict())) for one in given],
            callbacks=[(one, copy.deepcopy(one.state())) for one in internals.events.stateful()],
        )

    def restore(self, trainer: Trainer, internals: Internals) -> None:
        """Put everything back, for another attempt."""
        present = _named_tensors(trainer.model) if self.tensors else {}
        with torch.no_grad():
            for name, value in self.tensors.items():
                present[name].copy_(value)
        internals.engine.outside.put_back()
        if self.optimizer is not None:
            optimizer, snapshot = self.optimizer
            restore_optimizer(optimizer, _numbered(optimizer), snapshot)
        # Copies: a third attempt needs the same states again.
        for one, state in self.given:
            one.load_state_dict(copy.deepcopy(state))
        for callback, state in self.callbacks:
            for name, value in copy.deepcopy(state.get("attributes", {})).items():
                setattr(callback, name, value)
        internals.events.use_control(TrainerControl())
        restore_rng(self.rng)


def _copy_state(optimizer: torch.optim.Optimizer) -> OptimizerSnapshot:
    return copy.deepcopy(snapshot_optimizer(optimizer, _numbered(optimizer)))


def _numbered(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [(str(number), param) for number, param in enumerate(params)]


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers: training also changes those buffers that a state_dict leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
