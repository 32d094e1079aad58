"""Bytes that a rank holds during training, by strategy. Arithmetic on a model's sizes, without torch.

W processes, parameters P (trained ones T), gradients G, optimizer state O, activations A, stored weights S, in bytes::

    strategy   parameters    gradients   optimizer   for the exchange                          written in a checkpoint
    single     P             G           O           -                                         S + O
    DDP        P             G           O           G: the buckets, copies of the gradients   S + O by the first rank
    FSDP       P/W           G/W         O/W         gathered units, and their gradients       (S + O)/W by each
    ZeRO 1     P + T/W       G           O/W         two buckets                               S + O by the first rank
    ZeRO 2     P + T/W       G/W         O/W         two buckets                               S + O by the first rank
    ZeRO 3     (P + T)/W     G/W         O/W         two buckets, gathered parameters          S + O by the first rank
    layout     f·P/s         f·G/s       f·O/s       f times FSDP's; f·G of copies, without s  f·(S + O)/s by s·t ranks

What ZeRO shards is gathered for a checkpoint, tensor by tensor. FSDP is asked for one by FULL_STATE_DICT, and writes as
DDP does; of hybrid copies the first is written. With `save_only_model` O is left out.

A layout has s shards of t tensor ranks; of the parameters, D bytes are in divided layers, and f is the part of the
model that a tensor group leaves to each rank: (D/t + P - D)/P.

Activations, with the temporary tensors of the peak, are those of one micro-batch under every strategy; divided layers
have fewer. ZeRO holds a second copy of what is trained, from which the optimizer works.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_ZERO_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's own `reduce_bucket_size`; a smaller model has smaller buckets
_BYTES_OF_BUCKET_ELEMENT = 4
STRATEGIES = ("single", "ddp", "fsdp", "zero-1", "zero-2", "zero-3")
"""The strategies that every plan compares; a spec's own "layout" is added to them."""


@dataclass(frozen=True)
class ModelSize:
    """Bytes of a model and its optimizer on one rank that shares nothing."""

    parameters: int  # number of parameters, each once, however many names it has
    trainable: int  # number of those that are trained
    parameter_bytes: int  # of all of them, with the buffers
    gradient_bytes: int  # of the gradients of the trained ones
    optimizer_bytes: int | None  # of the optimizer's state; None: not known
    activation_bytes: int | None  # beyond all of the above, at the peak of a step, for one micro-batch; None: not known
    # Beyond the parameters, at the peak of one batch of evaluation; None: not known, or none.
    evaluation_bytes: int | None
    gathered_bytes: int  # of the parameters that FSDP has whole at one time
    stored_bytes: int  # of the weights and buffers in a checkpoint
    micro_batch: int = 1  # samples of the micro-batch whose activations these are
    divided_bytes: int = 0  # of the parameters in layers that the spec's layout divides

    def checkpoint_bytes(self, *, only_model: bool = False) -> int | None:
        """The bytes of a checkpoint: weights and, unless `only_model`, optimizer state; the rest is kilobytes."""
        if only_model:
            return self.stored_bytes
        return None if self.optimizer_bytes is None else self.stored_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Footprint:
    """The bytes of one rank under a strategy, one of `STRATEGIES` or "layout", on so many processes."""

    strategy: str
    processes: int
    parameters: int
    gradients: int
    optimizer: int | None
    exchange: int  # of buffers and gathered tensors that only the exchange between ranks needs
    activations: int | None  # with temporary tensors, at the peak of a step; None: not known
    # Beyond the parameters, at the peak of a batch of evaluation; None: not known, or none.
    evaluation: int | None = None
    checkpoint: int | None = None  # what a rank that writes writes into one checkpoint; None: not known
    writers: int = 1  # ranks that write as much; the others write a few kilobytes

    @property
    def total(self) -> int | None:
        """The peak of training, or of the evaluations in it; None where a part of it is not known."""
        if self.optimizer is None or self.activations is None:
            return None
        training = self.gradients + self.exchange + self.activations
        return self.parameters + self.optimizer + max(training, self.evaluation or 0)


def footprints(
    size: ModelSize,
    processes: int,
    *,
    alone: int | None = None,
    writers: int | None = None,
    only_model: bool = False,
    layout: tuple[int, int, int] | None = None,
) -> list[Footprint]:
    """The bytes of a rank under every strategy; all but "single" on `processes` ranks.

    Args:
        alone: samples of the micro-batch of one process alone, whose activations grow with it; None: as on each rank.
        writers: ranks that write a part of FSDP's checkpoint; None: all of them.
        layout: copies, shards, and ranks of a tensor group of the spec's own.
    """
    written, share = size.checkpoint_bytes(only_model=only_model), _divided_by(processes)
    whole, gradients, optimizer = size.parameter_bytes, size.gradient_bytes, size.optimizer_bytes
    gathered = min(size.gathered_bytes, whole)
    bucket = 2 * _BYTES_OF_BUCKET_ELEMENT * min(_ZERO_BUCKET_ELEMENTS, size.trainable)
    masters, activations = share(gradients), size.activation_bytes
    if activations is not None and alone is not None:
        activations = round(activations * alone / size.micro_batch)
    parts = writers or processes
    # Parameters, gradients, optimizer, exchange; a checkpoint of each rank that writes, and the number of those.
    held: dict[str, tuple[int, int, int | None, int, int | None, int]] = {
        "single": (whole, gradients, optimizer, 0, written, 1),
        "ddp": (whole, gradients, optimizer, gradients, written, 1),
        "fsdp": (share(whole), share(gradients), share(optimizer), 2 * gathered, _divided_by(parts)(written), parts),
        "zero-1": (whole + masters, gradients, share(optimizer), bucket, written, 1),
        "zero-2": (whole + masters, share(gradients), share(optimizer), bucket, written, 1),
        "zero-3": (share(whole) + masters, share(gradients), share(optimizer), bucket + gathered, written, 1),
    }
    if layout is not None:
        copies, shards, tensor = layout
        factor = 1 - size.divided_bytes * (1 - 1 / tensor) / max(whole, 1)
        part = _divided_by(shards, factor)
        exchange = math.ceil((2 * gathered if shards > 1 else gradients if copies > 1 else 0) * factor)
        held["layout"] = (part(whole), part(gradients), part(optimizer), exchange, part(written), shards * tensor)
    rows = []
    for name, (parameters, of_gradients, of_optimizer, exchange, checkpoint, writing) in held.items():
        ranks, of_step = (1, activations) if name == "single" else (processes, size.activation_bytes)
        state = (parameters, of_gradients, of_optimizer, exchange)
        rows.append(Footprint(name, ranks, *state, of_step, size.evaluation_bytes, checkpoint, writing))
    return rows


def _divided_by(processes: int, factor: float = 1.0) -> Callable[..., int]:
    # The largest part of a division that does not come out even.
    return lambda amount: None if amount is None else math.ceil(round(amount * factor, 3) / processes)  # type: ignore[return-value]


@dataclass(frozen=True)
class Estimate:
    """Facts of a training before its first step."""

    size: ModelSize  # of the model, for one micro-batch
    process_bytes: int  # resident memory of a worker that has loaded its libraries and data and no model yet
    # Whole numbers in the model's main input, of the first batches; None: it takes no tokens.
    tokens_per_sample: float | None
    device: str  # type of the device that it was worked out for ("cpu", "cuda")
    notes: tuple[str, ...] = ()  # sentences about what could not be worked out, and why


@dataclass(frozen=True)
class Probe:
    """Measurements of a few real steps; times in seconds, bytes of the rank that has the most."""

    steps: int  # optimizer steps that were measured, without the first ones, which are slow
    step_s: float  # the median of one step
    warm_up_s: float  # what the first steps took beyond that
    evaluation_row_s: float | None  # per row that was evaluated; None: the training evaluates nothing
    save_s: float | None  # one save; None: the training saves nothing
    checkpoint_bytes: int | None  # size of that save; None likewise
    peak_bytes: int  # the largest memory of a process: on a GPU that of torch's allocator, else the resident set
    device: str  # type of the device
    overhead_s: float = 0.0  # the rest of the probe's time, from its launch to its end
