"""The parts into which ZeRO cuts masters and optimizer state, read and written as whole values by parameter.

DeepSpeed writes its own checkpoints with pickle, so state passes through this file instead: parameter by parameter,
with at most one whole tensor at a time beyond what is kept. It uses private names of DeepSpeed; `missing_names` returns
those that an installed version lacks. (Tested with 0.19.8.)

DeepSpeed replaces the parameters in the user's optimizer by flats. In `ZeroOptimizer`, `param_groups` and `state` hold
the parameters again, so code that reads a learning rate, or saves state by parameter name, works unchanged.

Glossary
    master   a parameter in fp32, as the optimizer has it; the model computes with a copy, for example in bf16
    flat     a tensor `[elements]` with a process's part of many masters; the inner optimizer holds only flats
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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

    def __init__(self, zero: Any, groups: Sequence[Any], flats: Sequence[Tensor]) -> None:
        self.zero = zero
        self._groups = groups
        self._flats = flats

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every trained parameter, in the same order on all ranks."""
        for group in self._groups:
            yield from group

    def flats(self) -> Sequence[Tensor]:
        """Return all flats of this rank, `[elements]` each."""
        return list(self._flats)

    @abstractmethod
    def flat_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the flat `[elements]` with this rank's part of the parameter."""

    @abstractmethod
    def gather_whole(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        """Return the master, or its optimizer state `key`: fp32, in the parameter's whole shape `[...]`. Collective."""

    @abstractmethod
    def store_part(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Copy this rank's part of `value`, which has the parameter's whole shape `[...]`."""

    @abstractmethod
    def refresh_model(self) -> None:
        """Copy the masters into the tensors that the model computes with. Collective."""

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients of the step, shape `[]`; NaN if it is not finite. Collective."""

    def _target(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        flat = self.flat_of(parameter)
        target: Tensor = flat if key is None else self.zero.optimizer.state[flat][key]
        return target


class StagesOneTwo(Partitions):
    """Sharded masters and optimizer state; every process has all parameters."""

    def __init__(self, zero: Any) -> None:
        super().__init__(zero, zero.bit16_groups, zero.single_partition_of_fp32_groups)
        self._flat = {id(param): self._flats[index] for index, group in enumerate(self._groups) for param in group}

    @override
    def flat_of(self, parameter: nn.Parameter) -> Tensor:
        return self._flat[id(parameter)]

    @override
    def gather_whole(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        """Sum over ranks, of which all but those that hold a part add zeros."""
        given: Any = parameter
        if key is not None:
            # DeepSpeed links state to parameters only once, when just the first group has any: let it link again.
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()
        whole: Tensor = given.get_full_hp_param(key)
        return whole

    @override
    def store_part(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
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
        self.zero.update_lp_params()
        for index in range(len(self.zero.bit16_groups)):
            self.zero._update_model_bit16_weights(index)

    @override
    def gradient_norm(self) -> Tensor:
        self.zero._wait_for_offload_copies()
        return _clean(self.zero.scaled_global_norm(), self.zero.loss_scale)


class StageThree(Partitions):
    """Sharded parameters as well: a parameter of the model is empty until its layer computes."""

    def __init__(self, zero: Any, combine: Callable[[Any], Any]) -> None:
        """Read the sharded groups of `zero`; `combine` is DeepSpeed's function from the groups' norms to one norm."""
        super().__init__(zero, zero.fp16_groups, zero.fp32_partitioned_groups_flat)
        self._combine = combine

    @override
    def flat_of(self, parameter: nn.Parameter) -> Tensor:
        return self._flats[int(self.zero.grad_position[self.zero.get_param_id(parameter)][0])]

    @override
    def gather_whole(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        whole: Tensor = self.zero.get_full_hp_param(parameter, key)
        return whole

    @override
    def store_part(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Copy this rank's share. All shares have the same length; the last one ends in padding."""
        _, start, length = map(int, self.zero.grad_position[self.zero.get_param_id(parameter)])
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
    def gradient_norm(self) -> Tensor:
        return _clean(self._combine(self.zero._get_norm_groups()), self.zero.loss_scale)


def _clean(norm: Any, loss_scale: float) -> Tensor:
    value: Tensor = torch.as_tensor(norm).detach().float().reshape(())
    # DeepSpeed returns -1 for a norm that is not finite.
    return torch.where(value < 0, torch.full_like(value, float("nan")), value) / loss_scale


# -- the optimizer ----------------------------------------------------------------------------------------------------


class Group(UserDict[str, Any]):
    """The settings of one of the user's parameter groups, which stay shared with it, with its parameters."""

    def __init__(self, settings: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.data, self._parameters = settings, parameters

    def __getitem__(self, name: str) -> Any:
        return self._parameters if name == "params" else self.data[name]


class State(MutableMapping[Tensor, dict[str, Any]]):
    """Parameter → its whole state, in the parameter's shape `[...]`. Reading an entry is collective.

    A rank that `keeps` gets the values, on the CPU; other ranks get tensors on "meta". State that is one number for a
    flat (the count of steps) appears under all of its parameters.
    """

    def __init__(self, partitions: Partitions, keeps: bool) -> None:
        self._partitions = partitions
        self._inner: torch.optim.Optimizer = partitions.zero.optimizer
        self._keeps = keeps

    def __iter__(self) -> Iterator[Tensor]:
        return (param for param in self._partitions.parameters() if self._of(self._partitions.flat_of(param)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        given: Any = parameter
        flat = self._partitions.flat_of(given)
        values = self._of(flat)
        if not values:
            raise KeyError(parameter)
        place = "cpu" if self._keeps else "meta"  # which keeps shape and dtype without memory
        return {
            key: self._partitions.gather_whole(given, key).detach().to(place)
            if _is_divided(value, flat)
            else copy.deepcopy(value)
            for key, value in values.items()
        }

    def __setitem__(self, parameter: Tensor, values: dict[str, Any]) -> None:
        given: Any = parameter
        flat = self._partitions.flat_of(given)
        state = self._inner.state[flat]
        for key, value in values.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                if key not in state:
                    state[key] = torch.zeros_like(flat, dtype=value.dtype)
                self._partitions.store_part(given, value, key)
            else:
                # A count of steps, the larger one: the parameters of one flat step together from here on.
                present, placed = state.get(key), _placed(value, flat, self._inner)
                state[key] = placed if present is None or placed >= present else present

    def __delitem__(self, parameter: Tensor) -> None:
        raise TypeError("The state of a single parameter cannot be removed: it is a part of a larger tensor.")

    @override
    def values(self) -> Any:
        """Yield the entries as whole tensors on "meta", without communication."""
        for parameter in self:
            flat = self._partitions.flat_of(parameter)  # type: ignore[arg-type]
            shape = getattr(parameter, "ds_shape", parameter.shape)
            yield {
                key: torch.empty(shape, dtype=value.dtype, device="meta") if _is_divided(value, flat) else value
                for key, value in self._of(flat).items()
            }

    @override
    def clear(self) -> None:
        for flat in self._partitions.flats():
            self._inner.state.pop(flat, None)

    def _of(self, flat: Tensor) -> dict[str, Any]:
        return self._inner.state.get(flat) or {}


def _is_divided(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape and value.ndim > 0


def _placed(value: Any, flat: Tensor, inner: torch.optim.Optimizer) -> Any:
    """Move a number's tensor to where the optimizer reads it: fused kernels on the flat's device, others on the CPU."""
    if not isinstance(value, Tensor):
        return value
    on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
    return value.to(flat.device if on_device else "cpu", copy=True)


class ZeroOptimizer(torch.optim.Optimizer):
    """The optimizer that the Trainer steps, saves and restores.

    Args:
        groups: the settings of the user's groups (shared with the user's optimizer), and the parameters they held.
        partitions: the sharded form of those parameters.
        step: DeepSpeed's step, which skips gradients that are not finite; returns whether the step was taken.
        keeps: whether this rank gets the values of gathered state.
    """

    _step_supports_amp_scaling = True  # DeepSpeed checks the norm itself, so `step` may run before it is known

    def __init__(
        self,
        groups: list[tuple[dict[str, Any], list[nn.Parameter]]],
        partitions: Partitions,
        step: Callable[[], bool],
        keeps: bool,
    ) -> None:
        super().__init__([{"params": parameters} for _, parameters in groups], {})
        # After super().__init__, which makes plain dictionaries of the groups.
        self.param_groups: Any = [Group(settings, parameters) for settings, parameters in groups]
        self.state: Any = State(partitions, keeps)
        self._partitions = partitions
        self._step = step

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._step():
            # After a skipped first step, torch would warn that the schedule stepped before the optimizer.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self._partitions.zero.zero_grad(set_to_none=set_to_none)
