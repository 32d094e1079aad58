"""One process, one XLA device: recorded operations run at the ends of micro-steps and steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from trainer_lib.distributed import xla
from trainer_lib.errors import ConfigError
from trainer_lib.strategies.base import Strategy

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments


class XlaStrategy(Strategy):
    """Trains the model as it is, and marks the steps of torch_xla."""

    _after_step: Any = None
    _before_forward: Any = None

    @override
    def resolve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return both as they are; from now on a step of the optimizer is run when it ends."""
        self.release()
        self._after_step = optimizer.register_step_post_hook(xla.mark_step)
        return model, optimizer

    @override
    def release(self) -> None:
        if self._after_step is not None:
            self._after_step.remove()
            self._after_step = None

    @override
    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        super().backward(loss, gradient)
        xla.mark_step()  # else the graph would hold all micro-steps of a step

    @override
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        norm = super().clip_grad_norm(parameters, max_norm)
        xla.mark_step()  # the host reads the norm next: alone, it would be computed twice
        return norm

    @override
    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        """Return the model; until `after_inference` every forward first runs what the one before it recorded."""
        self.after_inference(model)
        self._before_forward = model.register_forward_pre_hook(xla.mark_step)
        return model

    @override
    def after_inference(self, model: nn.Module) -> None:
        if self._before_forward is not None:
            self._before_forward.remove()
            self._before_forward = None


def refuse_unshown(args: TrainingArguments) -> None:
    """Raise ConfigError for arguments whose engines do not serve XLA devices."""
    found: dict[str, tuple[Any, str]] = {
        "fsdp": (args.fsdp, "torch's FSDP does not serve XLA devices."),
        "deepspeed": (args.deepspeed, "DeepSpeed does not serve XLA devices."),
        "torch_compile": (args.torch_compile, "An XLA device compiles every step by itself."),
        "fp16": (args.fp16, "Training in float16 is not supported on XLA devices."),
    }
    for field, (value, message) in found.items():
        if value:
            remedy = "Use bf16=True, or neither." if field == "fp16" else "Remove it, or set use_cpu=True."
            raise ConfigError(message, field=field, value=value, remedy=remedy)
