"""Optimizers by name: the class behind each, and its keyword arguments from the training arguments.

torch serves its own optimizers, small classes of `trainer_lib.optim` serve `lion` and `muon`, and the packages of
`trainer_lib.optim.packages` the rest.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_lib import xla
from trainer_lib.arguments import OptimizerNames, TrainingArguments
from trainer_lib.errors import ConfigError
from trainer_lib.optim.decay import get_decay_parameter_names, parameter_groups
from trainer_lib.optim.lion import Lion
from trainer_lib.optim.muon import MuonAdamW, parameters_for_adamw
from trainer_lib.optim.packages import PACKAGED, adafactor
from trainer_lib.optim.request import OptimizerRequest, Served
from trainer_lib.suggestions import suggestion

_log = logging.getLogger(__name__)

# These take the learning rate alone; the next table's take Adam's decays and epsilon as well.
_TORCH: Mapping[OptimizerNames, str] = {
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
    """Return the optimizer's class and keyword arguments that `args` ask for (`Trainer.get_optimizer_cls_and_kwargs`).

    Args:
        args: the training arguments `optim`, `optim_args`, `learning_rate`, the adam_* fields, and for some optimizers
            `weight_decay`, `warmup_steps` and `optim_target_modules`.
        model: the model, for the optimizers that treat some layers differently (muon, galore, apollo, lomo).

    Returns:
        the class, and its keyword arguments. They include "params" (or "model") only for an optimizer whose parameters
        have settings of their own; `build_optimizer` handles both forms.

    Raises:
        ConfigError: no optimizer has the name, or the optimizer does not have a setting.
        MissingExtraError: the package that serves it is not installed.
    """
    try:
        name = OptimizerNames(args.optim)
    except ValueError:
        options = [each.value for each in OptimizerNames]
        remedy = suggestion(str(args.optim), options)
        raise ConfigError("No optimizer has this name.", field="optim", value=str(args.optim), remedy=remedy) from None
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
    """Build an optimizer over the model's trainable parameters, in one group that decays and one that does not.

    Args:
        args: the training arguments.
        model: the model whose parameters it updates.
        cls_and_kwargs: the result of `create_optimizer_cls_and_kwargs`, or a user's own choice.
        decay_names: names of the parameters that decay; those of `get_decay_parameter_names` when not given.

    Raises:
        ConfigError: the model has no trainable parameters, or `create_optimizer_cls_and_kwargs` refuses the arguments.
        MissingExtraError: the package that serves the optimizer is not installed.
    """
    cls, given = cls_and_kwargs or create_optimizer_cls_and_kwargs(args, model)
    kwargs = dict(given)
    if isinstance(kwargs.get("optimizer_dict"), Mapping):
        raise ConfigError(
            "One optimizer per parameter is not supported.",
            field="optimizer_cls_and_kwargs",
            remedy="Give one optimizer; a list of parameter groups under `optimizer_dict` is taken.",
        )
    names = get_decay_parameter_names(model) if decay_names is None else decay_names
    # A low-rank optimizer has made its own groups; overrides name theirs as the reference does.
    own = kwargs.pop("params", None) or kwargs.pop("optimizer_dict", None)
    groups = own or parameter_groups(model, args.weight_decay, names)
    if not groups:
        raise ConfigError(
            "The model has no trainable parameters.",
            field="model",
            value=type(model).__name__,
            remedy="Set requires_grad on the parameters to train.",
        )
    if "model" in kwargs:  # LOMO's optimizers take the whole model
        return cls(**kwargs)
    return cls(groups, **kwargs)


def parse_optim_args(text: str | None) -> dict[str, Any]:
    """Parse `"momentum=0.9,nesterov=true,betas=(0.9,0.95)"` into a dictionary.

    Values become numbers, truth values, None or tuples of them; everything else stays text.

    Raises:
        ConfigError: a part has no `=`, or a name is given twice.
    """
    settings: dict[str, Any] = {}
    # A comma inside of parentheses or brackets separates the items of a tuple.
    for part in re.split(r",(?![^(\[]*[)\]])", text or ""):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise ConfigError(
                "This part is not name=value.", field="optim_args", value=part.strip(), remedy='Write "a=1,b=2".'
            )
        if name in settings:
            raise ConfigError("The setting is given twice.", field="optim_args", value=name, remedy="Keep one of them.")
        settings[name] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if text[:1] in "([" and text[-1:] in ")]":
        return tuple(_value(part.strip()) for part in text[1:-1].split(",") if part.strip())
    for number in (int, float):  # in this order: float would also take whole numbers
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
        fused = {"fused": True} if name is OptimizerNames.ADAMW_TORCH_FUSED and _has_fused(request) else {}
        return Served(getattr(torch.optim, _TORCH_ADAMS[name]), {**request.adam, **fused})
    if name is OptimizerNames.LION_TORCH:
        return Served(Lion, {**request.lr, **request.betas})
    if name is OptimizerNames.MUON:
        return Served(MuonAdamW, {**request.adam, "for_adamw": parameters_for_adamw(request.model)})
    return adafactor(request) if name is OptimizerNames.ADAFACTOR else PACKAGED[name](request)


def _has_fused(request: OptimizerRequest) -> bool:
    """Whether torch's fused AdamW serves the device and the parameters; a line is logged when it does not."""
    parameters = [] if request.model is None else request.model.parameters()
    # torch's kernel walks through memory: it would change what lies between the elements of a view, without an error.
    if any(param.stride() != torch.empty_like(param, device="meta").stride() for param in parameters):
        _log.warning("A parameter is a view with gaps in memory: torch's AdamW that is not fused trains.")
        return False
    if request.args.use_cpu or not xla.is_used():
        return True
    _log.info("torch's fused AdamW does not serve XLA devices: its AdamW that is not fused trains.")
    return False


def _check_settings(name: OptimizerNames, cls: Any, settings: Mapping[str, Any]) -> None:
    parameters = inspect.signature(cls.__init__).parameters
    # A constructor that takes **kwargs has to refuse unknown settings itself.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    options = [each for each in parameters if each not in ("self", "params", "lr", "for_adamw")]
    for setting in settings:
        if setting not in options:
            raise ConfigError(
                f"The optimizer {name} has no such setting.",
                field=f"optim_args.{setting}",
                value=settings[setting],
                remedy=suggestion(setting, options) if options else "It has none: remove it.",
            )
