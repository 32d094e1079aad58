"""The parts into which ZeRO cuts masters and optimizer state, by parameter: whole values out, whole values in.

DeepSpeed writes its own checkpoints with pickle, so state goes through here instead: parameter by parameter, with at
most one whole tensor at a time beyond what is kept. Private names of DeepSpeed are used; `missing_names` says which
of them an installed version lacks. (Tested with 0.19.8.)

Glossary
    master   a parameter as the optimizer has it, fp32; the model computes with a copy, in bf16 say
    flat     the one tensor in which a process keeps its part of many masters; the inner optimizer sees only flats
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

_STAGES_1_2 = (
    *("bit16_groups", "single_partition_of_fp32_groups", "optimizer", "loss_scale", "clip_grad", "loss_scaler"),
    *("scaled_global_norm", "update_lp_params", "_lazy_init_hp_params_optimizer_state", "_wait_for_offload_copies"),
    *("_hp_optimizer_states_linked", "_update_model_bit16_weights"),
)
_STAGE_3 = (
    *("fp16_groups", "fp32_partitioned_groups_flat", "optimizer", "loss_scale", "clip_grad", "loss_scaler"),
    *("grad_position", "get_param_id", "get_full_hp_param", "_get_norm_groups", "_get_param_partition_rank"),
    *("_reassign_or_swap_out_partitioned_parameters", "_partition_all_parameters", "persistent_parameters"),
)


def missing_names(optimizer: Any, stage: int) -> list[str]:
    """Names that this file uses and DeepSpeed's optimizer of that stage has not."""
    return [name for name in (_STAGE_3 if stage == 3 else _STAGES_1_2) if not hasattr(optimizer, name)]


class Partitions(Protocol):
    """The parts that this process holds. Collective: `gather_whole`, `refresh_model` and `gradient_norm`."""

    zero: Any

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every trained parameter, in one order on all ranks."""

    def flat_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The flat that has this rank's part of it."""

    def flats(self) -> Sequence[torch.Tensor]:
        """All flats of this rank."""

    def gather_whole(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """The master, or the optimizer's state `key` of it: fp32, in the parameter's shape."""

    def store_part(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Keep this rank's part of a whole value."""

    def refresh_model(self) -> None:
        """Let the model compute with what the masters are now."""

    def gradient_norm(self) -> torch.Tensor:
        """L2 norm of all gradients of the step, 0-dim; NaN when it is not finite. Collective."""


class StagesOneTwo:
    """Masters and optimizer state are divided; every process has all parameters."""

    def __init__(self, zero: Any) -> None:
        self.zero = zero
        flats = zero.single_partition_of_fp32_groups
        self._flat = {id(each): flats[index] for index, group in enumerate(zero.bit16_groups) for each in group}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Group by group."""
        for group in self.zero.bit16_groups:
            yield from group

    def flat_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Its group's."""
        flat: torch.Tensor = self._flat[id(parameter)]
        return flat

    def flats(self) -> Sequence[torch.Tensor]:
        """One of each group."""
        return list(self.zero.single_partition_of_fp32_groups)

    def gather_whole(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """Summed over ranks, of which all but the holders add zeros."""
        given: Any = parameter
        if key is not None:
            # DeepSpeed links a group's state to its parameters once, when only the first group has any.
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()
        whole: torch.Tensor = given.get_full_hp_param(key)
        return whole

    def store_part(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Copy the part that lies in this rank's flat."""
        given: Any = parameter
        mapping = given._hp_mapping
        if mapping is None:
            return
        flat = self.flat_of(parameter)
        target = flat if key is None else self.zero.optimizer.state[flat][key]
        source, place = mapping.lp_fragment_address, mapping.hp_fragment_address
        part = value.detach().reshape(-1).narrow(0, source.start, source.numel)
        with torch.no_grad():
            target.narrow(0, place.start, place.numel).copy_(part)

    def refresh_model(self) -> None:
        """Copy the masters into the model's tensors and exchange those."""
        self.zero.update_lp_params()
        for index in range(len(self.zero.bit16_groups)):
            self.zero._update_model_bit16_weights(index)

    def gradient_norm(self) -> torch.Tensor:
        """DeepSpeed's own, which says -1 for what is not finite."""
        self.zero._wait_for_offload_copies()
        return _clean(self.zero.scaled_global_norm(), self.zero.loss_scale)


class StageThree:
    """Parameters are divided as well; a parameter of the model is empty until its layer computes."""

    def __init__(self, zero: Any, combine: Callable[[Any], Any]) -> None:
        """`combine`: DeepSpeed's function that makes one norm out of the groups' norms."""
        self.zero = zero
        self._combine = combine

    def parameters(self) -> Iterator[nn.Parameter]:
        """Group by group."""
        for group in self.zero.fp16_groups:
            yield from group

    def flat_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Its sub-group's."""
        flat: torch.Tensor = self.zero.fp32_partitioned_groups_flat[self._place(parameter)[0]]
        return flat

    def flats(self) -> Sequence[torch.Tensor]:
        """One of each sub-group."""
        return list(self.zero.fp32_partitioned_groups_flat)

    def gather_whole(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """Gathered from all ranks."""
        whole: torch.Tensor = self.zero.get_full_hp_param(parameter, key)
        return whole

    def store_part(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Copy this rank's share: all ranks' shares are equal, the last one ends in padding."""
        _, start, length = self._place(parameter)
        flat = self.flat_of(parameter)
        target = (flat if key is None else self.zero.optimizer.state[flat][key]).narrow(0, start, length)
        begin = length * self.zero._get_param_partition_rank(parameter)
        part = value.detach().reshape(-1)[begin : begin + length]
        with torch.no_grad():
            target.zero_()
            target.narrow(0, 0, part.numel()).copy_(part)

    def refresh_model(self) -> None:
        """Copy the masters into the parameters' shares; small parameters that stay whole are exchanged again."""
        zero = self.zero
        zero._partition_all_parameters()
        for index in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if len(zero.persistent_parameters) > 0:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def gradient_norm(self) -> torch.Tensor:
        """Of the groups' norms."""
        return _clean(self._combine(self.zero._get_norm_groups()), self.zero.loss_scale)

    def _place(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        index, start, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return int(index), int(start), int(length)


def _clean(norm: Any, loss_scale: float) -> torch.Tensor:
    value: torch.Tensor = torch.as_tensor(norm).detach().float().reshape(())
    return torch.where(value < 0, torch.full_like(value, float("nan")), value) / loss_scale
