"""Training by one process on one device, the base of all strategies. A backend is named in its own file only.

The trainer sequences, a strategy computes. A trainer that asks "is this X?" shows that this class lacks a method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib.distributed.communicator import Communicator
from trainer_lib.distributed.precision import Precision, create_precision
from trainer_lib.distributed.sharding import read_spec
from trainer_lib.errors import ConfigError

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.strategies.tensor.layers import DividedLoss


class Strategy:
    """Trains a model as it is, on one device. Returned tensors stay on the device, and nothing here waits for it.

    Attributes:
        name: in checkpoints and logs.
        places_model: whether it moves the model to the device itself, in pieces, since the whole may not fit there.
        forward_communicates: whether ranks compute a forward together; a rank without a batch then needs a dummy batch.
        skips_micro_steps: whether a micro-step may be left out where no other rank waits for it.
        plugins: what `trainer.accelerator.state` offers to code written for accelerate, by accelerate's names.
    """

    name = "single"
    places_model = False
    forward_communicates = False
    skips_micro_steps = True

    def __init__(self, device: torch.device, comm: Communicator) -> None:
        self.device = device
        self.comm = comm
        self.plugins: Mapping[str, Any] = {}

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that `make` builds; on some ranks perhaps without values, which `setup_model` fills in."""
        return make()

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError for a model that cannot be trained this way."""

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward trains, on the device: `model` itself or a wrapper around it."""
        return model

    def divided_loss(self, model: nn.Module) -> DividedLoss | None:
        """Return the model's loss over divided logits, which it has in a `with` of it; None: logits are whole."""
        return None

    def precision(self, args: TrainingArguments) -> Precision:
        """Return how forward passes are computed, and how gradients are scaled."""
        return create_precision(args, self.device)

    def resolve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the module and the optimizer to train with, made of what `setup_model` returned and its optimizer."""
        return model, optimizer

    def release(self) -> None:
        """Release what `resolve` made, before another training or at the end."""

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Make an optimizer that the user built before `setup_model` hold the parameters that the model has now."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module, also from under torch.compile's wrapper."""
        inner = getattr(model, "_orig_mod", model)
        return inner if isinstance(inner, nn.Module) else model

    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        """Return the module to predict with; ConfigError where it has to be `alone`, without communication, and cannot.

        Its forward must not communicate unless `forward_communicates`: ranks may have different numbers of batches.
        """
        return model

    def after_inference(self, model: nn.Module) -> None:
        """Release what only prediction needed."""

    def named_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer holds, by their names in the user's module."""
        return dict(self.unwrap(model).named_parameters())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for micro-steps that only accumulate gradients: nothing is exchanged in it."""
        return contextlib.nullcontext()

    def sync_gradients(self, model: nn.Module) -> None:
        """Exchange gradients that were all computed under `no_sync`, as a backward outside of it does."""

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Backpropagate `loss` ``[]``; `gradient` is that of the objective with respect to it ``[]``, None means 1."""
        loss.backward(gradient)  # type: ignore[no-untyped-call]

    def numel(self, parameter: nn.Parameter) -> int:
        """Return the number of elements of the whole parameter, over all ranks that share it."""
        return parameter.numel()

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Return the global L2 norm of the gradients, `[]` on the device; scale them to a positive `max_norm`."""
        return total_norm(parameters, max_norm)

    def part_of_targets(self, model: nn.Module) -> Callable[[torch.Tensor, int], torch.Tensor] | None:
        """Return what takes values of the targets that belong to the logits of the last forward; None: of all tokens.

        It is given values of the tokens ``[batch, tokens]`` and what fills those behind the last target, and returns
        values of the targets ``[batch, part of tokens]``.
        """
        return None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of a tensor of any shape `[...]`, as a new tensor on the same device."""
        return self.comm.sum_tensor(tensor)

    def local_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name, without wrappers' prefixes; sharded ones stay sharded.

        They have their own shapes `[...]`. Tied weights are under all of their names, with the same values (and the
        same object when sharded).
        """
        state = self.unwrap(model).state_dict()
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the tensors whole `[...]`: sharded ones on the CPU of rank 0, without values ("meta") on other ranks.

        A tensor is gathered when it is read, so every rank reads the same names in the same order.
        """
        return tensors

    def model_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return all of `local_state`, gathered to whole shapes `[...]`. Collective."""
        return dict(self.gathered(self.local_state(model)))

    def checkpoint_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what a checkpoint is written from: `[...]` shards if all ranks write, else whole. Collective."""
        return dict(self.gathered(tensors))

    def load_model_state(
        self, model: nn.Module, state: Mapping[str, torch.Tensor], *, keep: Collection[str] = ()
    ) -> None:
        """Copy `state`, tensors of whole shapes `[...]`, into the model but for the names in `keep`. Collective.

        A tied weight may be given under one of its names only. Raises ConfigError, which names the tensors that are
        missing, unexpected or of another shape.
        """
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
        by_storage: dict[tuple[int, torch.Size], list[str]] = {}
        for name, value in own.items():
            # Empty tensors all have the address 0.
            if value.numel():
                by_storage.setdefault((value.data_ptr(), value.shape), []).append(name)
        for tied in by_storage.values():
            present = [name for name in tied if name in given]
            given.update((name, given[present[0]]) for name in tied if present and name not in given)
        reshaped = [name for name in own.keys() & given.keys() if own[name].shape != given[name].shape]
        refuse_others(own.keys() - given.keys(), given.keys() - own.keys(), reshaped)
        # Quantized layers, which are kept, take no part of their state alone; all names were compared above.
        kept = set(keep) - state.keys()
        target.load_state_dict({name: value for name, value in given.items() if name not in kept}, strict=False)

    def describe(self) -> dict[str, Any]:
        """Return the part of a checkpoint's metadata that describes the strategy, as JSON."""
        return {"strategy": self.name}


def total_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Clip the gradients in place, and return their global L2 norm, `[]`, computed as by `clip_grad_norm_`."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradient if parameter.grad is not None]
    limit = max_norm if max_norm is not None and max_norm > 0 else None
    if _alike(gradients):  # torch sorts them by device and dtype, twice, which here takes longer than the arithmetic
        with torch.no_grad():
            norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            if limit is not None:
                # 1e-6 as in torch's own clipping, which the other branch calls.
                torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm
    norm = nn.utils.get_total_norm(gradients)
    if limit is not None:
        nn.utils.clip_grads_with_norm_(with_gradient, limit, norm)
    return norm


def _alike(gradients: list[torch.Tensor]) -> bool:
    """Return whether all are plain dense tensors of one device and dtype."""
    if not gradients:
        return False
    device, dtype = gradients[0].device, gradients[0].dtype
    if device.type not in ("cpu", "cuda"):
        return False
    return all(
        # A subclass of Tensor may define these operators its own way.
        type(grad) is torch.Tensor and grad.device == device and grad.dtype == dtype and grad.layout is torch.strided
        for grad in gradients
    )


def require_trainable(model: nn.Module) -> None:
    """Raise ConfigError for a model without a parameter that requires a gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        what = "No parameter of the model requires a gradient."
        raise ConfigError(what, field="model", value=type(model).__name__, remedy="Unfreeze what is to be trained.")


def cannot_predict_alone(argument: str, value: object) -> ConfigError:
    """Return the error for a process that is to predict by itself with a model that an argument divides."""
    what = "The model is divided over the processes, so none of them can predict by itself."
    remedy = f"Use predict(), or load the saved model into a Trainer without {argument}."
    return ConfigError(what, field=argument, value=value, remedy=remedy)


def refuse_others(missing: Iterable[str], unexpected: Iterable[str], reshaped: Iterable[str]) -> None:
    """Raise ConfigError when a checkpoint's names or shapes are not the model's."""
    for problem, found in (("lacks", missing), ("has unknown", unexpected), ("has another shape for", reshaped)):
        if names := sorted(found):
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            what = f"The checkpoint {problem} {shown}: it belongs to another model."
            remedy = "Build the model the checkpoint was written for, or start from the beginning."
            raise ConfigError(what, field="resume_from_checkpoint", remedy=remedy)


def match_names(
    own: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    keep: Collection[str],
    shape_of: Callable[[torch.Tensor], tuple[int, ...]],
) -> dict[str, str]:
    """The first name of every tensor ``[...]`` of `own` -> its name in `state`, which may be any that is tied."""
    names: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    stored = {same[0]: next((name for name in same if name in state), None) for same in names.values()}
    known = {first: name for first, name in stored.items() if name is not None}
    missing = [name for name, tensor in own.items() if names[id(tensor)][0] not in known and name not in keep]
    reshaped = [name for first, name in known.items() if read_spec(state, name)[1] != shape_of(own[first])]
    refuse_others(missing, state.keys() - own.keys(), reshaped)
    return known
