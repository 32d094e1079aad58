"""One process, one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from trainer_lib.distributed.communicator import Communicator
from trainer_lib.distributed.precision import Precision, create_precision
from trainer_lib.distributed.xla import memory_address
from trainer_lib.errors import ConfigError
from trainer_lib.strategies.base import Strategy, total_norm

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments


class SingleStrategy(Strategy):
    """Trains the model as it is, on one device."""

    name = "single"
    places_model = False
    forward_communicates = False
    skips_micro_steps = True

    def __init__(self, device: torch.device, comm: Communicator) -> None:
        self.device = device
        self.comm = comm
        self.plugins: Mapping[str, Any] = {}

    @override
    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        return make()

    @override
    def check_model(self, model: nn.Module) -> None:
        return  # any model will do

    @override
    def setup_model(self, model: nn.Module) -> nn.Module:
        return model

    @override
    def precision(self, args: TrainingArguments) -> Precision:
        return create_precision(args, self.device)

    @override
    def resolve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, optimizer

    @override
    def release(self) -> None:
        return  # `resolve` made nothing

    @override
    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        return  # the optimizer holds the parameters already

    @override
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model under torch.compile's wrapper, if there is one."""
        inner = getattr(model, "_orig_mod", model)
        return inner if isinstance(inner, nn.Module) else model

    @override
    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        return model

    @override
    def after_inference(self, model: nn.Module) -> None:
        return  # prediction took nothing

    @override
    def named_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return dict(self.unwrap(model).named_parameters())

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    @override
    def sync_gradients(self, model: nn.Module) -> None:
        return  # there is no other rank

    @override
    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        loss.backward(gradient)  # type: ignore[no-untyped-call]

    @override
    def numel(self, parameter: nn.Parameter) -> int:
        return parameter.numel()

    @override
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        return total_norm(parameters, max_norm)

    @override
    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    @override
    def local_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name; tied weights under each of their names."""
        state = self.unwrap(model).state_dict()
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    @override
    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return tensors

    @override
    def model_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return dict(self.gathered(self.local_state(model)))

    @override
    def checkpoint_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(self.gathered(tensors))

    @override
    def load_model_state(
        self, model: nn.Module, state: Mapping[str, torch.Tensor], *, keep: Collection[str] = ()
    ) -> None:
        """Copy `state` in; a tied weight may be given under one of its names only."""
        target = self.unwrap(model)
        if type(target).load_state_dict is not nn.Module.load_state_dict:
            own_state = self.local_state(target)
            # The model's own method knows which names it takes.
            target.load_state_dict({**{name: own_state[name] for name in keep if name in own_state}, **state})
            return
        own = self.model_state(target)
        # A copy: the caller's mapping stays as it is when names are added.
        given = dict(state)
        given.update((name, own[name]) for name in own.keys() & set(keep) - given.keys())
        _complete_tied(own, given)
        reshaped = [name for name in own.keys() & given.keys() if own[name].shape != given[name].shape]
        refuse_others(own.keys() - given.keys(), given.keys() - own.keys(), reshaped)
        target.load_state_dict(given)

    @override
    def describe(self) -> dict[str, Any]:
        return {"strategy": self.name}


def refuse_others(missing: Iterable[str], unexpected: Iterable[str], reshaped: Iterable[str]) -> None:
    """Raise ConfigError when a checkpoint's names or shapes are not the model's."""
    for problem, found in (("lacks", missing), ("has unknown", unexpected), ("has another shape for", reshaped)):
        if names := sorted(found):
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ConfigError(
                f"The checkpoint {problem} {shown}: it belongs to another model.",
                field="resume_from_checkpoint",
                remedy="Build the model the checkpoint was written for, or start from the beginning.",
            )


def _complete_tied(own: Mapping[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    by_storage: dict[tuple[int, torch.Size], list[str]] = {}
    for name, value in own.items():
        # Empty tensors all have the address 0.
        if value.numel():
            by_storage.setdefault((memory_address(value), value.shape), []).append(name)
    for names in by_storage.values():
        present = [name for name in names if name in given]
        for name in names if present else []:
            given.setdefault(name, given[present[0]])
