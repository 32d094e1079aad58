"""A snapshot that stays as it is while training goes on: what a background save writes from.

Tensors are copied into one block of host memory that is used again by every save, so a training holds one copy of its
state at most, and only the first save pays for the memory (the system hands out pages, zeroed, at their first use:
slower than the copy itself, so `HostCopy.reserve` does it beforehand, in a thread of its own).
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer_lib.checkpoint import layout
from trainer_lib.checkpoint.sharded import LocalShard
from trainer_lib.checkpoint.writer import Snapshot, render_json, select_part
from trainer_lib.errors import OutOfMemoryError

_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every element's size
Key = TypeVar("Key", bound=Hashable)


class HostCopy:
    """Memory on the host for one copy of a training's state."""

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._thread: threading.Thread | None = None

    @property
    def size(self) -> int:
        """Bytes held."""
        self._join_reservation()
        return 0 if self._block is None else self._block.numel()

    def reserve(self, size: int) -> None:
        """Get `size` bytes ready, in the background. What cannot be had now is asked for again by `copy_tensors`."""
        if self._thread is None and (self._block is None or self._block.numel() < size):
            self._thread = threading.Thread(target=self._grow, args=(size,), name="trainflow-reserve", daemon=True)
            self._thread.start()

    @torch.no_grad()
    def copy_tensors(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """The values as they are now, on the host; overwritten by the next call. What was one memory stays one.

        Tensors without plain values (meta, sparse) are left as they are: the writer refuses them by name.

        Raises:
            OutOfMemoryError: the host has no room for the copy.
        """
        distinct = _distinct(tensors.values())
        block = self._room(bytes_to_copy(distinct.values()))
        copies: dict[Hashable, Tensor] = {}
        begin = 0
        for memory, tensor in distinct.items():
            end = begin + tensor.numel() * tensor.element_size()
            copies[memory] = block[begin:end].view(tensor.dtype).view(tensor.shape)
            copies[memory].copy_(tensor, non_blocking=tensor.is_cuda)
            begin = _aligned(end)
        if any(tensor.is_cuda for tensor in distinct.values()):
            torch.cuda.synchronize()
        return {key: copies.get(_memory(tensor), tensor) for key, tensor in tensors.items()}

    def close(self) -> None:
        """Give the memory back."""
        self._join_reservation()
        self._block = None

    def _join_reservation(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _room(self, size: int) -> Tensor:
        self._join_reservation()
        if self._block is None or self._block.numel() < size:
            self._grow(size)
        if self._block is None:
            raise OutOfMemoryError(
                f"The host has no {size:,} bytes free for the copy that a background save writes from.",
                field="save_async",
                remedy="Give it more memory, or set save_async=False.",
            )
        return self._block

    def _grow(self, size: int) -> None:
        self._block = None  # the smaller one goes first: never two copies
        try:
            self._block = torch.zeros(size, dtype=torch.uint8)
        except RuntimeError:  # torch's allocator: no memory
            self._block = None


def bytes_to_copy(tensors: Iterable[Tensor]) -> int:
    """Bytes that `HostCopy.copy_tensors` needs for tensors of different memory."""
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


def freeze_snapshot(snapshot: Snapshot, rank: int, memory: HostCopy) -> Snapshot:
    """What of a snapshot this rank writes, as it is at this moment; valid until the next call with the same memory.

    Raises:
        ConfigError: a part cannot be written as JSON; OutOfMemoryError: see `HostCopy.copy_tensors`.
    """
    own = select_part(snapshot, rank)
    optimizer = own.optimizer
    live = {(layout.MODEL, name): tensor for name, tensor in own.model.items()}
    if optimizer is not None:
        live.update({(layout.OPTIMIZER, name): tensor for name, tensor in optimizer.tensors.items()})
    if own.parts is not None:
        live.update({(layout.SHARD_INDEX, name): rows.values for name, rows in own.parts.rows.items()})
    live.update({(layout.extra_file(rank), name): tensor for name, tensor in own.extra.items()})
    taken = memory.copy_tensors(live)
    if optimizer is not None:
        tensors = {name: tensor for (file, name), tensor in taken.items() if file == layout.OPTIMIZER}
        optimizer = replace(optimizer, tensors=tensors)
    return replace(
        own,
        model={name: tensor for (file, name), tensor in taken.items() if file == layout.MODEL},
        optimizer=optimizer,
        parts=_frozen_parts(
            own.parts, {name: tensor for (file, name), tensor in taken.items() if file == layout.SHARD_INDEX}
        ),
        extra={name: tensor for (file, name), tensor in taken.items() if file == layout.extra_file(rank)},
        scheduler=copy.deepcopy(own.scheduler),
        scaler=copy.deepcopy(own.scaler),
        rng=_as_written("rng", own.rng),
        data=_as_written(layout.DATA, own.data),
        trainer_state=_as_written(layout.TRAINER_STATE, own.trainer_state),
        training_args=_as_written(layout.TRAINING_ARGS, own.training_args),
        files=dict(own.files),
        meta=_as_written("meta", own.meta),
    )


def _frozen_parts(parts: LocalShard | None, taken: Mapping[str, Tensor]) -> LocalShard | None:
    if parts is None:
        return None
    return replace(parts, rows={name: replace(rows, values=taken[name]) for name, rows in parts.rows.items()})


def _as_written(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """A copy that gives the same JSON: through JSON, which is several times faster than `copy.deepcopy`."""
    written: dict[str, Any] = json.loads(render_json(name, value))
    return written


def _distinct(tensors: Iterable[Tensor]) -> dict[Hashable, Tensor]:
    return {_memory(each): each.detach() for each in tensors if each.layout is torch.strided and not each.is_meta}


def _memory(tensor: Tensor) -> Hashable:
    """Equal for tensors that are the same values in the same memory: tied weights."""
    view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()) if tensor.layout is torch.strided else ()
    return (tensor.device, tensor.dtype, *view, tensor.data_ptr() if view and not tensor.is_meta else id(tensor))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
