"""Number formats: fp32, autocast to bf16 or fp16 with the loss scaler that fp16 needs, float8 of linear layers.

This is mixed precision: weights stay in the model's own dtype, and autocast chooses a dtype per operation. A checkpoint
keeps the scaler's state, a handful of numbers, as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.parallelism_config import read_layout
from trainer_lib.errors import ConfigError, MissingExtraError


class Precision:
    """The number format of forward passes, "fp32", "bf16" or "fp16", and the scaling of gradients.

    Attributes:
        dtype: the autocast dtype; None for fp32.
        scaler: the loss scaler; None unless fp16.
    """

    def __init__(self, name: str, dtype: torch.dtype | None, device: torch.device) -> None:
        self.name = name
        self.dtype = dtype
        self._device, self._device_type = device, device.type
        # Only fp16 needs scaling: bf16 has the exponent range of fp32, so its gradients do not underflow.
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def autocast(self, *, cache_enabled: bool = True) -> AbstractContextManager[Any]:
        """The context of a forward pass, none for fp32; `cache_enabled` keeps the cast copies of weights in it."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=self.dtype, cache_enabled=cache_enabled)

    def forget_step(self) -> None:
        """Forget what the scaler recorded of a step that did not end; the scale stays."""
        if self.scaler is None:
            return
        self.scaler.scale(torch.zeros((), device=self._device))  # `update` needs the scale on the device
        self.scaler.update(self.scaler.get_scale())

    def scaler_state(self) -> dict[str, float] | None:
        """The scaler as JSON (scale, growth and backoff factors, growth interval and tracker); None without one."""
        return None if self.scaler is None else {name: float(v) for name, v in self.scaler.state_dict().items()}

    def load_scaler_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `scaler_state` returned; None, from a checkpoint of another precision, keeps the first scale."""
        if self.scaler is None or not state:
            return
        # The scaler compares these two as integers; a checkpoint holds floats.
        integers = ("growth_interval", "_growth_tracker")
        self.scaler.load_state_dict({name: int(v) if name in integers else float(v) for name, v in state.items()})


def create_precision(args: TrainingArguments, device: torch.device) -> Precision:
    """Create the precision that the arguments select. Raises ConfigError if the device does not support it."""
    if args.bf16:
        if device.type == "cuda" and not torch.cuda.is_bf16_supported():
            remedy = "Use fp16=True, or neither."
            raise ConfigError("This GPU does not support bfloat16.", field="bf16", value=True, remedy=remedy)
        return Precision("bf16", torch.bfloat16, device)
    if args.fp16:
        if device.type == "mps":
            remedy = "Use bf16=True, or neither."
            raise ConfigError("Training in float16 is not supported on MPS.", field="fp16", value=True, remedy=remedy)
        return Precision("fp16", torch.float16, device)
    return Precision("fp32", None, device)


def apply_tf32(args: TrainingArguments) -> None:
    """Allow or forbid TF32 matrix products in this process; `tf32=None` leaves torch's setting."""
    if args.tf32 is not None:
        # Two switches, because cuDNN has one of its own for convolutions.
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
        torch.backends.cudnn.allow_tf32 = args.tf32


def back_up_weights(model: nn.Module) -> Callable[[], None]:
    """Copy every floating-point parameter and buffer to the host; returns a function that restores them, bit for bit.

    Used before a model is cast as a whole. A ``state_dict`` would not do: it misses the buffers that are not persistent
    (a decoder's rotary frequencies), and these lose digits in the cast like all others.
    """
    parameters = [(param, param.data.to("cpu")) for param in model.parameters() if param.is_floating_point()]
    buffers = [
        (module, name, buffer.device, buffer.to("cpu"))
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]

    def restore() -> None:
        for parameter, kept in parameters:
            parameter.data = kept.to(parameter.device)  # in place: the optimizer holds the same parameters
        for module, name, device, kept in buffers:
            setattr(module, name, kept.to(device))

    return restore


def full_eval_dtype(args: TrainingArguments) -> torch.dtype | None:
    """The dtype to which the whole model is cast for an evaluation outside training; None keeps its own."""
    if args.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if args.fp16_full_eval else None


def check_float8(model: nn.Module, args: TrainingArguments) -> None:
    """Raise ConfigError where float8 would have no place, and MissingExtraError without torchao."""
    layout, why = read_layout(args), ""
    if layout is not None and layout.tensor > 1:
        why, remedy = "Divided layers multiply in their own format.", "Divide by shard instead of tensor."
    elif args.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        why, remedy = "This GPU has no float8.", "Remove it: bf16 is served."
    elif not _float8_layers(model):
        why = "The model has no linear layer for it: both sizes multiples of 16, and neither the first nor the last."
        remedy = "Remove it."
    if why:
        raise ConfigError(why, field="fp8", value=args.fp8, remedy=remedy)
    _torchao_float8(args)


def _torchao_float8(args: TrainingArguments) -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        what = f"The package torchao is needed ({error})."
        remedy = 'Install it: pip install "torchao>=0.11".'
        raise MissingExtraError(what, field="fp8", value=args.fp8, remedy=remedy) from error


def _float8_layers(model: nn.Module) -> list[str]:
    """The linear layers that multiply in float8: those that accelerate chooses, without the first and the last."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name, layer in layers[1:-1] if layer.in_features % 16 == 0 and layer.out_features % 16 == 0]


def use_float8(model: nn.Module, args: TrainingArguments) -> None:
    """Let linear layers multiply in float8, with scales that each call works out: nothing to store. CPUs emulate it."""
    torchao = _torchao_float8(args)
    recipe = torchao.Float8LinearConfig.from_recipe_name(args.fp8)
    config = dataclasses.replace(recipe, emulate=args.device.type != "cuda", pad_inner_dim=True)
    chosen = set(_float8_layers(model))
    # By its exact class: a layer that was converted, or is quantised, is a subclass.
    torchao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda layer, name: name in chosen and type(layer) is nn.Linear
    )
