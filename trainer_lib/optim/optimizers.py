"""Optimizers by name: what serves each, and the keyword arguments that follow from the training arguments.

torch's own are served as they are (`adafactor` is torch's: it scales the learning rate by the parameter's size), `lion`
and `muon` by small classes of ours, the rest by the packages of `trainer_lib.optim.packages`, imported when asked for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib.arguments import OptimizerNames, TrainingArguments
from trainer_lib.errors import ConfigError
from trainer_lib.optim.decay import get_decay_parameter_names, parameter_groups
from trainer_lib.optim.lion import Lion
from trainer_lib.optim.muon import MuonAdamW, parameters_for_adamw
from trainer_lib.optim.packages import PACKAGED
from trainer_lib.optim.request import OptimizerRequest, Served
from trainer_lib.suggestions import suggestion

_TORCH: Mapping[OptimizerNames, str] = {
    OptimizerNames.ADAFACTOR: "Adafactor",
    OptimizerNames.SGD: "SGD",
    OptimizerNames.ADAGRAD: "Adagrad",
    OptimizerNames.RMSPROP: "RMSprop",
    OptimizerNames.ADADELTA: "Adadelta",
    OptimizerNames.ASGD: "ASGD",
    OptimizerNames.RPROP: "Rprop",
}
_TORCH_ADAMS: Mapping[OptimizerNames, str] = {
    OptimizerNames.ADAMW_TORCH: "AdamW",
    OptimizerNames.ADAMW_TORCH_FUSED: "AdamW",
    OptimizerNames.ADAM: "Adam",
    OptimizerNames.ADAMAX: "Adamax",
    OptimizerNames.NADAM: "NAdam",
    OptimizerNames.RADAM: "RAdam",
}


def create_optimizer_cls_and_kwargs(
    args: TrainingArguments, model: nn.Module | None = None
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and keyword arguments that `args` ask for (`Trainer.get_optimizer_cls_and_kwargs`).

    Args:
        args: read are `optim`, `optim_args`, `learning_rate`, the adam_* fields, and for some `weight_decay`,
            `warmup_steps`, `optim_target_modules`.
        model: needed by the optimizers that treat some layers differently (muon, galore, apollo, lomo).

    Returns:
        the class, and keyword arguments without the parameters - except where they come with settings of their own:
        then "params" (or "model") is among them. `build_optimizer` handles both.

    Raises:
        ConfigError: unknown name, or a setting that the optimizer does not have.
        MissingExtraError: the package that serves it is not installed.
    """
    try:
        name = OptimizerNames(args.optim)
    except ValueError:
        options = [each.value for each in OptimizerNames]
        remedy = suggestion(str(args.optim), options)
        raise ConfigError("is no optimizer we know.", field="optim", value=str(args.optim), remedy=remedy) from None
    request = OptimizerRequest(name, args, model, parse_optim_args(args.optim_args))
    served = _serve(request)
    extra = {key: value for key, value in request.settings.items() if key not in request.used}
    _check_settings(name, served.cls, extra)
    return served.cls, {**served.kwargs, **extra}


def build_optimizer(
    args: TrainingArguments,
    model: nn.Module,
    *,
    cls_and_kwargs: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None,
    decay_names: list[str] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer over the model's trainable parameters, decaying and not in groups of their own.

    Args:
        args: the training arguments.
        model: whose parameters it updates.
        cls_and_kwargs: what `create_optimizer_cls_and_kwargs` gave, or a user's own choice.
        decay_names: names of the parameters that decay; `get_decay_parameter_names` when not given.

    Raises:
        ConfigError: the model has nothing to train; see also `create_optimizer_cls_and_kwargs`.
    """
    cls, given = cls_and_kwargs or create_optimizer_cls_and_kwargs(args, model)
    kwargs = dict(given)
    if "optimizer_dict" in kwargs:
        raise ConfigError(
            "an optimizer per parameter is not served.", field="optimizer_cls_and_kwargs", remedy="Give one optimizer."
        )
    names = get_decay_parameter_names(model) if decay_names is None else decay_names
    groups = kwargs.pop("params", None) or parameter_groups(model, args.weight_decay, names)
    if not groups:
        raise ConfigError(
            "has no trainable parameters.",
            field="model",
            value=type(model).__name__,
            remedy="Set requires_grad on what shall be trained.",
        )
    if "model" in kwargs:
        return cls(**kwargs)
    return cls(groups, **kwargs)


def parse_optim_args(text: str | None) -> dict[str, Any]:
    """`"momentum=0.9,nesterov=true,betas=(0.9,0.95)"` as a dictionary of numbers, truth values, None, tuples and texts.

    Raises:
        ConfigError: a part without `=`, or a name given twice.
    """
    settings: dict[str, Any] = {}
    for part in re.split(r",(?![^(\[]*[)\]])", text or ""):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise ConfigError("is not name=value.", field="optim_args", value=part.strip(), remedy='Write "a=1,b=2".')
        if name in settings:
            raise ConfigError("is given twice.", field="optim_args", value=name, remedy="Keep one of them.")
        settings[name] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if text[:1] in "([" and text[-1:] in ")]":
        return tuple(_value(part.strip()) for part in text[1:-1].split(",") if part.strip())
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _serve(request: OptimizerRequest) -> Served:
    name = request.name
    if name in _TORCH:
        return Served(getattr(torch.optim, _TORCH[name]), request.lr)
    if name in _TORCH_ADAMS:
        fused = {"fused": True} if name is OptimizerNames.ADAMW_TORCH_FUSED else {}
        return Served(getattr(torch.optim, _TORCH_ADAMS[name]), {**request.adam, **fused})
    if name is OptimizerNames.LION_TORCH:
        return Served(Lion, {**request.lr, **request.betas})
    if name is OptimizerNames.MUON:
        return Served(MuonAdamW, {**request.adam, "for_adamw": parameters_for_adamw(request.model)})
    return PACKAGED[name](request)


def _check_settings(name: OptimizerNames, cls: Any, settings: Mapping[str, Any]) -> None:
    parameters = inspect.signature(cls.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    options = [each for each in parameters if each not in ("self", "params", "lr", "for_adamw")]
    for setting in settings:
        if setting not in options:
            raise ConfigError(
                f"is no setting of {name}.",
                field=f"optim_args.{setting}",
                value=settings[setting],
                remedy=suggestion(setting, options) if options else "It has none: remove it.",
            )
