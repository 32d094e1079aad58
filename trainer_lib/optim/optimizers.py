"""Optimizers by name: the class behind each, and its keyword arguments from the training arguments.

torch serves its own optimizers, small classes of `trainer_lib.optim` serve `lion` and `muon`, and the packages of
`trainer_lib.optim.packages` the rest.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from trainer_lib.arguments import OptimizerNames, TrainingArguments
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError
from trainer_lib.optim.packages import PACKAGED, OptimizerRequest, Served, adafactor

_NORM_LAYERS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # batch and instance norms of every dimension
)
# The reference's patterns, and names with a number (norm1, layer_norm2), which it misses.
_NAMES = re.compile(r"bias|layernorm|layer_norm|rmsnorm|(^|\.)norm(\d*)($|\.)|_norm($|\.)", re.IGNORECASE)


def get_decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that decay, in the model's order.

    Left out are parameters whose name says bias or norm, and those of norm layers: torch's own, and classes whose name
    contains "norm", because many models bring their own.
    """
    in_norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NORM_LAYERS) or "norm" in type(module).__name__.lower()
        # Its own parameters only: a class such as PreNorm contains the whole layer.
        for name, _ in module.named_parameters(recurse=False)
    }
    return [name for name, _ in model.named_parameters() if name not in in_norms and not _NAMES.search(name)]


def parameter_groups(model: nn.Module, weight_decay: float, decay_names: Collection[str]) -> list[dict[str, Any]]:
    """Divide the trainable parameters into a group that decays and one that does not; leave out an empty group."""
    wanted = set(decay_names)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[tuple[list[torch.nn.Parameter], float]] = [
        ([parameter for name, parameter in trainable if name in wanted], weight_decay),
        ([parameter for name, parameter in trainable if name not in wanted], 0.0),
    ]
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


# Muon for the hidden matrices, AdamW for everything else, as one optimizer.
#
# Muon orthogonalises the momentum of a matrix (Jordan et al., https://kellerjordan.github.io/posts/muon/). AdamW
# updates the vectors, the embeddings and the output head, as Muon's authors recommend. Muon's step is scaled to match
# AdamW's (`match_rms_adamw`, arXiv:2502.16982), so that both share one learning rate.


# Usual names of output heads: like embeddings they are matrices, but their rows are classes.
_HEADS = ("lm_head", "output_projection", "embed_out")


def parameters_for_adamw(model: nn.Module | None) -> list[nn.Parameter]:
    """Return the matrices of `model` that Muon should not update: embeddings and output heads."""
    if model is None:
        return []
    return [
        parameter
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or name.rpartition(".")[2] in _HEADS
        for parameter in module.parameters(recurse=False)
    ]


class MuonAdamW(Optimizer):
    """torch's Muon and AdamW over one list of parameter groups; each group's "algorithm" names its optimizer.

    Args:
        params: parameters, or groups of them; a group with matrices and other parameters is split.
        lr, weight_decay: settings of both; the decay is per optimizer step.
        momentum, nesterov, ns_steps: settings of Muon; `ns_steps` counts Newton-Schulz iterations.
        betas, eps: settings of AdamW.
        for_adamw: matrices that AdamW updates all the same.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        for_adamw: Iterable[nn.Parameter] = (),
    ) -> None:
        # By id, because `in` on a list of tensors compares their values.
        plain = {id(parameter) for parameter in for_adamw}
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
        groups = []
        items = list(params)
        for given in items if items and isinstance(items[0], dict) else [{"params": items}]:
            held = list(given["params"])
            both = {"lr": lr, "weight_decay": weight_decay, **given}
            matrices = [param for param in held if param.ndim == 2 and id(param) not in plain]
            rest = [param for param in held if param.ndim != 2 or id(param) in plain]
            if matrices:
                groups.append({**both, **muon, "params": matrices, "algorithm": "muon"})
            if rest:
                groups.append({**both, "betas": betas, "eps": eps, "params": rest, "algorithm": "adamw"})
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._bind()

    def _bind(self) -> None:
        # The inner optimizers share our groups and state: with copies a schedule or a loaded state would miss them.
        classes = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
        self._inner: list[Optimizer] = []
        for algorithm, cls in classes.items():
            groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            if groups:
                inner: Optimizer = cls(groups)
                inner.state = self.state
                self._inner.append(inner)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` ends here too, with new groups.
        super().__setstate__(state)
        self._bind()

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner:
            inner.state = self.state  # `load_state_dict` replaces ours
            inner.step()
        return loss


class Lion(Optimizer):
    """The optimizer Lion, with one state tensor per parameter (`exp_avg`, of the parameter's shape).

    Its learning rate should be 3 to 10 times below AdamW's, because every element moves by the full rate. `betas`, in
    [0, 1), are the interpolation for the update and the decay of the momentum; `weight_decay` is decoupled, per step.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        for beta in betas:
            if not 0.0 <= beta < 1.0:
                what = "The value must be in [0, 1)."
                raise ConfigError(what, field="optim_args.betas", value=beta, remedy="Give 0.9 and 0.99.")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            # The closure runs a backward pass, for which the decorator above has switched gradients off.
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                average = state["exp_avg"]
                # The update looks ahead with beta1, the average follows with beta2: that order is the algorithm.
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.sub_(torch.lerp(gradient, average, beta1).sign_().mul_(group["lr"]))
                average.lerp_(gradient, 1.0 - beta2)
        return loss


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
    """The optimizer's class and keyword arguments that `args` ask for (`Trainer.get_optimizer_cls_and_kwargs`).

    They include "params" (or "model") only for an optimizer whose parameters have settings of their own, as muon,
    galore, apollo and lomo, which look at the `model`; `build_optimizer` handles both forms. Raises ConfigError and
    MissingExtraError.
    """
    try:
        name = OptimizerNames(args.optim)
    except ValueError:
        options = [member.value for member in OptimizerNames]
        remedy = suggestion(str(args.optim), options)
        raise ConfigError("No optimizer has this name.", field="optim", value=str(args.optim), remedy=remedy) from None
    request = OptimizerRequest(name, args, model, parse_optim_args(args.optim_args))
    cls, kwargs = _serve(request)
    extra = {key: value for key, value in request.settings.items() if key not in request.used}
    parameters = inspect.signature(cls.__init__).parameters
    options = [parameter for parameter in parameters if parameter not in ("self", "params", "lr", "for_adamw")]
    # A constructor that takes **kwargs has to refuse unknown settings itself.
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for setting in () if takes_any else extra:
        if setting not in options:
            what = f"The optimizer {name} has no such setting."
            remedy = suggestion(setting, options) if options else "It has none: remove it."
            raise ConfigError(what, field=f"optim_args.{setting}", value=extra[setting], remedy=remedy)
    return cls, {**kwargs, **extra}


def build_optimizer(
    args: TrainingArguments,
    model: nn.Module,
    *,
    cls_and_kwargs: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None,
    decay_names: list[str] | None = None,
) -> torch.optim.Optimizer:
    """Build an optimizer over the model's trainable parameters, in one group that decays and one that does not.

    `cls_and_kwargs`: the result of `create_optimizer_cls_and_kwargs`, or a user's own choice; `decay_names`: those of
    `get_decay_parameter_names` when not given. Raises ConfigError and MissingExtraError.
    """
    cls, given = cls_and_kwargs or create_optimizer_cls_and_kwargs(args, model)
    kwargs = dict(given)
    if isinstance(kwargs.get("optimizer_dict"), Mapping):
        what = "One optimizer per parameter is not supported."
        remedy = "Give one optimizer; a list of parameter groups under `optimizer_dict` is taken."
        raise ConfigError(what, field="optimizer_cls_and_kwargs", remedy=remedy)
    names = get_decay_parameter_names(model) if decay_names is None else decay_names
    # A low-rank optimizer has made its own groups; overrides name theirs as the reference does.
    own = kwargs.pop("params", None) or kwargs.pop("optimizer_dict", None)
    groups = own or parameter_groups(model, args.weight_decay, names)
    if not groups:
        what = "The model has no trainable parameters."
        remedy = "Set requires_grad on the parameters to train."
        raise ConfigError(what, field="model", value=type(model).__name__, remedy=remedy)
    if "model" in kwargs:  # LOMO's optimizers take the whole model
        return cls(**kwargs)
    return cls(groups, **kwargs)


def parse_optim_args(text: str | None) -> dict[str, Any]:
    """Parse `"momentum=0.9,nesterov=true,betas=(0.9,0.95)"` into a dictionary. Raises ConfigError.

    Values become numbers, truth values, None or tuples of them; everything else stays text.
    """
    settings: dict[str, Any] = {}
    # A comma inside of parentheses or brackets separates the items of a tuple.
    for part in re.split(r",(?![^(\[]*[)\]])", text or ""):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            what = "This part is not name=value."
            raise ConfigError(what, field="optim_args", value=part.strip(), remedy='Write "a=1,b=2".')
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
        return getattr(torch.optim, _TORCH[name]), request.lr
    if name in _TORCH_ADAMS:
        fused = {"fused": True} if name is OptimizerNames.ADAMW_TORCH_FUSED and _has_fused(request) else {}
        return getattr(torch.optim, _TORCH_ADAMS[name]), {**request.adam, **fused}
    if name is OptimizerNames.LION_TORCH:
        return Lion, {**request.lr, **request.betas}
    if name is OptimizerNames.MUON:
        return MuonAdamW, {**request.adam, "for_adamw": parameters_for_adamw(request.model)}
    return adafactor(request) if name is OptimizerNames.ADAFACTOR else PACKAGED[name](request)


def _has_fused(request: OptimizerRequest) -> bool:
    """Whether torch's fused AdamW can update the parameters; a line is logged when it does not."""
    parameters = [] if request.model is None else request.model.parameters()
    # torch's kernel walks through memory: it would change what lies between the elements of a view, without an error.
    if any(param.stride() != torch.empty_like(param, device="meta").stride() for param in parameters):
        _log.warning("A parameter is a view with gaps in memory: torch's AdamW that is not fused trains.")
        return False
    return True
