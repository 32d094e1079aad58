"""The parts into which ZeRO cuts masters and optimizer state, read and written as whole values by parameter.

DeepSpeed writes its own checkpoints with pickle, so state passes through this file instead: parameter by parameter,
with at most one whole tensor at a time beyond what is kept. It uses private names of DeepSpeed; `missing_names` returns
those that an installed version lacks. (Tested with 0.19.8.)

Glossary
    master   a parameter in fp32, as the optimizer has it; the model computes with a copy, for example in bf16
    flat     a tensor `[elements]` with a process's part of many masters; the inner optimizer holds only flats
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

# What this file uses of DeepSpeed's optimizers; private names among them, hence the check.
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
    """Return the names that this file uses and DeepSpeed's optimizer of that stage lacks."""
    return [name for name in (_STAGE_3 if stage == 3 else _STAGES_1_2) if not hasattr(optimizer, name)]


class Partitions(ABC):
    """The parts that this process holds. Collective: `gather_whole`, `refresh_model` and `gradient_norm`."""

    def __init__(self, zero: Any, groups: Sequence[Any], flats: Sequence[torch.Tensor]) -> None:
        """Keep DeepSpeed's optimizer, its groups of parameters, and this rank's flats."""
        self.zero = zero
        self._groups = groups
        self._flats = flats

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every trained parameter, in the same order on all ranks."""
        for group in self._groups:
            yield from group

    def flats(self) -> Sequence[torch.Tensor]:
        """Return all flats of this rank, `[elements]` each."""
        return list(self._flats)

    @abstractmethod
    def flat_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the flat `[elements]` with this rank's part of the parameter."""

    @abstractmethod
    def gather_whole(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """Return the master, or its optimizer state `key`: fp32, in the parameter's whole shape `[...]`. Collective."""

    @abstractmethod
    def store_part(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Copy this rank's part of `value`, which has the parameter's whole shape `[...]`."""

    @abstractmethod
    def refresh_model(self) -> None:
        """Copy the masters into the tensors that the model computes with. Collective."""

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of all gradients of the step, shape `[]`; NaN if it is not finite. Collective."""

    def _target(self, parameter: nn.Parameter, key: str | None) -> torch.Tensor:
        flat = self.flat_of(parameter)
        target: torch.Tensor = flat if key is None else self.zero.optimizer.state[flat][key]
        return target


class StagesOneTwo(Partitions):
    """Sharded masters and optimizer state; every process has all parameters."""

    def __init__(self, zero: Any) -> None:
        super().__init__(zero, zero.bit16_groups, zero.single_partition_of_fp32_groups)
        self._flat = {id(param): self._flats[index] for index, group in enumerate(self._groups) for param in group}

    @override
    def flat_of(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._flat[id(parameter)]

    @override
    def gather_whole(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """Sum over ranks, of which all but those that hold a part add zeros."""
        given: Any = parameter
        if key is not None:
            # DeepSpeed links state to parameters only once, when just the first group has any: let it link again.
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()
        whole: torch.Tensor = given.get_full_hp_param(key)
        return whole

    @override
    def store_part(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Copy the part of `value` that lies in this rank's flat."""
        given: Any = parameter
        mapping = given._hp_mapping
        # This rank's flat holds no part of the parameter.
        if mapping is None:
            return
        target = self._target(parameter, key)
        source, place = mapping.lp_fragment_address, mapping.hp_fragment_address
        part = value.detach().reshape(-1).narrow(0, source.start, source.numel)
        with torch.no_grad():
            target.narrow(0, place.start, place.numel).copy_(part)

    @override
    def refresh_model(self) -> None:
        """Copy the masters into the model's tensors, and exchange these over ranks."""
        self.zero.update_lp_params()
        for index in range(len(self.zero.bit16_groups)):
            self.zero._update_model_bit16_weights(index)

    @override
    def gradient_norm(self) -> torch.Tensor:
        self.zero._wait_for_offload_copies()
        return _clean(self.zero.scaled_global_norm(), self.zero.loss_scale)


class StageThree(Partitions):
    """Sharded parameters as well: a parameter of the model is empty until its layer computes."""

    def __init__(self, zero: Any, combine: Callable[[Any], Any]) -> None:
        """Read the sharded groups of `zero`; `combine` is DeepSpeed's function from the groups' norms to one norm."""
        super().__init__(zero, zero.fp16_groups, zero.fp32_partitioned_groups_flat)
        self._combine = combine

    @override
    def flat_of(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._flats[self._place(parameter)[0]]

    @override
    def gather_whole(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        whole: torch.Tensor = self.zero.get_full_hp_param(parameter, key)
        return whole

    @override
    def store_part(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Copy this rank's share. All shares have the same length; the last one ends in padding."""
        _, start, length = self._place(parameter)
        target = self._target(parameter, key).narrow(0, start, length)
        begin = length * self.zero._get_param_partition_rank(parameter)
        part = value.detach().reshape(-1)[begin : begin + length]
        with torch.no_grad():
            # The padding behind the share, too, for which `value` has nothing.
            target.zero_()
            target.narrow(0, 0, part.numel()).copy_(part)

    @override
    def refresh_model(self) -> None:
        """Copy the masters into the parameters' shares, and gather small parameters, which stay whole, again."""
        zero = self.zero
        zero._partition_all_parameters()
        for index in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if len(zero.persistent_parameters) > 0:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    @override
    def gradient_norm(self) -> torch.Tensor:
        return _clean(self._combine(self.zero._get_norm_groups()), self.zero.loss_scale)

    def _place(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        index, start, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return int(index), int(start), int(length)


def _clean(norm: Any, loss_scale: float) -> torch.Tensor:
    value: torch.Tensor = torch.as_tensor(norm).detach().float().reshape(())
    # DeepSpeed returns -1 for a norm that is not finite.
    return torch.where(value < 0, torch.full_like(value, float("nan")), value) / loss_scale
