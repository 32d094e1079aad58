"""Divide a model's layers over processes by torch's styles, as the model's plan or the user's says.

Two things are ours. A weight that stays whole between divided layers (`replicated_with_grad_allreduce`) gets the sum of
its gradients, each of which knows some heads only. And random numbers: all processes of a tensor group draw the same
ones, which is right where activations are whole; between a layer that divides its output and one that takes a divided
input they draw from generators that are seeded by a draw and the tensor coordinate, and equal masks do not repeat with
every part. Since the seed is a draw, the generators' states are all that a checkpoint needs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer_lib.arguments.configs.parallelism_config import STYLES
from trainer_lib.errors import ConfigError

_FIELD = "parallelism.plan"
_MAKE: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
}
_DIVIDES_VOCABULARY = ("embedding_rowwise", "colwise_gather_output", "colwise")
_HEADS = ("num_attention_heads", "num_key_value_heads")


def plan_layers(model: nn.Module, given: Mapping[str, str] | None, parts: int) -> dict[str, str]:
    """Return the style of every layer that is divided into `parts`, by the module's name.

    Raises:
        ConfigError: there is no plan; a pattern or style does not fit the model; its sizes cannot be divided.
    """
    plan = given if given is not None else getattr(model, "tp_plan", None)
    if not plan:
        raise ConfigError(
            f"The model {type(model).__name__} does not say how its layers can be divided (tp_plan).",
            field=_FIELD,
            value="none",
            remedy='Give patterns and styles, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.',
        )
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        names = [name for name in modules if wanted.fullmatch(name)]
        if not names and given is not None:
            raise ConfigError(
                "This matches no module of the model.",
                field=f"{_FIELD}.{pattern}",
                remedy=f"Its modules are {', '.join(list(modules)[1:6])}, …",
            )
        if names and style not in STYLES:
            raise ConfigError(
                f"The model's own plan divides {names[0]} in a way that is not served.",
                field=_FIELD,
                value=style,
                remedy="Use shard, which divides every parameter, or give a plan without these layers.",
            )
        styles.update(dict.fromkeys(names, style))
    _check_heads(model, parts)
    for name, style in styles.items():
        _check_layer(name, modules[name], style, parts)
    return _without_half_tied(model, styles)


def _check_heads(model: nn.Module, parts: int) -> None:
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % parts:
            possible = [size for size in range(parts, 0, -1) if heads % size == 0]
            raise ConfigError(
                f"The model's {heads} heads ({name}) cannot be divided among {parts} processes.",
                field="parallelism.tensor",
                value=parts,
                remedy=f"Give {possible[0]}.",
            )


def _check_layer(name: str, layer: nn.Module, style: str, parts: int) -> None:
    if style == "replicated_with_grad_allreduce":
        return
    wanted = nn.Embedding if style.startswith("embedding") else nn.Linear
    if not isinstance(layer, wanted):
        raise ConfigError(
            f"This style divides layers of the class {wanted.__name__} only.",
            field=f"{_FIELD}.{name}",
            value=f"{style} for a {type(layer).__name__}",
            remedy=f"Choose from {', '.join(STYLES)}, or leave the layer whole.",
        )
    # A gathered output may have a shorter last part; what other layers take apart may not.
    size = getattr(layer, {"colwise": "out_features", "rowwise": "in_features"}.get(style, ""), 0)
    if size % parts:
        raise ConfigError(
            f"The {size} features of {name} cannot be divided among {parts} processes.",
            field="parallelism.tensor",
            value=parts,
            remedy="Give a divisor, or leave the layer out of the plan.",
        )


def _without_half_tied(model: nn.Module, styles: dict[str, str]) -> dict[str, str]:
    """Leave out layers whose weight is tied to a layer that is not divided in the same way: both stay whole."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    left_out = {
        name
        for names in owners.values()
        if len(set(names)) > 1 and not all(styles.get(name) in _DIVIDES_VOCABULARY for name in names)
        for name in names
    }
    return {name: style for name, style in styles.items() if name not in left_out}


def divide_layers(model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divide the layers over the processes of a mesh of one dimension; every process keeps its part of its own values.

    No collective: all processes have built the same model, or take over the first one's values afterwards.
    """
    divided: dict[int, Any] = {}
    streams = PartStreams(mesh.get_local_rank())
    for name, style in styles.items():
        layer = model.get_submodule(name)
        if style == "replicated_with_grad_allreduce":
            _sum_gradients(layer, mesh)
            continue
        before = {key: each for key, each in layer._parameters.items() if each is not None}
        parallelize_module(layer, mesh, _MAKE[style](), src_data_rank=None)
        for key, old in before.items():
            new = divided.setdefault(id(old), _trimmed(layer._parameters[key], old))
            layer._parameters[key] = new  # the same for tied weights
        if style == "colwise":
            layer.register_forward_hook(streams.enter)
        elif style == "rowwise":
            layer.register_forward_pre_hook(streams.leave)
    model.register_forward_hook(streams.leave, always_call=True)


def divide_gradients(model: nn.Module) -> None:
    """Divide the gradients of embeddings, which torch computes whole, as their weights are; FSDP does it by itself."""
    for layer in model.modules():
        weight: Any = layer.weight if isinstance(layer, nn.Embedding) else None
        if isinstance(weight, DTensor) and weight.requires_grad:
            weight.register_hook(lambda grad, like=weight.placements: grad.redistribute(placements=like))  # type: ignore[no-untyped-call]


def _trimmed(parameter: Any, old: nn.Parameter) -> Any:
    """Return a divided parameter whose part is memory of its own and not a view into the whole tensor."""
    local = parameter.to_local().detach()
    if not local.is_meta and local.untyped_storage().nbytes() > local.nbytes:
        local = local.clone()
    whole = DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
    return nn.Parameter(whole, requires_grad=old.requires_grad)


class _SummedGradient(torch.autograd.Function):
    """A weight as it is; the sum of its gradients over a group."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum_gradients(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of a layer's own parameters. Inside of its forward, as FSDP gathers them for it only."""
    forward, group = layer.forward, mesh.get_group()

    @functools.wraps(forward)
    def summing(*args: Any, **kwargs: Any) -> Any:
        own = layer._parameters
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        layer.__dict__["_parameters"] = {
            name: each if each is None or not each.requires_grad else _SummedGradient.apply(each, group)  # type: ignore[no-untyped-call]
            for name, each in own.items()
        }
        try:
            return forward(*args, **kwargs)
        finally:
            layer.__dict__["_parameters"] = own

    layer.forward = summing


class PartStreams:
    """Random numbers between a layer that divides its output and the next that takes a divided input."""

    def __init__(self, coordinate: int) -> None:
        self._coordinate = coordinate
        self._seed = -1
        self._outside: tuple[Tensor, Tensor | None] | None = None

    def enter(self, layer: nn.Module, *_: Any) -> None:
        """Seed the generators with a draw and this process's coordinate, unless they are."""
        if not layer.training or self._is_inside():
            return
        draw = int(torch.randint(2**62, ()))
        has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._outside = torch.get_rng_state(), torch.cuda.get_rng_state() if has_gpu else None
        self._seed = (draw + 0x9E3779B97F4A7C15 * (self._coordinate + 1)) & (2**63 - 1)
        torch.manual_seed(self._seed)

    def leave(self, *_: Any) -> None:
        """Return to the numbers that all processes of the group draw, if this process has not."""
        if self._outside is not None and self._is_inside():
            host, gpu = self._outside
            torch.set_rng_state(host)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu)
        self._outside = None

    def _is_inside(self) -> bool:
        # A recomputation that ends early puts back the generators by itself: then their seed is another one.
        return self._outside is not None and torch.initial_seed() == self._seed
