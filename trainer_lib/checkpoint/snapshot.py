"""`Snapshot`: a rank's contribution to a checkpoint. The writer writes it, `staging` copies it.

Two kinds of model state exist. A *whole* state has every tensor complete on rank 0, which writes it into two files. A
*sharded* state has a part of every tensor on every rank; `shard_snapshot` keeps this rank's parts, and each rank writes
its own file of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from trainer_lib.checkpoint.layout import MODEL
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.sharded import LocalShard, collect_local_parts, is_any_sharded

_HEADER_BYTES = 512
"""The most bytes of a tensor's entry in a safetensors header, for the space check."""
_OTHER_BYTES = 2**20
"""The most bytes that a rank writes besides tensors (random states, JSON, headers), for the space check."""


@dataclass
class Snapshot:
    """The state that one rank contributes to a checkpoint.

    Rank 0 contributes all shared state; of the other ranks only `rng`, `extra` and `parts` are written, and `copies`
    compared.

    Attributes:
        step: optimizer steps done.
        model: name → tensor of any shape and dtype, tied names included; empty when `parts` is set.
        optimizer: the optimizer's state; None when only the model is saved.
        scheduler, scaler: `state_dict()`s; None when there is none, or only the model is saved.
        rng: what `capture_rng` returned; empty when only the model is saved.
        data: the position in the training data; JSON.
        trainer_state, training_args: JSON, with the fields of the transformers Trainer's files.
        files: further files, name → bytes (``config.json``, a tokenizer's).
        meta: what the commit states besides step, world size and files; JSON.
        parts: this rank's parts of a sharded model and optimizer; None when the tensors are whole.
        extra: name → tensor that is neither the model's nor the optimizer's; the JSON parts refer to it by name.
        model_file: the file of the model; None when it is written already.
        copies: what `digest_copies` returned of the tensors that other ranks hold alike, and only rank 0 writes.
        place: this rank's coordinates in the mesh, as an error names them: "tensor=1, shard=0".
        more_rngs: of an imported checkpoint, the random states of the ranks 1, 2, ... that are not here to write them.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: OptimizerSnapshot | None = None
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    rng: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    trainer_state: dict[str, Any] = field(default_factory=dict)
    training_args: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    parts: LocalShard | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    model_file: str | None = MODEL
    copies: Mapping[str, int] = field(default_factory=dict)
    place: str = ""
    more_rngs: list[dict[str, Any]] = field(default_factory=list)


def select_part(snapshot: Snapshot, rank: int) -> Snapshot:
    """The part of a snapshot that a rank writes: everything on rank 0, on the others what is theirs alone."""
    if rank == 0:
        return snapshot
    # Only rank 0's copy of what all ranks have alike is written.
    alone = {name: getattr(snapshot, name) for name in ("rng", "parts", "extra", "copies", "place")}
    return Snapshot(snapshot.step, {}, **alone)


def shard_snapshot(snapshot: Snapshot, rank: int) -> Snapshot:
    """Replace sharded tensors by this rank's parts of them (`parts`); a snapshot of whole tensors is returned as it is.

    Raises:
        ConfigError: a tensor is divided in a way that is not known.
    """
    if not is_any_sharded(snapshot.model):  # equal on every rank, so all ranks go the same way
        return snapshot
    optimizer = snapshot.optimizer
    groups = {"model": snapshot.model, "optimizer": optimizer.tensors if optimizer is not None else {}}
    without_tensors = None if optimizer is None else replace(optimizer, tensors={})
    parts = collect_local_parts(groups, rank, snapshot.place)
    return replace(snapshot, model={}, optimizer=without_tensors, parts=parts)


def estimate_bytes(snapshot: Snapshot, world_size: int) -> int:
    """An upper estimate of a checkpoint's size in bytes, as far as the first rank can know it."""
    tensors = [*snapshot.model.values(), *(snapshot.optimizer.tensors.values() if snapshot.optimizer else ())]
    parts = [] if snapshot.parts is None else list(snapshot.parts.parts.values())
    # The other ranks may hold as many extra tensors as this one: an estimate from above.
    on_each_rank = _num_bytes(snapshot.extra.values()) + _HEADER_BYTES * len(parts) + _OTHER_BYTES
    shared = _num_bytes(tensors) + sum(math.prod(part.shape) * part.values.element_size() for part in parts)
    shared += sum(map(len, snapshot.files.values()))
    return shared + world_size * on_each_rank + _HEADER_BYTES * len(tensors) + _OTHER_BYTES


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
