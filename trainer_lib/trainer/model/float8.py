"""Linear layers that multiply in float8, by torchao."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.arguments.configs.parallelism_config import read_layout
from trainer_lib.errors import ConfigError, MissingExtraError


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
        raise MissingExtraError(
            f"The package torchao is needed ({error}).",
            field="fp8",
            value=args.fp8,
            remedy='Install it: pip install "torchao>=0.11".',
        ) from error


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
