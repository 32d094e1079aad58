"""`Snapshot`: a rank's contribution to a checkpoint. The writer writes it.

Two kinds of model state exist. A *whole* state has every tensor complete on rank 0, which writes it into two files. A
*sharded* state has a part of every tensor on every rank; `shard_snapshot` keeps this rank's parts, and each rank writes
its own file of them.

A background save writes from a copy on the host while training changes the original. All tensors are copied into one
block of host memory that every save uses again, so a training holds at most one copy of its state, and only the first
save pays for the memory. Staging before an asynchronous save is what torch does as well
(``torch.distributed.checkpoint.async_save``).
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer_lib.base.json_text import parse_json
from trainer_lib.checkpoint import layout
from trainer_lib.checkpoint.layout import MODEL
from trainer_lib.checkpoint.optimizer import OptimizerSnapshot
from trainer_lib.checkpoint.sharded import LocalShard, collect_local_parts
from trainer_lib.checkpoint.values import render_json
from trainer_lib.distributed.sharding import is_sharded
from trainer_lib.errors import OutOfMemoryError

_HEADER_BYTES = 512  # the most bytes of a tensor's entry in a safetensors header, for the space check
_OTHER_BYTES = 2**20
"""The most bytes that a rank writes besides tensors (random states, JSON, headers), for the space check."""
_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every element's size
Key = TypeVar("Key", bound=Hashable)


@dataclass
class Snapshot:
    """The state that one rank contributes to a checkpoint.

    Rank 0 contributes all shared state; of the other ranks only `rng`, `extra` and `parts` are written, and `copies`
    compared. `optimizer`, `scheduler` and `scaler` are None, and `rng` is empty, when only the model is saved.
    """

    step: int
    model: Mapping[str, Tensor]  # name → tensor of any shape and dtype, tied names included; empty when `parts` is set
    optimizer: OptimizerSnapshot | None = None
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    rng: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # the position in the training data; JSON
    # JSON, with the fields of the transformers Trainer's files.
    trainer_state: dict[str, Any] = field(default_factory=dict)
    training_args: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)  # further files: ``config.json``, a tokenizer's
    meta: dict[str, Any] = field(default_factory=dict)  # of the commit, without step, world size and files; JSON
    parts: LocalShard | None = None  # this rank's parts of a sharded model and optimizer; None: the tensors are whole
    # Tensors that are neither the model's nor the optimizer's; the JSON parts refer to them by name.
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    model_file: str | None = MODEL  # the file of the model; None when it is written already
    # What `digest_copies` returned of the tensors that other ranks hold alike, and only rank 0 writes.
    copies: Mapping[str, int] = field(default_factory=dict)
    place: str = ""  # this rank's coordinates in the mesh, as an error names them: "tensor=1, shard=0"
    # Of an imported checkpoint, the random states of the ranks 1, 2, ... that are not here to write them.
    more_rngs: list[dict[str, Any]] = field(default_factory=list)


def shard_snapshot(snapshot: Snapshot, rank: int) -> Snapshot:
    """Replace sharded tensors by this rank's parts of them; a snapshot of whole tensors stays. Raises ConfigError."""
    if not any(map(is_sharded, snapshot.model.values())):  # equal on every rank, so all ranks go the same way
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


class HostCopy:
    """Host memory for one copy of a training's state."""

    def __init__(self) -> None:
        self._block: Tensor | None = None

    @torch.no_grad()
    def copy_tensors(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Copy tensors `[...]` to the host, in their shapes and dtypes; the next call overwrites the copies.

        Tensors that share memory (tied weights) share their copy. Tensors without plain values (meta, sparse) are
        returned as they are: the writer refuses them by name. Raises OutOfMemoryError.
        """
        plain = [tensor for tensor in tensors.values() if tensor.layout is torch.strided and not tensor.is_meta]
        distinct = {_memory_key(tensor): tensor.detach() for tensor in plain}
        block = self._require_block(sum(_align(tensor.numel() * tensor.element_size()) for tensor in distinct.values()))
        copies: dict[Hashable, Tensor] = {}
        begin = 0
        for memory, tensor in distinct.items():
            end = begin + tensor.numel() * tensor.element_size()
            copies[memory] = block[begin:end].view(tensor.dtype).view(tensor.shape)
            copies[memory].copy_(tensor, non_blocking=tensor.is_cuda)
            begin = _align(end)
        if any(tensor.is_cuda for tensor in distinct.values()):
            torch.cuda.synchronize()  # non_blocking copies: training may change the originals only after this
        return {key: copies.get(_memory_key(tensor), tensor) for key, tensor in tensors.items()}

    def close(self) -> None:
        """Give the memory back."""
        self._block = None

    def _require_block(self, size: int) -> Tensor:
        if self._block is None or self._block.numel() < size:
            self._block = None  # free the smaller block first, so that there are never two copies
            # Pages that are locked take copies from a GPU several times as fast, and there may be fewer of them.
            for pinned in (True, False) if torch.cuda.is_initialized() else (False,):  # type: ignore[no-untyped-call]
                with contextlib.suppress(RuntimeError):  # torch's allocators: no memory
                    self._block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                    return self._block
            what = f"The host has no {size:,} bytes free for the copy that a background save writes from."
            raise OutOfMemoryError(what, field="save_async", remedy="Give it more memory, or set save_async=False.")
        return self._block


def freeze_snapshot(snapshot: Snapshot, rank: int, memory: HostCopy) -> Snapshot:
    """Copy what this rank writes of a snapshot; the copy is valid until `memory` is used again."""
    own = snapshot
    if rank != 0:  # only rank 0's copy of what all ranks have alike is written
        alone = {name: getattr(snapshot, name) for name in ("rng", "parts", "extra", "copies", "place")}
        own = Snapshot(snapshot.step, {}, **alone)
    optimizer, parts = own.optimizer, own.parts
    live: dict[str, Mapping[str, Tensor]] = {"model": own.model, "extra": own.extra}
    live["optimizer"] = {} if optimizer is None else optimizer.tensors
    live["parts"] = {} if parts is None else {name: part.values for name, part in parts.parts.items()}
    # One call for all tensors: the block is one, and ties may cross the model and the optimizer.
    copies = memory.copy_tensors({(group, name): tensors[name] for group, tensors in live.items() for name in tensors})
    held = {group: {name: copies[group, name] for name in tensors} for group, tensors in live.items()}
    if parts is not None:
        copied = {name: replace(part, values=held["parts"][name]) for name, part in parts.parts.items()}
        parts = replace(parts, parts=copied)
    # By way of JSON, which is several times faster than `copy.deepcopy`; a schedule's state may hold what JSON cannot.
    files = {"data": layout.DATA, "trainer_state": layout.TRAINER_STATE, "training_args": layout.TRAINING_ARGS}
    plain = {
        name: parse_json(render_json(files.get(name, name), getattr(own, name))) for name in (*files, "rng", "meta")
    }
    return replace(
        own,
        model=held["model"],
        optimizer=None if optimizer is None else replace(optimizer, tensors=held["optimizer"]),
        parts=parts,
        extra=held["extra"],
        scheduler=copy.deepcopy(own.scheduler),
        scaler=copy.deepcopy(own.scaler),
        files=dict(own.files),
        **plain,
    )


def _memory_key(tensor: Tensor) -> Hashable:
    """A key that two tensors share if they are the same values in the same memory (tied weights)."""
    view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()) if tensor.layout is torch.strided else ()
    return (tensor.device, tensor.dtype, *view, tensor.data_ptr() if view and not tensor.is_meta else id(tensor))


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
