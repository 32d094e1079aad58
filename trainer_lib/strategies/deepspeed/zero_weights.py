"""The weights of a model that ZeRO shards: gathered one by one to be saved, loaded part by part.

With bf16 or fp16 the model computes with copies in that format; the masters are what is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.distributed.communicator import Communicator
from trainer_lib.errors import InfrastructureError
from trainer_lib.strategies.base import Strategy, match_names
from trainer_lib.strategies.deepspeed.zero_partitions import Partitions


class ZeroWeights(Strategy):
    """The part of the strategy that reads and writes weights, whose parameters or masters are sharded."""

    def __init__(self, device: torch.device, comm: Communicator, *, keeps: bool, mixed: bool) -> None:
        """Start without an engine.

        Args:
            keeps: whether this rank gets the values of gathered tensors.
            mixed: whether the masters are separate tensors.
        """
        super().__init__(device, comm)
        self._keeps = keeps
        self._mixed = mixed
        self._partitions: Partitions | None = None
        self._trained: set[int] = set()
        self._given_dtypes: dict[int, torch.dtype] = {}
        self._masters: dict[str, Tensor] = {}
        self._gathering: Callable[..., Any] | None = None

    # -- out -----------------------------------------------------------------------------------------------------------

    @override
    def local_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers themselves, by name; a sharded one is empty, shape `[0]`."""
        state = self.unwrap(model).state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    @override
    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors that are gathered to the first rank when read, in the number formats of the given model."""
        return _Gathered(tensors, lambda part: self._whole(part).to(self._given_dtypes.get(id(part), part.dtype)))

    @override
    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors that are gathered to the first rank when read, at the masters' precision. Collective."""
        return dict(_Gathered(tensors, self._whole))

    def _whole(self, value: Tensor) -> Tensor:
        divided = hasattr(value, "ds_id")  # DeepSpeed marks the parameters that it shards
        # The masters have more bits than the tensors that the model computes with.
        if id(value) in self._trained and (divided or self._mixed):
            return _detach(self._parts().gather_whole(value), self._keeps)  # type: ignore[arg-type]
        if divided:
            with self._gather([value]):
                return _detach(value, self._keeps)
        return value.detach()

    # -- in ------------------------------------------------------------------------------------------------------------

    @override
    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor], *, keep: Collection[str] = ()) -> None:
        """Copy `state` into model and masters; a tied weight may be given under one of its names only. Collective."""
        own = self.local_state(model)
        known = match_names(own, state, keep, _shape)
        self._masters = {}
        for first, name in known.items():
            value = state[name]
            self._load(own[first], value)
            if self._partitions is not None and id(own[first]) in self._trained:
                self._partitions.store_part(own[first], value)  # type: ignore[arg-type]
            elif self._mixed and isinstance(own[first], nn.Parameter):
                self._masters[first] = value  # until there is an optimizer to hold it
        if self._partitions is not None:
            self._partitions.refresh_model()

    def _load(self, target: Tensor, value: Tensor) -> None:
        with torch.no_grad():
            if not hasattr(target, "ds_id"):
                target.copy_(value)
            elif id(target) not in self._trained:
                # At the end of the block DeepSpeed sends rank 0's values to the other shards.
                with self._gather([target], modifier_rank=0):
                    if self.comm.rank == 0:
                        target.copy_(value)

    def _take_masters(self, model: nn.Module) -> None:
        """Copy weights that were loaded before the masters existed into the masters, at full precision. Collective."""
        kept, self._masters = self._masters, {}
        if not kept:
            return
        partitions = self._parts()
        for name, param in model.named_parameters():
            if id(param) in self._trained and name in kept:
                partitions.store_part(param, kept[name])
        partitions.refresh_model()

    def _parts(self) -> Partitions:
        if self._partitions is None:
            raise InfrastructureError("There is no engine: training has not started.", field="deepspeed")
        return self._partitions

    def _gather(self, tensors: list[Tensor], **settings: Any) -> Any:
        if self._gathering is None:
            raise InfrastructureError(
                "No weight can be gathered yet, because DeepSpeed has not started.", field="deepspeed"
            )
        return self._gathering(tensors, **settings)


class _Gathered(Mapping[str, Tensor]):
    """Tensors that are gathered when they are read; tied names give one tensor, gathered once."""

    def __init__(self, tensors: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> None:
        self._tensors, self._make = tensors, whole
        self._ties = Counter(id(tensor) for tensor in tensors.values())
        self._tied: dict[int, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if id(tensor) not in self._tied:
            made = self._make(tensor)
            if self._ties[id(tensor)] == 1:
                return made
            self._tied[id(tensor)] = made
        return self._tied[id(tensor)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _shape(value: Tensor) -> tuple[int, ...]:
    return tuple(getattr(value, "ds_shape", value.shape))


def _detach(value: Tensor, keeps: bool) -> Tensor:
    detached = value.detach()
    return detached.to("cpu", copy=True) if keeps else torch.empty_like(detached, device="meta")
