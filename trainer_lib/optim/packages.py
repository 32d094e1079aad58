"""Optimizers of other packages: the package, the class and the keyword arguments of each.

A package is imported only when the arguments ask for its optimizer; if it is absent, the error says how to install it.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib.arguments.enums import OptimizerNames
from trainer_lib.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments

_log = logging.getLogger(__name__)

# Defaults of transformers' Trainer, as all in this module.
_PROJECTED = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
_APOLLO = {"proj": "random", "scale_type": "channel", "scale": 1.0}
#: Name -> module, class, package, further settings of the projection.
_LOW_RANK: Mapping[OptimizerNames, tuple[str, str, str, Mapping[str, Any]]] = {
    OptimizerNames.GALORE_ADAMW: ("galore_torch", "GaLoreAdamW", "galore-torch", {}),
    OptimizerNames.GALORE_ADAMW_8BIT: ("galore_torch", "GaLoreAdamW8bit", "galore-torch", {}),
    OptimizerNames.GALORE_ADAFACTOR: ("galore_torch", "GaLoreAdafactor", "galore-torch", {}),
    OptimizerNames.APOLLO_ADAMW: ("apollo_torch", "APOLLOAdamW", "apollo-torch", _APOLLO),
}


#: An optimizer's class and its keyword arguments.
Served = tuple[Any, dict[str, Any]]


@dataclass
class OptimizerRequest:
    """An optimizer by name, with everything that its settings may depend on."""

    name: OptimizerNames
    args: TrainingArguments
    model: nn.Module | None  # None when it is not known
    settings: dict[str, Any] = field(default_factory=dict)  # the parsed `optim_args`
    used: set[str] = field(default_factory=set)  # those that `take` returned; the others go to the constructor

    def take(self, name: str, default: Any) -> Any:
        """Return a setting from `optim_args` (or its default) that the caller passes on itself, and mark it as used."""
        self.used.add(name)
        return self.settings.get(name, default)

    @property
    def lr(self) -> dict[str, Any]:
        """The learning rate as a keyword argument."""
        return {"lr": self.args.learning_rate}

    @property
    def betas(self) -> dict[str, Any]:
        """Adam's two decays as a keyword argument."""
        return {"betas": (self.args.adam_beta1, self.args.adam_beta2)}

    @property
    def adam(self) -> dict[str, Any]:
        """Learning rate, decays and epsilon as keyword arguments."""
        return {**self.lr, **self.betas, "eps": self.args.adam_epsilon}


def load(request: OptimizerRequest, module: str, name: str, package: str) -> Any:
    """Return the attribute `name` of a package's module. Raises MissingExtraError if it is not there."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        what = f"This optimizer needs the package {package} ({error})."
        remedy = f'Install it: pip install "{package}".'
        raise MissingExtraError(what, field="optim", value=request.name.value, remedy=remedy) from None


def _bitsandbytes(request: OptimizerRequest) -> Served:
    name = request.name.value
    # The first that is in the name: only one of them is.
    classes = {"ademamix": "AdEMAMix", "adam": "AdamW", "lion": "Lion", "rmsprop": "RMSprop"}
    family = next(known for known in classes if known in name)
    cls = load(request, "bitsandbytes.optim", classes[family], "bitsandbytes")
    kwargs: dict[str, Any] = {**request.lr, "optim_bits": 8 if "8bit" in name else 32}  # bits of the state
    if family == "rmsprop":
        return cls, kwargs
    kwargs["is_paged"] = "paged" in name
    if family == "lion":
        return cls, {**kwargs, **request.betas}
    if family == "adam":
        return cls, {**kwargs, **request.adam}
    args = request.args
    betas = tuple(
        float(request.take(beta, default))
        for beta, default in (("beta1", args.adam_beta1), ("beta2", args.adam_beta2), ("beta3", 0.9999))
    )
    alpha = float(request.take("alpha", 5.0))
    return cls, {**kwargs, "betas": betas, "alpha": alpha, "eps": float(request.take("eps", args.adam_epsilon))}


def _anyprecision(request: OptimizerRequest) -> Served:
    cls = load(request, "torchdistx.optimizers", "AnyPrecisionAdamW", "torchdistx")
    dtypes = {"momentum_dtype": "float32", "variance_dtype": "float32", "compensation_buffer_dtype": "bfloat16"}
    kwargs = {name: _dtype(name, request.take(name, default)) for name, default in dtypes.items()}
    summation = bool(request.take("use_kahan_summation", False))
    return cls, {**request.adam, **kwargs, "use_kahan_summation": summation}


def _dtype(field: str, name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        remedy = 'Give "float32".'
        raise ConfigError("torch has no such number format.", field=f"optim_args.{field}", value=name, remedy=remedy)
    return found


def adafactor(request: OptimizerRequest) -> Served:
    """The Adafactor of transformers with the arguments of its Trainer, so that the schedule sets the rate."""
    try:
        cls = load(request, "transformers.optimization", "Adafactor", "transformers")
    except MissingExtraError:
        _log.warning("transformers is not installed: torch's Adafactor trains, which is another algorithm.")
        return torch.optim.Adafactor, request.lr
    return cls, {**request.lr, "scale_parameter": False, "relative_step": False}


def _schedule_free(request: OptimizerRequest) -> Served:
    class_name, adam, warmup = {
        # RAdam needs no warm-up, so its class takes none.
        OptimizerNames.SCHEDULE_FREE_RADAM: ("RAdamScheduleFree", True, False),
        OptimizerNames.SCHEDULE_FREE_ADAMW: ("AdamWScheduleFree", True, True),
        OptimizerNames.SCHEDULE_FREE_SGD: ("SGDScheduleFree", False, True),
    }[request.name]
    cls = load(request, "schedulefree", class_name, "schedulefree>=1.4")
    args = request.args
    kwargs = {**(request.adam if adam else request.lr), "weight_decay": args.weight_decay}
    kwargs |= {"weight_lr_power": float(request.take("weight_lr_power", 2.0)), "r": float(request.take("r", 0.0))}
    if warmup:
        # The number of training steps is not known here, so a share of it cannot be resolved.
        if 0 < args.warmup_steps < 1:
            what = f"The optimizer {request.name} warms up by itself and needs a number of steps."
            remedy = "Give a number of steps instead of a share."
            raise ConfigError(what, field="warmup_steps", value=args.warmup_steps, remedy=remedy)
        kwargs["warmup_steps"] = int(args.warmup_steps)
    return cls, kwargs


_TORCHAO: Mapping[str, Any] = {"block_size": 256, "bf16_stochastic_round": False}
_ROUNDED: Mapping[str, Any] = {"bf16_stochastic_round": True}
_GROK: Mapping[str, Any] = {
    "alpha_init": 0.98,
    "lamb": 2.0,
    "gamma": 0.1,
    "grokking_signal_decay_rate": 0.1,
    "gradient_clipping": 1.0,
}
#: Name -> module, class, package, whether it takes Adam's settings, further settings with their defaults.
_PLAIN: Mapping[OptimizerNames, tuple[str, str, str, bool, Mapping[str, Any]]] = {
    OptimizerNames.ADAMW_TORCH_NPU_FUSED: ("torch_npu.optim", "NpuFusedAdamW", "torch_npu", True, {}),
    OptimizerNames.ADAMW_TORCH_4BIT: ("torchao.optim", "AdamW4bit", "torchao>=0.11", True, _TORCHAO),
    OptimizerNames.ADAMW_TORCH_8BIT: ("torchao.optim", "AdamW8bit", "torchao>=0.11", True, _TORCHAO),
    OptimizerNames.ADAMW_TORCH_BF16_SR: ("torchao.optim", "_AdamW", "torchao>=0.11", True, _ROUNDED),
    OptimizerNames.GROKADAMW: ("grokadamw", "GrokAdamW", "grokadamw", False, _GROK),
    OptimizerNames.STABLE_ADAMW: ("optimi", "StableAdamW", "torch-optimi", True, {}),
    OptimizerNames.LOMO: ("lomo_optim", "Lomo", "lomo-optim", False, {}),
    OptimizerNames.ADALOMO: ("lomo_optim", "AdaLomo", "lomo-optim", False, {}),
}


def _plain(request: OptimizerRequest) -> Served:
    module, class_name, package, is_adam, further = _PLAIN[request.name]
    cls = load(request, module, class_name, package)
    if request.name is OptimizerNames.ADAMW_TORCH_BF16_SR:
        _check_bfloat16(request)
        cls = _round_alike(cls, request.args.seed)
    kwargs: dict[str, Any] = {**(request.adam if is_adam else request.lr)}
    for name, default in further.items():
        value = request.take(name, default)
        kwargs[name] = float(value) if isinstance(default, float) else value
    if request.name is OptimizerNames.STABLE_ADAMW:
        kwargs["weight_decay"] = request.args.weight_decay
    if module == "lomo_optim":
        kwargs["model"] = _model(request)
    return cls, kwargs


def _check_bfloat16(request: OptimizerRequest) -> None:
    """Raise ConfigError for a trained parameter in another format: its state would be as large as ever."""
    for name, parameter in [] if request.model is None else request.model.named_parameters():
        if parameter.requires_grad and parameter.dtype is not torch.bfloat16:
            what = f"This rounds weights in bfloat16, and {name} is {parameter.dtype}."
            remedy = "Load the model in bfloat16 (model.dtype: bfloat16 in a spec), or give adamw_torch."
            raise ConfigError(what, field="optim", value=request.name.value, remedy=remedy)


def _round_alike(cls: Any, seed: int) -> Any:
    """The class of an optimizer whose draws follow from the seed and the step: copies of a parameter stay equal."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        done = next((int(state["step"]) for state in self.state.values() if "step" in state), 0)
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            torch.manual_seed((seed << 32 ^ done) & 0x7FFFFFFFFFFFFFFF)
            return cls.step(self, closure)

    return type(cls.__name__, (cls,), {"step": step, "__module__": cls.__module__})


def _low_rank(request: OptimizerRequest) -> Served:
    module, class_name, package, further = _LOW_RANK[request.name]
    cls = load(request, module, class_name, package)
    own = {key: request.take(key, default) for key, default in {**_PROJECTED, **further}.items()}
    kwargs = request.adam
    if request.name is OptimizerNames.GALORE_ADAFACTOR:  # the schedule sets the rate, not Adafactor itself
        kwargs = {**request.lr, "scale_parameter": False, "relative_step": False}
    return cls, {**kwargs, "params": _low_rank_groups(request, own)}


def _model(request: OptimizerRequest) -> nn.Module:
    if request.model is None:
        remedy = "Pass the model as well."
        raise ConfigError("This optimizer needs the model.", field="optim", value=request.name.value, remedy=remedy)
    return request.model


def _low_rank_groups(request: OptimizerRequest, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a group of the target modules' weights, projected with the settings `own`, and one of everything else."""
    model, targets = _model(request), request.args.optim_target_modules
    if not targets:
        what = f"The optimizer {request.name} needs to know the modules whose gradients it projects."
        remedy = 'Give names of modules, a pattern, or "all-linear".'
        raise ConfigError(what, field="optim_target_modules", value="none", remedy=remedy)
    # Weights of linear layers only: a projection needs a matrix.
    weights = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and matches(targets, name)
    }
    if not weights:
        what = "The names match no linear layer of the model."
        remedy = 'Give names of modules, a pattern, or "all-linear".'
        raise ConfigError(what, field="optim_target_modules", value=str(targets), remedy=remedy)
    parameters = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    rest = {"params": [param for name, param in parameters if name not in weights]}
    projected = {"params": [param for name, param in parameters if name in weights], **own}
    return [group for group in (rest, projected) if group["params"]]


def matches(targets: str | list[str], module_name: str) -> bool:
    """Whether a module, by its dotted name, is a target of `optim_target_modules`.

    `targets`: "all-linear", a regular expression for the whole name, or a list of expressions or parts of a name.
    """
    if isinstance(targets, str):
        return targets.replace("_", "-") == "all-linear" or re.fullmatch(targets, module_name) is not None
    return any(target in module_name or re.fullmatch(target, module_name) for target in targets)


_BITSANDBYTES = (
    *(OptimizerNames.ADAMW_BNB, OptimizerNames.ADAMW_8BIT, OptimizerNames.PAGED_ADAMW, OptimizerNames.PAGED_ADAMW_8BIT),
    *(OptimizerNames.ADEMAMIX, OptimizerNames.ADEMAMIX_8BIT, OptimizerNames.PAGED_ADEMAMIX),
    *(OptimizerNames.PAGED_ADEMAMIX_8BIT, OptimizerNames.LION, OptimizerNames.LION_8BIT, OptimizerNames.PAGED_LION),
    *(OptimizerNames.PAGED_LION_8BIT, OptimizerNames.RMSPROP_BNB, OptimizerNames.RMSPROP_8BIT),
    OptimizerNames.RMSPROP_32BIT,
)

PACKAGED: Mapping[OptimizerNames, Callable[[OptimizerRequest], Served]] = {
    **dict.fromkeys(_BITSANDBYTES, _bitsandbytes),
    **dict.fromkeys(_PLAIN, _plain),
    OptimizerNames.ADAMW_ANYPRECISION: _anyprecision,
    OptimizerNames.SCHEDULE_FREE_RADAM: _schedule_free,
    OptimizerNames.SCHEDULE_FREE_ADAMW: _schedule_free,
    OptimizerNames.SCHEDULE_FREE_SGD: _schedule_free,
    **dict.fromkeys(_LOW_RANK, _low_rank),
}
