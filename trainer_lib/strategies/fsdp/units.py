"""The modules of a model that are gathered as one unit, chosen by class or by size."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from trainer_lib.arguments.configs.fsdp_config import FsdpSettings
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

_CLASSES = "fsdp_config.transformer_layer_cls_to_wrap"


def find_units(model: nn.Module, settings: FsdpSettings) -> list[nn.Module]:
    """The modules in `model` that are gathered one by one, inner ones first; the rest is gathered with `model`."""
    if settings.wrap == "whole" or (settings.wrap == "known" and not getattr(model, "_no_split_modules", None)):
        return []
    outside = _shared_beyond(model)
    if settings.wrap == "size":
        return _by_size(model, settings.min_num_params, outside)
    names = settings.wrap_classes or _no_split_classes(model)
    units = [module for module in model.modules() if module is not model and type(module).__name__ in names]
    _check_classes(model, units, settings.wrap_classes)
    for unit in units:
        if tied := outside.get(id(unit)):
            what = f"This class shares {tied} with another part of the model, so it cannot be gathered by itself."
            remedy = "Leave the class out: tied weights are then gathered with the whole model."
            raise ConfigError(what, field=_CLASSES, value=type(unit).__name__, remedy=remedy)
    # Reversed, because `modules` yields the outer ones first.
    return units[::-1]


def _no_split_classes(model: nn.Module) -> tuple[str, ...]:
    given: Any = getattr(model, "_no_split_modules", None)
    if not given:
        what = f"The model {type(model).__name__} does not say which of its layers belong together (_no_split_modules)."
        remedy = "Name the class of its layers, or give min_num_params."
        raise ConfigError(what, field=_CLASSES, value="none", remedy=remedy)
    return tuple(given)


def _check_classes(model: nn.Module, units: list[nn.Module], asked: Collection[str]) -> None:
    present = {type(unit).__name__ for unit in units}
    missing = next((name for name in asked if name not in present), None)
    if missing is None and units:
        return
    inside = sorted({type(module).__name__ for module in model.modules() if module is not model})
    what = f"The model {type(model).__name__} has no module of that class."
    remedy = suggestion(missing or "", inside)
    raise ConfigError(what, field=_CLASSES, value=missing or ", ".join(_no_split_classes(model)), remedy=remedy)


def _by_size(model: nn.Module, minimum: int, outside: dict[int, str]) -> list[nn.Module]:
    """Choose from the leaves up: a module is a unit if at least `minimum` of its elements are in no unit yet."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> set[nn.Parameter]:
        left = set(module.parameters(recurse=False))
        for child in module.children():
            left |= visit(child)
        # A container has no forward, so nothing would gather its parameters.
        container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        if module is model or container or id(module) in outside or sum(param.numel() for param in left) < minimum:
            return left
        units.append(module)
        return set()

    visit(model)
    return units


def _shared_beyond(model: nn.Module) -> dict[int, str]:
    """Return, by id of a module, the name of a parameter in it that is also used outside it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [aliases for aliases in names.values() if len(aliases) > 1]
    found: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for aliases in tied if prefix else ():
            inside = [name for name in aliases if name.startswith(f"{prefix}.")]
            if inside and len(inside) < len(aliases):
                found[id(module)] = inside[0]
    return found


def find_ignored(model: nn.Module, patterns: Iterable[str]) -> set[nn.Parameter]:
    """The parameters that stay whole on every process: of modules that match, and frozen 0-dim ones.

    Raises ConfigError for a pattern that matches no module, and for a trained one, whose gradient nothing would
    exchange.
    """
    found: set[nn.Parameter] = {param for param in model.parameters() if param.ndim == 0 and not param.requires_grad}
    for pattern in patterns:
        modules = [module for name, module in model.named_modules() if name and re.fullmatch(pattern, name)]
        if not modules:
            what = "This matches no module of the model."
            remedy = "Give a module's whole name, or a regular expression that matches it."
            raise ConfigError(what, field="fsdp_config.ignored_modules", value=pattern, remedy=remedy)
        found.update(param for module in modules for param in module.parameters())
    for name, param in model.named_parameters():
        if param in found and param.requires_grad:
            what = f"The parameter {name} is trained, but its gradient would not be exchanged."
            remedy = "Freeze the parameter, or do not ignore its module."
            raise ConfigError(what, field="fsdp_config.ignored_modules", value=list(patterns), remedy=remedy)
        if param.ndim == 0 and param not in found:
            what = f"The parameter {name} has no dimension that could be sharded."
            remedy = "Give the parameter the shape [1], or freeze it."
            raise ConfigError(what, field="model", value=type(model).__name__, remedy=remedy)
    return found
