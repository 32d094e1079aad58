"""`OutsideParameters`: what trains without being part of the model, as the weights of a loss module do.

The optimizer holds such parameters because an override of `create_optimizer` gave them to it, or because
`compute_loss_func` is a module. They are found among the modules that are attributes of the Trainer. The strategy does
not know them: here their gradients are averaged over ranks, and checkpoints get their values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib.errors import ConfigError
from trainer_lib.optim.decay import get_decay_parameter_names, parameter_groups

if TYPE_CHECKING:
    from trainer_lib.strategies.base import Strategy
    from trainer_lib.trainer.trainer import Trainer

_PREFIX = "outside/"  # of their tensors in a checkpoint


class OutsideParameters:
    """The trained parameters of one Trainer that are not its model's.

    Attributes:
        named: they, by a name that begins with the Trainer's attribute; empty before a training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.named: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._owners: dict[str, tuple[str, nn.Module]] = {}  # of the buffers: attribute of the Trainer, and module
        # By name: attribute, the buffer's module or the parameter itself, value on the CPU.
        self._first: dict[str, tuple[str, nn.Module | torch.Tensor, torch.Tensor]] | None = None

    def groups_of_loss(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Groups of the trained parameters that only `compute_loss_func` has, where it is a module."""
        loss: Any = self._trainer.compute_loss_func
        if not isinstance(loss, nn.Module):
            return []
        known = {id(each) for each in model.parameters()}
        groups = parameter_groups(loss, weight_decay, get_decay_parameter_names(loss))
        own = [{**group, "params": [each for each in group["params"] if id(each) not in known]} for group in groups]
        return [group for group in own if group["params"]]

    def find(self, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
        """Find what the optimizer holds beside the model, and make its values equal on all ranks. Collective."""
        self.named, self._buffers, self._owners = {}, {}, {}
        if strategy.name == "deepspeed":
            return  # its optimizer holds parts of all parameters
        model = self._trainer.model_wrapped
        known = {id(each) for each in (*strategy.named_parameters(model).values(), *model.parameters())}
        held = {
            id(each): (each, f"optimizer.{number}.{place}")
            for number, group in enumerate(optimizer.param_groups)
            for place, each in enumerate(group["params"])
            if id(each) not in known
        }
        if not held:
            return
        known |= {id(each) for each in model.buffers()}
        for prefix, module in self._modules():
            own = {name: each for name, each in module.named_parameters(prefix) if id(each) in held}
            self.named.update({name: each for name, each in own.items() if held.pop(id(each), None) is not None})
            if own:
                buffers = {n: each for n, each in module.named_buffers(prefix) if id(each) not in known}
                self._buffers.update(buffers)
                self._owners.update(dict.fromkeys(buffers, (prefix, module)))
        self.named.update({name: each for each, name in held.values()})
        if strategy.comm.world_size > 1:
            first = strategy.comm.rank == 0
            for each in self.named.values():
                each.data.copy_(strategy.sum(each.data if first else torch.zeros_like(each.data)))
        self._note_first()

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        trainer = self._trainer
        for name, value in trainer.__dict__.items():
            several = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_list(value) else ()
            for key, each in [(None, value), *several]:
                if isinstance(each, nn.Module) and each is not trainer.model and each is not trainer.model_wrapped:
                    yield (name if key is None else f"{name}.{key}"), each

    # -- several trainings that begin alike ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def first_values_kept(self) -> Iterator[None]:
        """Inside, `put_back` returns to the values ``[...]`` that the first training began with."""
        is_outermost = self._first is None
        if is_outermost:
            self._first = {}
        try:
            yield
        finally:
            if is_outermost:
                self._first = None

    def _note_first(self) -> None:
        if self._first is None:
            return
        for name, each in {**self.named, **self._buffers}.items():
            prefix, owner = self._owners.get(name, ("", each))
            # A module that an override makes for every training replaces the one before it.
            if name not in self._first or self._first[name][1] is not owner:
                self._first[name] = prefix, owner, each.detach().to("cpu", copy=True)

    def put_back(self) -> None:
        """Restore the values ``[...]`` that the first training began with; nothing outside of `first_values_kept`."""
        for name, (prefix, owner, value) in (self._first or {}).items():
            # A forward may have replaced a buffer, also by one of another shape.
            each = dict(owner.named_buffers(prefix)).get(name) if isinstance(owner, nn.Module) else owner
            if each is None:
                continue
            if each.shape == value.shape and each.dtype == value.dtype:
                each.data.copy_(value)  # in place: a view stays a view
            else:
                each.data = value.to(each.device, copy=True)
            each.grad = None

    # -- gradients ----------------------------------------------------------------------------------------------------

    def average_gradients(self, strategy: Strategy) -> None:
        """Average their gradients over ranks, as the strategy does with the model's. Collective."""
        if strategy.comm.world_size == 1:
            return
        for each in self.named.values():
            gradient = torch.zeros_like(each) if each.grad is None else each.grad
            each.grad = strategy.sum(gradient).div_(strategy.comm.world_size)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of them: values ``[...]`` of parameters, and buffers of their modules."""
        every = {**{name: each.detach() for name, each in self.named.items()}, **self._buffers}
        return {f"{_PREFIX}{name}": each for name, each in every.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], url: str) -> None:
        """Restore what `tensors` returned, ``[...]`` by name.

        Raises:
            ConfigError: the checkpoint lacks one of them, or has it in another shape.
        """
        for name, own in self.tensors().items():
            saved = tensors.get(name)
            if saved is None or saved.shape != own.shape:
                what = "lacks" if saved is None else "has another shape for"
                raise ConfigError(
                    f"The checkpoint {what} {name.removeprefix(_PREFIX)}, which is trained outside of the model.",
                    field="resume_from_checkpoint",
                    value=url,
                    remedy="Train with the loss that the checkpoint was written with, or start from the beginning.",
                )
            own.copy_(saved)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, nn.Module) for each in value)
