"""Parameters, gradients and optimizer state sharded over processes by torch's `fully_shard`.

A model is sharded in place, part by part, without a wrapper: its parameters become `DTensor`s that hold this process's
rows, and hooks gather a part's rows around its forward and its backward. Parameters keep their names.

::

    full_shard           rows over all processes; gathered rows are freed after the forward
    shard_grad_op        rows over all processes; gathered rows are kept until the backward
    hybrid_shard[_zero2] full_shard (or shard_grad_op) over the processes of a group; groups hold copies of each other
    no_shard             every process holds all rows; gradients are averaged

After sharding, the shards are checked: a model that torch left whole raises an error instead of training as replicas.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from typing_extensions import override

from trainer_lib.arguments import environment
from trainer_lib.arguments.configs.fsdp_config import FsdpSettings, sharded_checkpoints
from trainer_lib.arguments.configs.parallelism_config import mesh_sizes, settings_of
from trainer_lib.base.suggestions import suggestion
from trainer_lib.distributed import communicator as distributed
from trainer_lib.distributed import sharding
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.distributed.sharding import Mesh
from trainer_lib.errors import ConfigError, InfrastructureError
from trainer_lib.strategies.base import Strategy, cannot_predict_alone, match_names, require_trainable
from trainer_lib.strategies.recomputation import Recomputation, wrap_forward

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and all buffers by name, of any shape `[...]`; also buffers that a state_dict leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def place_tensors(model: nn.Module, ignored: Collection[nn.Parameter], device: torch.device, *, offload: bool) -> None:
    """Allocate tensors that had no values, and move those that are not sharded to the device."""
    if any(tensor.is_meta for tensor in all_tensors(model).values()):
        model.to_empty(device="cpu" if offload else device)
    with torch.no_grad():
        for parameter in ignored:
            # .data keeps the parameter object, which the optimizer may hold already.
            parameter.data = parameter.data.to(device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def build_without_values(make: Callable[[], nn.Module]) -> nn.Module:
    """Build the model on "meta": shapes without memory; `from_pretrained` refuses torch's context for that."""
    try:
        with torch.device("meta"):
            return make()
    except RuntimeError as error:
        # Not imported here: a model that needs it has imported it.
        kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        if kind is None or "from_pretrained" not in str(error):
            raise
    load = kind.__dict__["from_pretrained"]

    def shapes(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = load.__func__(cls, *args, **{**kwargs, "device_map": "meta"})
        # The model is not spread over devices, though this attribute would claim it.
        model.__dict__.pop("hf_device_map", None)
        return model

    kind.from_pretrained = classmethod(shapes)
    try:
        return make()
    finally:
        kind.from_pretrained = load


class FsdpPlugin:
    """The settings under accelerate's names, read-only except for how checkpoints are written."""

    fsdp_version = 2

    def __init__(self, settings: FsdpSettings, device: torch.device) -> None:
        self.sharded_checkpoints = settings.sharded_checkpoints
        self.reshard_after_forward = settings.reshards
        self.activation_checkpointing = settings.activation_checkpointing
        self.cpu_ram_efficient_loading = settings.cpu_ram_efficient_loading
        self.ignored_modules = "|".join(settings.ignored_modules) or None
        pinned = device.type == "cuda"
        self._cpu_offload = CPUOffloadPolicy(pin_memory=pinned) if settings.offload else OffloadPolicy()
        formats = {"param_dtype": settings.param_dtype, "reduce_dtype": settings.reduce_dtype}
        given = {name: getattr(torch, dtype) for name, dtype in formats.items() if dtype is not None}
        self._mixed_precision_policy = MixedPrecisionPolicy(**given)

    @property
    def cpu_offload(self) -> OffloadPolicy:
        """Return torch's policy for where the rows are kept."""
        return self._cpu_offload

    @property
    def mixed_precision_policy(self) -> MixedPrecisionPolicy:
        """Return torch's policy for the formats of gathered parameters and of exchanged gradients."""
        return self._mixed_precision_policy

    @property
    def state_dict_type(self) -> str:
        """Return SHARDED_STATE_DICT or FULL_STATE_DICT."""
        return "SHARDED_STATE_DICT" if self.sharded_checkpoints else "FULL_STATE_DICT"

    def set_state_dict_type(self, state_dict_type: str = "FULL_STATE_DICT") -> None:
        """Choose how checkpoints are written, SHARDED_STATE_DICT or FULL_STATE_DICT, alike on every process."""
        self.sharded_checkpoints = sharded_checkpoints("state_dict_type", state_dict_type)


_log = logging.getLogger(__name__)
_CLASSES = "fsdp_config.transformer_layer_cls_to_wrap"


class FsdpStrategy(Strategy):
    """Every rank holds some rows of all parameters. Gradients are averaged, as with replicas."""

    name = "fsdp"
    # Sharding places every tensor by itself, so the Trainer must not move the model.
    places_model = True
    # Every forward gathers parameters: a rank without samples has to take part with a dummy batch.
    forward_communicates = True

    def __init__(self, device: torch.device, comm: Communicator, args: TrainingArguments) -> None:
        super().__init__(device, comm)
        settings = settings_of(args)
        if settings is None:
            remedy = "Give for example full_shard."
            raise ConfigError("No mode of sharding was given.", field="fsdp", value=args.fsdp, remedy=remedy)
        self.settings = settings
        self._plugin = FsdpPlugin(settings, device)
        self.plugins = {"fsdp_plugin": self._plugin}
        self._finds_unused = bool(args.ddp_find_unused_parameters)
        # One process under torchrun has formed no group, and a mesh needs one.
        if comm.world_size == 1:
            if environment.read() is environment.ALONE:
                what = "FSDP needs processes that share the model."
                remedy = "Start through torchrun --nproc-per-node N, or remove fsdp."
                raise ConfigError(what, field="fsdp", value="1 process", remedy=remedy)
            distributed.form_alone(device)
            _log.warning("FSDP runs with one process, so nothing is sharded.")
        sizes = mesh_sizes(args, world_size=comm.world_size, local_world_size=comm.local_world_size)
        self.mesh = Mesh(sizes, comm.rank, device.type)
        if "hybrid" in settings.mode and self.mesh.sizes["replicate"] == 1:
            _log.warning("FSDP %s has a single group of processes, so it is full_shard without copies.", settings.mode)
        self._mesh = self.mesh.of_shards if "shard" in sizes else None
        self._names: dict[int, str] = {}
        self._counted: dict[int, bool] = {}  # by parameter: whether this rank holds the first of equal copies

    # -- the model ----------------------------------------------------------------------------------------------------

    @override
    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build the model; with cpu_ram_efficient_loading, without values (on "meta") on all ranks but the first."""
        if not self.settings.cpu_ram_efficient_loading or self.comm.rank == 0:
            return make()
        return build_without_values(make)

    @override
    def check_model(self, model: nn.Module) -> None:
        if self.is_divided(model):
            return
        find_units(model, self.settings)
        find_ignored(model, self.settings.ignored_modules)
        if not self.settings.cpu_ram_efficient_loading and any(param.is_meta for param in model.parameters()):
            what = 'The model has no values: its parameters are on "meta".'
            remedy = "Set cpu_ram_efficient_loading in fsdp_config: all processes then take the first one's values."
            raise ConfigError(what, field="model", value=type(model).__name__, remedy=remedy)

    @override
    def setup_model(self, model: nn.Module) -> nn.Module:
        """Shard the module in place and return it; a sharded one stays as it is."""
        inner = self.unwrap(model)
        # An earlier Trainer may have sharded the model already.
        if self.is_divided(inner):
            return model
        require_trainable(inner)
        self._shard(inner)
        return model

    def is_divided(self, model: nn.Module) -> bool:
        """Return whether the processes hold parts of the model already."""
        return isinstance(model, FSDPModule)

    def _divide_layers(self, model: nn.Module) -> None:
        """Divide what processes compute, before the shards."""

    def _units_of_shards(self, model: nn.Module) -> list[nn.Module]:
        """Modules that other dimensions have divided: their parameters are rows over `shard` alone."""
        return []

    def _shard(self, model: nn.Module) -> None:
        # Warnings about outputs that are views; neither the Trainer nor a loss changes outputs in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        settings = self.settings
        # Before the sharding, which replaces every parameter: `adopt_optimizer` knows the old ones by these ids.
        self._names, self._counted = {id(parameter): name for name, parameter in model.named_parameters()}, {}
        # Also before: afterwards processes have only their parts.
        first = all_tensors(model) if self.comm.rank == 0 and settings.sync_module_states else {}
        self._divide_layers(model)
        ignored = find_ignored(model, settings.ignored_modules)
        parts = self._wrap(model, ignored) if self._mesh is not None else []
        place_tensors(model, ignored, self.device, offload=settings.offload)
        if self._mesh is None:
            model.to(self.device)
        # After the placing: tensors on "meta" have memory only from then on.
        if settings.sync_module_states:
            self._take_values(model, first)
        if parts:
            self._order_gathering(model, [part for part in parts if part is not model])
            self._assert_sharded(model, ignored)
        if isinstance(model, FSDPModule) and self._finds_unused:
            if not hasattr(model, "set_reduce_scatter_unused_params"):
                version = f"FSDP of torch {torch.__version__}"
                what = f"{version} cannot train a model of which processes use different parameters."
                remedy = "Install torch 2.13 or newer, or remove the argument."
                raise ConfigError(what, field="ddp_find_unused_parameters", value=True, remedy=remedy)
            model.set_reduce_scatter_unused_params(True)
        here, everywhere = parameter_bytes(model)
        _log.info(
            "%s %s on %s: this process holds %s of %s bytes of parameters, gathered in %d parts.",
            *("FSDP" if parts else "Tensor parallelism", settings.mode if parts else "", self.mesh.describe()),
            *(f"{here:,}", f"{everywhere:,}", len(parts)),
        )

    def _wrap(self, model: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Module]:
        """Shard the units and the rest of the model; return the parts that are gathered one by one."""
        settings = self.settings
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": self._plugin.mixed_precision_policy,
            "offload_policy": self._plugin.cpu_offload,
            "ignored_params": ignored,
        }
        # Inner units first: what they take no longer belongs to the unit around them.
        for unit in self._units_of_shards(model):
            apart = {**options, "mesh": self.mesh.along("replicate", "shard")}
            fully_shard(unit, reshard_after_forward=settings.reshards, **apart)
        for unit in find_units(model, settings):
            if settings.activation_checkpointing:
                wrap_forward(unit, Recomputation())
            fully_shard(unit, reshard_after_forward=settings.reshards, **options)
        # None: torch keeps the root's own rows gathered, which both ends of a backward need, if there are other parts.
        fully_shard(model, reshard_after_forward=None if settings.reshards else False, **options)
        parts: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for part in parts:
            # torch makes the part's class from FSDPModule and the user's, whose name configurations use.
            made, own = type(part), type(part).__mro__[2]
            made.__name__, made.__qualname__, made.__module__ = own.__name__, own.__qualname__, own.__module__
            # Divided layers' parameters as plain tensors: `DTensor`s cost 40 calls of Python each in a step.
            state: Any = part._get_fsdp_state()  # type: ignore[operator]
            for group in getattr(state, "_fsdp_param_groups", ()):  # none before torch 2.13
                for param in group.fsdp_params:
                    param.is_dtensor, param._unsharded_dtensor_spec = False, None
        if hasattr(model, "generate"):
            # It calls an encoder by itself, which needs the parameters that encoder and decoder share.
            register_fsdp_forward_method(model, "generate")
            # By this mark of transformers, it computes on until all processes have their tokens.
            model.__dict__["_is_fsdp_managed_module"] = self.mesh.sizes["replicate"] < self.mesh.size
        return parts

    def _take_values(self, model: nn.Module, first: Mapping[str, Tensor]) -> None:
        """Take over the first rank's parameters and buffers, one at a time."""
        specs = self.comm.broadcast_json(sharding.describe_tensors(first))
        source = sharding.BroadcastTensors(first, specs, self.comm.rank)
        with torch.no_grad():
            for name, tensor in all_tensors(model).items():
                if name not in specs:
                    remedy = "Build the same model on every process."
                    raise ConfigError(f"The first process's model has no {name}.", field="model", remedy=remedy)
                sharding.fill_part(tensor, source, name)

    def _order_gathering(self, model: nn.Module, parts: list[nn.Module]) -> None:
        """Set which part is gathered while another computes; by default torch prefetches in the backward only."""
        if self.settings.forward_prefetch:
            for part, following in zip([model, *parts], parts, strict=False):
                part.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        if not self.settings.backward_prefetch:
            for part in [model, *parts]:
                part.set_modules_to_backward_prefetch([part])  # type: ignore[operator]  # a part that prefetches itself prefetches nothing

    def _assert_sharded(self, model: nn.Module, ignored: Collection[nn.Parameter]) -> None:
        """Raise InfrastructureError unless this process holds the parts of parameters that the mode promises."""
        shards = 1 if self._mesh is None else self._mesh.shape[-1]
        for name, parameter in model.named_parameters():
            if parameter in ignored or not parameter.ndim:
                continue
            held = len(parameter.to_local()) if isinstance(parameter, DTensor) else -1
            # Equal pieces, rounded up: the last ranks may hold fewer rows, or none.
            if not 0 <= held <= -(-len(parameter) // shards):
                mode, rank = self.settings.mode, self.comm.rank
                what = f"The parameter {name} is not sharded over {shards} processes, as {mode} promises."
                remedy = "Report this: torch's fully_shard left the parameter as it was."
                raise InfrastructureError(what, field="fsdp", value=mode, rank=rank, remedy=remedy)

    @override
    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Replace the whole parameters in an optimizer by the sharded ones of the same names. Raises ConfigError."""
        named = self.named_parameters(model)
        present = {id(parameter) for parameter in named.values()}
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in present:
                    continue
                name = self._names.get(id(parameter))
                # State that was made for a whole parameter does not fit its rows.
                if name is None or optimizer.state.get(parameter):
                    what = "The optimizer holds parameters that the model no longer has, or has stepped on them."
                    remedy = "Give optimizer_cls_and_kwargs, or override create_optimizer."
                    raise ConfigError(what, field="optimizers", value=type(optimizer).__name__, remedy=remedy)
                group["params"][index] = named[name]

    @override
    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        """Return the sharded module, whose forward needs all ranks; with `alone`, a model that is still whole."""
        inner = self.unwrap(model)
        if not alone:
            return self.setup_model(model)
        if self.is_divided(inner):
            raise cannot_predict_alone("fsdp", self.settings.mode)
        return inner.to(self.device)

    @override
    def after_inference(self, model: nn.Module) -> None:
        """Reshard the parts that a forward without a backward leaves gathered."""
        for module in self.unwrap(model).modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @override
    def named_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        self.after_inference(model)
        return dict(self.unwrap(model).named_parameters())

    # -- the step -----------------------------------------------------------------------------------------------------

    @override
    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        inner = self.unwrap(model)
        if not isinstance(inner, FSDPModule):
            raise InfrastructureError("The model in training is not the sharded one.", field="model_wrapped")
        inner.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            inner.set_requires_gradient_sync(True)

    @override
    def sync_gradients(self, model: nn.Module) -> None:
        what = "Gradients of sharded parameters are exchanged in the backward, not after it."
        raise InfrastructureError(what, field="fsdp")

    @override
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
        """Return the global norm over the parts of all ranks, shape `[]`, and clip in place. One small message."""
        held = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        # Of copies, the first one counts. All ranks add all parts in one sum, so that all get the same digits.
        if None in map(self._counted.get, map(id, held)):  # at the first step
            rank = self.comm.rank
            self._counted = {id(param): sharding.local_part(param, rank=rank).is_first_copy for param in held}
        counted = list(itertools.compress(local, map(self._counted.get, map(id, held))))
        square = torch.zeros((), dtype=torch.float64, device=local[0].device if local else self.device)
        if counted:
            norms = torch.stack([norm.float() for norm in torch._foreach_norm(counted)])
            square += norms.double().square().sum()
        dist.all_reduce(square)
        norm = square.sqrt().float()
        if max_norm is not None and max_norm > 0 and local:
            # 1e-6 as in torch's own clipping.
            torch._foreach_mul_(local, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm.to(self.device)

    # -- the state ----------------------------------------------------------------------------------------------------

    @override
    def local_state(self, model: nn.Module) -> dict[str, Tensor]:
        self.after_inference(model)
        state = self.unwrap(model).state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    @override
    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return sharding.GatheredTensors(tensors, partial(sharding.gather_whole, keep=self.comm.rank == 0))

    @override
    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of this rank if every rank writes its own, else whole tensors on the first. Collective."""
        return dict(tensors if self._plugin.sharded_checkpoints else self.gathered(tensors))

    @override
    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor], *, keep: Collection[str] = ()) -> None:
        """Copy this rank's rows of `state`; a model that is still whole is sharded first. Collective."""
        own = self.local_state(self.setup_model(model))
        with torch.no_grad():
            for name, stored in match_names(own, state, keep, lambda tensor: tuple(tensor.shape)).items():
                sharding.fill_part(own[name], state, stored)

    @override
    def describe(self) -> dict[str, Any]:
        return {"strategy": self.name, "fsdp": self.settings.mode}


def parameter_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the model's parameters on this process, and those of the whole model."""
    here = everywhere = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        here += local.numel() * local.element_size()
        everywhere += parameter.numel() * parameter.element_size()
    return here, everywhere


# -- the modules that are gathered as one unit, by class or by size ----------------------------------------------------


def find_units(model: nn.Module, settings: FsdpSettings) -> list[nn.Module]:
    """The modules in `model` that are gathered one by one, inner ones first; the rest is gathered with `model`."""
    if settings.wrap == "whole" or (settings.wrap == "known" and not getattr(model, "_no_split_modules", None)):
        return []
    outside = _shared_beyond(model)
    if settings.wrap == "size":
        return _by_size(model, settings.min_num_params, outside)
    names: tuple[str, ...] = settings.wrap_classes or tuple(getattr(model, "_no_split_modules", None) or ())
    if not names:
        what = f"The model {type(model).__name__} does not say which of its layers belong together (_no_split_modules)."
        remedy = "Name the class of its layers, or give min_num_params."
        raise ConfigError(what, field=_CLASSES, value="none", remedy=remedy)
    units = [module for module in model.modules() if module is not model and type(module).__name__ in names]
    present = {type(unit).__name__ for unit in units}
    missing = next((name for name in settings.wrap_classes if name not in present), None)
    if missing is not None or not units:
        inside = sorted({type(module).__name__ for module in model.modules() if module is not model})
        what = f"The model {type(model).__name__} has no module of that class."
        remedy = suggestion(missing or "", inside)
        raise ConfigError(what, field=_CLASSES, value=missing or ", ".join(names), remedy=remedy)
    for unit in units:
        if tied := outside.get(id(unit)):
            what = f"This class shares {tied} with another part of the model, so it cannot be gathered by itself."
            remedy = "Leave the class out: tied weights are then gathered with the whole model."
            raise ConfigError(what, field=_CLASSES, value=type(unit).__name__, remedy=remedy)
    # Reversed, because `modules` yields the outer ones first.
    return units[::-1]


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
