"""`auto_find_batch_size`: when memory runs out, train with half the micro-batch; the global batch stays as it is.

::

    a step runs out of memory on some rank   -> every rank learns of it before anybody waits for a gradient
    halve the micro-batch                    -> more micro-batches per step, uneven ones where it does not divide;
                                                losses and gradients keep their exact weights
    put back the newest checkpoint of this training, else the state before it, and train on from there

What comes out is what a run with the smaller micro-batch gives, bit for bit. With several processes every micro-batch
keeps its gradients local and they are exchanged once per step, after all ranks have said that memory sufficed.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainer_lib.checkpoint.layout import checkpoint_name
from trainer_lib.checkpoint.rng import capture_rng, restore_rng
from trainer_lib.data.iterable import ForeignLoader
from trainer_lib.distributed import Communicator
from trainer_lib.errors import OutOfMemoryError, first_line, is_out_of_memory
from trainer_lib.state import ExportableState, TrainerControl, TrainOutput
from trainer_lib.trainer.data import DataMixin
from trainer_lib.trainer.preparing import PreparingMixin
from trainer_lib.trainer.saving import SavingMixin

if TYPE_CHECKING:
    from trainer_lib.trainer.base import TrainerBase

_log = logging.getLogger(__name__)
T = TypeVar("T")


class MemoryRanOut(Exception):  # control flow inside the Trainer; never leaves it
    """A step needed more memory than there is; the same on every rank."""


def within_memory(comm: Communicator, work: Callable[[], T]) -> T:
    """`work()`; MemoryRanOut on every rank when memory ran out on one. Collective."""
    said, result = "", None
    try:
        result = work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = first_line(error)
    if comm.any(bool(said)):
        raise MemoryRanOut(said or "it ran out on another process")
    return result  # type: ignore[return-value]


@dataclass
class _Before:
    """What training changes, as it was before: put back when training starts again."""

    tensors: dict[str, torch.Tensor]
    rng: dict[str, Any]
    given: list[tuple[Any, dict[str, Any]]]  # the user's optimizer, schedule and stateful dataset, with their states
    callbacks: list[tuple[ExportableState, dict[str, Any]]]

    @classmethod
    def of(cls, trainer: TrainerBase) -> _Before:
        # With model_init the weights are made anew from the seed: no copy is needed.
        tensors = {} if trainer.model_init is not None else _tensors(trainer.model)
        stateful = [*trainer._given_optimizers, trainer.train_dataset]
        given = [one for one in stateful if one is not None and callable(getattr(one, "load_state_dict", None))]
        return cls(
            tensors={name: value.detach().to("cpu", copy=True) for name, value in tensors.items()},
            rng=capture_rng(),
            given=[(one, copy.deepcopy(one.state_dict())) for one in given],
            callbacks=[(one, copy.deepcopy(one.state())) for one in trainer._stateful_callbacks()],
        )

    def put_back(self, trainer: TrainerBase) -> None:
        present = _tensors(trainer.model) if self.tensors else {}
        with torch.no_grad():
            for name, value in self.tensors.items():
                present[name].copy_(value)
        for one, state in self.given:
            one.load_state_dict(copy.deepcopy(state))
        for callback, state in self.callbacks:
            for name, value in copy.deepcopy(state.get("attributes", {})).items():
                setattr(callback, name, value)
        trainer.control = TrainerControl()
        restore_rng(self.rng)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers: those that a state_dict leaves out change in training too."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class AutoBatchMixin(DataMixin, PreparingMixin, SavingMixin):
    """Training that starts again with less."""

    def _train_within_memory(self, url: str | None, train: Callable[[str | None], TrainOutput]) -> TrainOutput:
        """`train(checkpoint's URL)`, again and again until memory suffices.

        Raises OutOfMemoryError when it does not at a micro-batch of one sample.
        """
        if not self.args.auto_find_batch_size:
            return train(url)
        before = _Before.of(self)
        while True:
            try:
                return train(url)
            except MemoryRanOut as error:
                reason = str(error)
            self._finish_save()
            self._halve(reason)
            url = self._own_newest() or url
            self._let_go()
            before.put_back(self)

    def _halve(self, reason: str) -> None:
        run = self._training_run()
        size, step = self._effective_micro_batch(), self.state.global_step + 1
        if isinstance(run.source, ForeignLoader):
            raise OutOfMemoryError(
                f"Memory ran out in step {step}, and the batches are those of a loader of your own: {reason}",
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
        self._memory_allows = size // 2
        message = "Memory ran out in step %d with micro-batches of %d: training goes on with %d (global batch %d): %s"
        global_batch = self.get_total_train_batch_size(self.args)
        _log.warning(message, step, size, self._memory_allows, global_batch, reason)

    def _effective_micro_batch(self) -> int:
        share = -(-self.get_total_train_batch_size(self.args) // self.comm.world_size)
        return min(self._train_batch_size, share)

    def _own_newest(self) -> str | None:
        """The newest checkpoint that this training has committed, if it can be resumed."""
        run = self._training_run()
        if run.saved_step <= run.first_step or self.args.save_only_model:
            return None
        return self._checkpoint_root().child(checkpoint_name(run.saved_step)).url

    def _let_go(self) -> None:
        """Give back what the attempt held before the next one needs it."""
        self._run = None
        self.model_wrapped = self.model
        self.model.zero_grad(set_to_none=True)
        self._reset_optimizer()
        handler = self.callback_handler
        handler.optimizer, handler.lr_scheduler, handler.train_dataloader = self.optimizer, self.lr_scheduler, None
        self.current_flos = 0.0
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _adopt_batch_size(self, saved: Any) -> None:
        """Take up the micro-batch that an earlier attempt found: it need not run out of memory again."""
        if self.args.auto_find_batch_size and isinstance(saved, int) and 0 < saved < self._train_batch_size:
            self._memory_allows = saved
