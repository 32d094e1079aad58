"""`Communicator`: messages between ranks beside the gradients, and the world of one rank."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from typing_extensions import override

from trainer_lib.errors import TrainflowError
from trainer_lib.json_text import parse_json


class DataParallel(NamedTuple):
    """Which share of the data this process works on; batches, data order and loss weights follow it, not the world.

    Both are equal to the rank and the size of the world until several processes work on the same samples (tensor or
    context parallelism).

    Attributes:
        rank: number of this process's share, from 0.
        size: number of shares.
    """

    rank: int
    size: int


class Pending(Protocol):
    """A collective that is under way."""

    def result(self) -> bool:
        """Wait on the host, and return whether the flag is true on any rank."""


@runtime_checkable
class Communicator(Protocol):
    """Messages between ranks beside the gradients. Every method is collective: all ranks call it, in the same order."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    data_parallel: DataParallel

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def gather_json(self, obj: Any) -> list[Any] | None:
        """Return every rank's object on rank 0, in rank order; None elsewhere."""

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Return every rank's bytes on rank 0, in rank order; None elsewhere. Nothing is padded to the longest."""

    def broadcast_json(self, obj: Any) -> Any:
        """Return rank 0's object on every rank. It went through JSON on rank 0 as well, so all are equal."""

    def agree(self, error: TrainflowError | None) -> None:
        """Raise the error of the lowest rank that has one, on every rank; return when no rank has one."""

    def any(self, flag: bool) -> bool:
        """Return True on every rank when `flag` is true on one."""

    def any_later(self, flag: bool) -> Pending:
        """Start `any` and return at once: the message travels while the caller computes."""

    def sum_ints(self, values: list[int]) -> list[int]:
        """Return the element-wise sum over ranks of a few integers, without touching a device."""

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of a tensor of any shape `[...]`, as a new tensor on the same device."""

    def gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor `[...]`, all of one shape, in the order of the ranks, on the same device."""

    def twin(self, timeout_s: float) -> Communicator:
        """Return the same ranks over connections of their own, for the messages of one other thread."""


class _Known:
    """The result of a collective that needed no message."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def result(self) -> bool:
        return self._value


class SingleProcess(Communicator):
    """A world of one: each message is a plain return, through JSON where several ranks would use it."""

    rank = 0
    world_size = 1
    local_rank = 0
    local_world_size = 1
    data_parallel = DataParallel(0, 1)

    @override
    def barrier(self) -> None:
        return

    @override
    def gather_json(self, obj: Any) -> list[Any] | None:
        return [parse_json(json.dumps(obj))]

    @override
    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        return [data]

    @override
    def broadcast_json(self, obj: Any) -> Any:
        return parse_json(json.dumps(obj))

    @override
    def agree(self, error: TrainflowError | None) -> None:
        if error is not None:
            raise error

    @override
    def any(self, flag: bool) -> bool:
        return flag

    @override
    def any_later(self, flag: bool) -> Pending:
        return _Known(flag)

    @override
    def sum_ints(self, values: list[int]) -> list[int]:
        return list(values)

    @override
    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    @override
    def gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.detach().clone()]

    @override
    def twin(self, timeout_s: float) -> Communicator:
        return self
