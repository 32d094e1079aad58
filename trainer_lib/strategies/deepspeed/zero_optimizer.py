"""DeepSpeed's optimizer, shown as an optimizer over the model's own parameters.

DeepSpeed replaces the parameters in the user's optimizer by flats. Here, `param_groups` and `state` hold the parameters
again, so code that reads a learning rate, or saves and restores state by parameter name, works unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.strategies.deepspeed.zero_partitions import Partitions


class Group(MutableMapping[str, Any]):
    """The settings of one of the user's parameter groups, with its parameters."""

    def __init__(self, settings: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        self._settings = settings
        self._parameters = parameters

    def __getitem__(self, name: str) -> Any:
        return self._parameters if name == "params" else self._settings[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._settings[name] = value

    def __delitem__(self, name: str) -> None:
        del self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)


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
        return {
            key: self._kept(self._partitions.gather_whole(given, key)) if _is_divided(value, flat) else _copy(value)
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
        """Remove the state of all parameters."""
        for flat in self._partitions.flats():
            self._inner.state.pop(flat, None)

    def _of(self, flat: Tensor) -> dict[str, Any]:
        return self._inner.state.get(flat) or {}

    def _kept(self, whole: Tensor) -> Tensor:
        # "meta" keeps shape and dtype without memory.
        return whole.detach().cpu() if self._keeps else torch.empty_like(whole, device="meta")


def _is_divided(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape and value.ndim > 0


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


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
        """Take the step, unless a gradient is not finite."""
        if not self._step():
            # After a skipped first step, torch would warn that the schedule stepped before the optimizer.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used."""
        self._partitions.zero.zero_grad(set_to_none=set_to_none)
