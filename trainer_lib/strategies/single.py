"""One process, one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainer_lib.distributed import Communicator
from trainer_lib.errors import ConfigError
from trainer_lib.precision import Precision, PrecisionSettings, create_precision
from trainer_lib.strategies.base import total_norm


class SingleStrategy:
    """The model as it is, on one device."""

    name = "single"
    places_model = False
    forward_communicates = False
    skips_micro_steps = True

    def __init__(self, device: torch.device, comm: Communicator) -> None:
        self.device = device
        self.comm = comm
        self.plugins: Mapping[str, Any] = {}

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """`make()`."""
        return make()

    def check_model(self, model: nn.Module) -> None:
        """Any model will do."""

    def setup_model(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def precision(self, args: PrecisionSettings) -> Precision:
        """As the arguments say."""
        return create_precision(args, self.device)

    def schedule(self, optimizer: torch.optim.Optimizer, num_training_steps: int) -> Any:
        """None: as the arguments say."""
        return None

    def settle(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both as they are."""
        return model, optimizer

    def release(self) -> None:
        """Nothing was made."""

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """It holds the model's parameters already."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model under torch.compile's wrapper, if there is one."""
        inner = getattr(model, "_orig_mod", model)
        return inner if isinstance(inner, nn.Module) else model

    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        """The module that trains: nothing in its forward communicates."""
        return model

    def after_inference(self, model: nn.Module) -> None:
        """Nothing was taken."""

    def named_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The module's own."""
        return dict(self.unwrap(model).named_parameters())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """There is nobody to exchange gradients with."""
        return contextlib.nullcontext()

    def sync_gradients(self, model: nn.Module) -> None:
        """There is nobody to exchange gradients with."""

    def backward(self, loss: torch.Tensor, seed: torch.Tensor | None = None) -> None:
        """Backpropagate."""
        loss.backward(seed)  # type: ignore[no-untyped-call]

    def numel(self, parameter: nn.Parameter) -> int:
        """Its elements."""
        return parameter.numel()

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Global norm of the gradients, clipped in place."""
        return total_norm(parameters, max_norm)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return tensor.detach().clone()

    def local_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by name; tied weights under each of their names."""
        state = self.unwrap(model).state_dict()
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """They are whole."""
        return tensors

    def model_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The state, which is whole."""
        return dict(self.gathered(self.local_state(model)))

    def checkpoint_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """They are whole."""
        return dict(self.gathered(tensors))

    def load_model_state(
        self, model: nn.Module, state: Mapping[str, torch.Tensor], *, keep: Collection[str] = ()
    ) -> None:
        """Copy `state` in; a tied weight may be given under one of its names only."""
        target = self.unwrap(model)
        own = self.model_state(target)
        given = dict(state)
        given.update((name, own[name]) for name in own.keys() & set(keep) - given.keys())
        _complete_tied(own, given)
        reshaped = [name for name in own.keys() & given.keys() if own[name].shape != given[name].shape]
        refuse_others(own.keys() - given.keys(), given.keys() - own.keys(), reshaped)
        target.load_state_dict(given)

    def describe(self) -> dict[str, Any]:
        """The strategy's name."""
        return {"strategy": self.name}


def refuse_others(missing: Iterable[str], unexpected: Iterable[str], reshaped: Iterable[str]) -> None:
    """Raise ConfigError when a checkpoint's names or shapes are not the model's."""
    for problem, found in (("lacks", missing), ("has unknown", unexpected), ("has another shape for", reshaped)):
        if names := sorted(found):
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ConfigError(
                f"The checkpoint {problem} {shown}: it belongs to another model.",
                field="resume_from_checkpoint",
                remedy="Build the model the checkpoint was written for, or start anew.",
            )


def _complete_tied(own: Mapping[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    by_storage: dict[tuple[int, torch.Size], list[str]] = {}
    for name, value in own.items():
        if value.numel():
            by_storage.setdefault((value.data_ptr(), value.shape), []).append(name)
    for names in by_storage.values():
        present = [name for name in names if name in given]
        for name in names if present else []:
            given.setdefault(name, given[present[0]])
