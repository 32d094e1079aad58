"""Weights of micro-batches, so that a step has the exact mean over all target items of its global batch.

What is wanted
    A target item is what a loss averages over: a token with a label, or a sample. Let the global batch of a step have
    N items, let rank r of R (the data-parallel processes) compute its micro-batches m = 1, 2, …, and let micro-batch
    (r, m) hold n(r, m) items with the mean loss l(r, m). The objective is the mean over all items:

        L = 1/N · Σ_r Σ_m n(r, m) · l(r, m),        N = Σ_r Σ_m n(r, m)

    Taking the mean over micro-batches and ranks instead, as the usual division by `gradient_accumulation_steps` does,
    gives L only if all n(r, m) are equal. Padded text never has equal counts.

What is computed
    The backward of micro-batch (r, m) gets the gradient w(r, m) with respect to its loss, and adds
    w(r, m) · ∇l(r, m) to the gradients of rank r. The strategy then averages over the R ranks:

        g = 1/R · Σ_r Σ_m w(r, m) · ∇l(r, m)

    g = ∇L  if and only if  w(r, m) = R · n(r, m) / N.  That is `StepWeights.weight`:

    - A loss that is a mean over its own items (most models and overrides) weighs R · n / N.
    - A loss that was divided by N already (`num_items_in_batch` was used) is n · l / N, so it weighs R.
    - If N counts the items of this rank alone (`average_tokens_across_devices` is off), each rank has its own mean
      and R drops out: the weights are n / N and 1.
    - A loss that its author scaled for the step (`loss_scale`) is a part of the rank's own objective, and weighs 1.
    - A loss whose author declared it a mean over its micro-batch, all of which count alike, weighs 1/M of a step's M.
    - Such a mean that its author divided by M weighs 1. Where a rank has a dummy batch, B < R · M micro-batches have
      samples, and it weighs R · M / B.
    - A dummy batch, which a rank computes because the others wait for it, has no items and weighs 0.
    - A micro-batch without targets has no mean loss (0/0 = NaN, and 0 · NaN = NaN). Where no other rank waits it is
      skipped; else the rank computes a micro-batch with targets in its place, at weight 0. If no micro-batch of a
      step has targets, or N is not known, no weight can follow from them: each weighs 1/M. If the loss of such a step
      is not finite, the step is not taken.

    Summed over micro-batches and averaged over ranks, w · l is L itself, which is what is logged. None of this needs
    the host to wait for the device: n and N are counted on the host, before the batches go to the device.

How it is known whether a loss was divided by N
    Many signatures take `num_items_in_batch`, and half of them ignore it. `CountedItems` is a tensor that notes
    whether a computation used it, so overrides, models and loss functions need not declare anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch

from trainer_lib.data.loading.loader import TrainSource


class LossScale(Enum):
    """The meaning of a micro-batch's loss."""

    MEAN = "mean"  # over its own target items
    SHARE = "share"  # a sum over its target items, divided by those of the global batch
    STEP = "step"  # scaled for the step by its author, and used as it is
    BATCH = "batch"  # a mean over its micro-batch; all micro-batches of the step count alike
    PART = "part"  # such a mean, divided by the number of micro-batches of the step by its author


def plain_items(count: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The count as a tensor ``[]``, made on the device: a copy from the host would make the host wait."""
    if isinstance(count, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return count.as_subclass(torch.Tensor).to(device)
    return torch.full((), count, device=device)


class CountedItems(torch.Tensor):
    """`num_items_in_batch` as losses get it: a 0-dim tensor that notes whether a computation used it.

    A loss that divided by it is a share of the global batch's mean; a loss that ignored it is a mean over its own
    micro-batch and still has to be weighted. Both are common behind one signature, in overrides and in models: nearly
    half of the model classes of transformers 5 take it among their ``**kwargs`` and ignore it. Reading its device or
    dtype is not a use, and neither is a copy, which shares the note.
    """

    _note: list[bool]

    @classmethod
    def of(cls, count: int | torch.Tensor, device: torch.device) -> CountedItems:
        """A new, unused count ``[]`` on the device."""
        return _counted(plain_items(count, device), [])

    @property
    def used(self) -> bool:
        """Whether it, or a copy of it, went into a computation."""
        return bool(self._note)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the use, and compute with plain tensors."""
        notes: list[list[bool]] = []
        plain = [_plain(argument, notes) for argument in args]
        named = {name: _plain(argument, notes) for name, argument in (kwargs or {}).items()}
        result = func(*plain, **named)
        name = getattr(func, "__name__", "")
        if name in _LOOKING:
            return result
        if name in _COPYING and len(notes) == 1 and isinstance(result, torch.Tensor):
            return _counted(result, notes[0])
        for note in notes:
            note.append(True)
        return result


# What code reads to place or cast its own tensors; a loss that divides does more.
_LOOKING = {"__get__", "is_floating_point", "is_complex", "size", "dim", "ndimension", "numel", "stride", "get_device"}
# `clamp` is here because a guard against a count of 0 is not a division yet.
_COPYING = {
    *("to", "type", "type_as", "float", "double", "int", "long", "half", "bfloat16", "cpu", "cuda", "detach", "clone"),
    *("contiguous", "clamp", "clamp_min", "view", "reshape", "unsqueeze", "squeeze", "expand", "requires_grad_"),
}


def _counted(plain: torch.Tensor, note: list[bool]) -> CountedItems:
    items = plain.as_subclass(CountedItems)
    items._note = note  # one list for all copies: a use of any copy shows on the count itself
    return items


def _plain(argument: Any, notes: list[list[bool]]) -> Any:
    if isinstance(argument, CountedItems):
        with torch._C.DisableTorchFunctionSubclass():
            notes.append(argument._note)
            return argument.as_subclass(torch.Tensor)
    return argument


class MicroBatches:
    """This rank's micro-batches of an epoch as plain batches.

    `drawn`: the batches of the step under way, with their samples: 0 for a dummy, None for unknown.
    """

    def __init__(self, source: TrainSource, epoch: int, start_step: int) -> None:
        self._micros = source.micros(epoch, start_step)
        self.drawn: list[tuple[Any, int | None]] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        micro = next(self._micros)
        self.drawn.append((micro.batch, micro.samples if micro.real else 0))
        return micro.batch

    def samples_of(self, batches: list[Any]) -> list[int | None]:
        """Samples of each of a step's batches: 0 for a dummy, None for unknown.

        An override may draw more batches than it computes, or compute pieces of what it drew.
        """
        drawn = self.drawn
        if len(drawn) == len(batches):
            return [samples for _, samples in drawn]
        known = {id(batch): samples for batch, samples in drawn}
        if len(batches) < len(drawn) and not any(id(batch) in known for batch in batches):
            return [samples for _, samples in drawn[len(drawn) - len(batches) :]]  # changed copies of the newest
        unknown = 0 if drawn and all(samples == 0 for _, samples in drawn) else None  # a piece of a dummy is a dummy
        return [known.get(id(batch), unknown) for batch in batches]


class StepWeights:
    """The target items of the step under way, and the weight of each of its micro-batches on this rank.

    Args:
        data_parallel_size: R.
        over_ranks: N counts the items of all ranks.
        by_targets: a micro-batch without targets has no loss; False where the author scales the loss.
    """

    def __init__(self, *, data_parallel_size: int, over_ranks: bool, by_targets: bool = True) -> None:
        self._scale = float(data_parallel_size) if over_ranks else 1.0
        self._by_targets = by_targets
        self._counts_all = over_ranks or data_parallel_size == 1
        self.batches: MicroBatches | None = None  # those of the epoch, which tell dummies apart
        self.items: list[int] = []  # target items of each micro-batch, n(r, m); 0 for a dummy batch
        self.samples: list[int | None] = []  # of each micro-batch; 0 for a dummy batch, None for unknown
        self.num_items: Any = None  # target items of the step, N
        self.micro_step = 0  # the micro-batch under way, counted within the step
        self.micro_steps = 1  # of the step
        self.computing = False  # a micro-batch is under way
        self.all_batches: int | None = None  # with items, over all ranks; None when they were not counted
        self.has_targets = True  # the step, on any rank; True where not every rank knows it
        self.empty_batches = 0  # micro-batches of this rank with samples and without targets

    def count(self, batches: list[Any], count_items: Callable[[Any, int | None], int]) -> int:
        """Count the target items of a step's micro-batches, as the source gave them; their sum on this rank.

        `count_items`: (batch, samples that the collator was given) -> target items.
        """
        self.all_batches = None
        known: list[int | None] = [None] * len(batches)
        self.samples = known if self.batches is None else self.batches.samples_of(batches)
        pairs = zip(batches, self.samples, strict=True)
        items = self.items = [0 if samples == 0 else count_items(batch, samples) for batch, samples in pairs]
        if not self._by_targets:  # such a loss may have a value without targets
            self.items = [
                1 if number == 0 and samples != 0 else number
                for number, samples in zip(items, self.samples, strict=True)
            ]
        return sum(items)

    def note_targets(self) -> None:
        """Set `has_targets` and `empty_batches` of the step, whose items are counted."""
        self.has_targets = not (self._counts_all and type(self.num_items) is int and self.num_items == 0)
        self.empty_batches = 0
        if not all(self.items):
            counts = zip(self.items, self.samples, strict=False)
            self.empty_batches = sum(items == 0 and samples != 0 for items, samples in counts)

    def weight(self, scale: LossScale) -> float:
        """w(r, m) of the micro-batch under way."""
        place = self.micro_step
        items = self.items[place] if place < len(self.items) else 1
        if items == 0 and (self.num_items or self.samples[place] == 0):
            return 0.0  # a substitute, or a dummy
        if scale is LossScale.SHARE:
            return self._scale
        if scale is LossScale.STEP:
            return 1.0
        if scale is LossScale.PART:
            return self._scale * self.micro_steps / self.all_batches if self.all_batches else 1.0
        if scale is LossScale.BATCH or not self.num_items:
            # A rank with a dummy batch has one batch fewer, so the others' batches weigh more.
            return self._scale / self.all_batches if self.all_batches else 1.0 / self.micro_steps
        return self._scale * items / float(self.num_items)

    @property
    def syncs(self) -> bool:
        """Whether gradients are exchanged after the micro-batch under way: it is the last of its step."""
        return self.micro_step == self.micro_steps - 1

    @property
    def has_items(self) -> bool:
        """Whether the micro-batch under way has items of this rank, and is not a dummy batch."""
        return self.micro_step >= len(self.items) or self.items[self.micro_step] > 0

    def substitute(self, batch: Any, batches: list[Any]) -> Any:
        """A micro-batch of the step that has targets, to compute at weight 0; `batch` itself when there is none."""
        return next((earlier for earlier, items in zip(batches, self.items, strict=True) if items), batch)
