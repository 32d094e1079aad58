"""Divide a model's layers and its loss over processes, as the model's plan or the user's says.

Parameters become `DTensor`s. A layer's own forward then runs on this process's part as a plain tensor, between the
exchange that its style asks for: DTensor's dispatch of every operation would cost five times the Python calls.

::

    style                  weight    input                     output
    colwise                rows      whole; gradients summed   a part
    rowwise                columns   a part                    summed, then the bias
    colwise_gather_output  rows      whole; gradients summed   gathered
    rowwise_split_input    columns   whole, of which a part    summed, then the bias
    embedding_rowwise      rows      whole                     summed: a part has zeros for the others' tokens
    embedding_colwise      columns   whole                     gathered

The output layer of a causal language model keeps its part where the loss alone reads it: no
process then holds the logits of all classes. For a row with the logits ``z`` over ``V`` classes and the target ``t``,
with label smoothing ``e``::

    loss = log Σ exp z - (1 - e) · z[t] - e/V · Σ z

The maximum and the three sums are reduced over the group, three numbers a row in place of V. The gradient of a part
needs no exchange: it is softmax minus the smoothed target, of the part's classes.

A weight that stays whole between divided layers (`replicated_with_grad_allreduce`) gets the sum of its gradients, each
of which knows some heads only.

Random numbers: all processes of a tensor group draw the same ones, which is right where activations are whole. Between
a layer that divides its output and one that takes a divided input they draw from generators that are seeded by a draw
and the tensor coordinate, so that equal masks do not repeat with every part. Since the seed is a draw, the generators'
states are all that a checkpoint needs.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_lib.arguments.configs.parallelism_config import STYLES
from trainer_lib.errors import ConfigError

Change = Callable[[Tensor], Tensor]
"A change of a tensor, such as an exchange with other processes."
_FIELD = "parallelism.plan"
_BY_COLUMNS = ("rowwise", "rowwise_split_input", "embedding_colwise")
_SUMS = ("rowwise", "rowwise_split_input", "embedding_rowwise")
_DIVIDES_VOCABULARY = ("embedding_rowwise", "colwise_gather_output", "colwise")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_IGNORED = -100


def plan_layers(model: nn.Module, given: Mapping[str, str] | None, parts: int) -> dict[str, str]:
    """Return the style of every layer that is divided into `parts`, by the module's name. Raises ConfigError."""
    plan = given if given is not None else getattr(model, "tp_plan", None)
    if not plan:
        what = f"The model {type(model).__name__} does not say how its layers can be divided (tp_plan)."
        remedy = 'Give patterns and styles, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.'
        raise ConfigError(what, field=_FIELD, value="none", remedy=remedy)
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        names = list(find_modules(model, pattern))
        if not names and given is not None:
            remedy = f"Its modules are {', '.join(list(modules)[1:6])}, …"
            raise ConfigError("This matches no module of the model.", field=f"{_FIELD}.{pattern}", remedy=remedy)
        if names and style not in STYLES:
            what = f"The model's own plan divides {names[0]} in a way that is not served."
            remedy = "Use shard, which divides every parameter, or give a plan without these layers."
            raise ConfigError(what, field=_FIELD, value=style, remedy=remedy)
        styles.update(dict.fromkeys(names, style))
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int):
            require_divisible(heads, f"heads ({name})", parts, "parallelism.tensor")
    for name, style in styles.items():
        _check_layer(name, modules[name], style, parts)
    return _without_half_tied(model, styles)


def find_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the modules whose names match a plan's pattern, in which "*" is one part of a name."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return {name: module for name, module in model.named_modules() if wanted.fullmatch(name)}


def require_divisible(number: int, noun: str, parts: int, field: str) -> None:
    """Raise ConfigError unless the model's so many heads or experts can be divided into `parts`."""
    if number % parts:
        possible = next(size for size in range(parts, 0, -1) if number % size == 0)
        what = f"The model's {number} {noun} cannot be divided among {parts} processes."
        raise ConfigError(what, field=field, value=parts, remedy=f"Give {possible}.")


def _check_layer(name: str, layer: nn.Module, style: str, parts: int) -> None:
    if style == "replicated_with_grad_allreduce":
        return
    wanted = nn.Embedding if style.startswith("embedding") else nn.Linear
    if not isinstance(layer, wanted):
        what = f"This style divides layers of the class {wanted.__name__} only."
        remedy = f"Choose from {', '.join(STYLES)}, or leave the layer whole."
        raise ConfigError(what, field=f"{_FIELD}.{name}", value=f"{style} for a {type(layer).__name__}", remedy=remedy)
    # A gathered output may have a shorter last part; what other layers take apart may not.
    size = getattr(layer, {"colwise": "out_features", "rowwise": "in_features"}.get(style, ""), 0)
    if size % parts:
        what = f"The {size} features of {name} cannot be divided among {parts} processes."
        remedy = "Give a divisor, or leave the layer out of the plan."
        raise ConfigError(what, field="parallelism.tensor", value=parts, remedy=remedy)


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
    divided: dict[int, nn.Parameter] = {}  # by the whole one: tied weights stay tied
    group = Group.of(mesh)
    streams = PartStreams(group.rank)
    for name, style in styles.items():
        layer = model.get_submodule(name)
        if style == "replicated_with_grad_allreduce":
            _sum_gradients(layer, group)
            continue
        for key, whole in list(layer._parameters.items()):
            if whole is not None and not (key == "bias" and style in _SUMS):
                dim = 1 if style in _BY_COLUMNS else 0
                if id(whole) not in divided:
                    divided[id(whole)] = divide(whole, mesh, dim)
                layer._parameters[key] = divided[id(whole)]
        _run_on_part(layer, style, group)
        if style == "colwise":
            layer.register_forward_hook(streams.enter)
        elif style == "rowwise":
            layer.register_forward_pre_hook(streams.leave)
    model.register_forward_hook(streams.leave, always_call=True)


def divide(whole: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """Return this process's part as memory of its own, and not as a view into the whole tensor ``[...]``."""
    divided: Any = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    local = divided.to_local()
    if not local.is_meta and local.untyped_storage().nbytes() > local.nbytes:
        divided = DTensor.from_local(
            local.clone(), mesh, divided.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return nn.Parameter(divided, requires_grad=whole.requires_grad)


class Group(NamedTuple):
    """The processes that divide a layer, and this one among them."""

    processes: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """Return the processes of a mesh of one dimension."""
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's part of the last dimension: ``[..., features]`` to ``[..., part]``."""
        step = -(-whole.shape[-1] // self.size)
        start = min(self.rank * step, whole.shape[-1])
        return whole.narrow(-1, start, min(step, whole.shape[-1] - start)).contiguous()

    def gather(self, part: Tensor, features: int) -> Tensor:
        """Return the parts of all processes, joined: ``[..., part]`` to ``[..., features]``. Collective."""
        step = -(-features // self.size)
        padded = part if part.shape[-1] == step else nn.functional.pad(part, (0, step - part.shape[-1]))
        parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, padded.contiguous(), group=self.processes)
        return torch.cat(parts, dim=-1).narrow(-1, 0, features)

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum over all processes of a tensor ``[...]``. Collective."""
        total = part.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.processes)
        return total


def exchange(tensor: Tensor, change: Change, change_gradient: Change) -> Tensor:
    """Return a tensor ``[...]`` changed, and change its gradient on the way back, as they are exchanged in a group."""
    return _Exchange.apply(tensor, change, change_gradient)  # type: ignore[no-untyped-call, no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Change, change_gradient: Change) -> Tensor:
        ctx.change_gradient = change_gradient
        return change(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.change_gradient(gradients[0]), None, None


def _with_summed_gradient(whole: Tensor, group: Group) -> Tensor:
    """Return a tensor as it is; its gradient is summed over all processes. Collective in the backward."""
    return exchange(whole, _unchanged, group.sum)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _run_on_part(layer: nn.Module, style: str, group: Group) -> None:
    """Run the layer's own forward on this process's part of its weights, and exchange what its style asks for."""
    forward: Any = layer.forward
    gather = functools.partial(
        group.gather, features=getattr(layer, "out_features", getattr(layer, "embedding_dim", 0))
    )
    first, rows = 0, 0
    if style == "embedding_rowwise" and isinstance(layer, nn.Embedding):
        step = -(-layer.num_embeddings // group.size)
        first = min(group.rank * step, layer.num_embeddings)
        rows = min(step, layer.num_embeddings - first)
        padding = layer.padding_idx
        layer.padding_idx = padding - first if padding is not None and first <= padding < first + rows else None

    @functools.wraps(forward)
    def on_part(given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = layer._parameters
        parts = {name: param.to_local() if isinstance(param, DTensor) else param for name, param in own.items()}
        bias, absent = None, None
        if style in _SUMS:
            bias, parts["bias"] = parts.get("bias"), None
        if style.startswith("colwise"):
            given = _with_summed_gradient(given, group)
        elif style == "rowwise_split_input":
            given = exchange(given, group.part, functools.partial(group.gather, features=given.shape[-1]))
        elif style == "embedding_rowwise":
            absent = (given < first) | (given >= first + rows)
            given = (given - first).masked_fill(absent, 0)
        layer.__dict__["_parameters"] = parts
        try:
            output: Any = forward(given, *args, **kwargs)
        finally:
            layer.__dict__["_parameters"] = own
        if absent is not None:
            output = output.masked_fill(absent.unsqueeze(-1), 0)
        if style in _SUMS:
            output = exchange(output, group.sum, _unchanged)
        elif style != "colwise" and not layer.__dict__.get("keeps_part"):
            output = exchange(output, gather, group.part)
        return output if bias is None else output + bias  # type: ignore[no-any-return]

    layer.forward = on_part


def _sum_gradients(layer: nn.Module, group: Group) -> None:
    """Sum the gradients of a layer's own parameters. Inside of its forward, as FSDP gathers them for it only."""
    forward = layer.forward

    @functools.wraps(forward)
    def summing(*args: Any, **kwargs: Any) -> Any:
        own = layer._parameters
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        layer.__dict__["_parameters"] = {
            name: param if param is None or not param.requires_grad else _with_summed_gradient(param, group)
            for name, param in own.items()
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
        # Not torch.manual_seed, which notes the whole stack for devices that are not in use.
        torch.default_generator.manual_seed(self._seed)
        if has_gpu:
            torch.cuda.manual_seed(self._seed)

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


class DividedLoss:
    """The loss of a causal language model, within a `with` of it (`is_on`) over parts of the logits."""

    def __init__(self, model: Any, head: Any, group: Group) -> None:
        """Take the place of the model's loss function; `head` is its divided output layer."""
        total = head.out_features
        step = -(-total // group.size)
        self._classes = group, min(group.rank * step, total), total  # this process's are from the second number on
        self._head, self._own, self.is_on = head, model.loss_function, False
        model.loss_function = self

    def __enter__(self) -> None:
        self.is_on = self._head.__dict__["keeps_part"] = True

    def __exit__(self, *_: object) -> None:
        self.is_on = self._head.__dict__["keeps_part"] = False

    def __call__(
        self,
        logits: Tensor,
        labels: Any,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss ``[]`` of logits ``[batch, tokens, part]``, which `ForCausalLMLoss` computes of whole ones."""
        if not self.is_on:
            given: dict[str, Any] = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **kwargs}
            given |= {"vocab_size": vocab_size, "shift_labels": shift_labels}
            whole: Tensor = self._own(logits=logits, labels=labels, **given)
            return whole
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        flat, targets = logits.float().flatten(0, -2), shift_labels.reshape(-1).to(logits.device)
        loss = self.cross_entropy(flat, targets, ignore_index=ignore_index, reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def cross_entropy(
        self,
        part: Tensor,
        targets: Tensor,
        ignore_index: int = _IGNORED,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        """The loss ``[]`` of logits ``[rows, part]`` against ``targets [rows]``; arguments are torch's. Collective."""
        counted = targets != ignore_index
        losses = _CrossEntropy.apply(part, targets.masked_fill(~counted, 0), label_smoothing, self._classes)  # type: ignore[no-untyped-call]
        total: Tensor = losses.masked_fill(~counted, 0).sum()
        return total / counted.sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, targets: Tensor, smoothing: float, classes: tuple[Group, int, int]) -> Tensor:
        group, first, total = classes
        rows, width = part.shape
        highest = part.amax(-1) if width else part.new_full((rows,), -torch.inf)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group.processes)
        is_here = (targets >= first) & (targets < first + width)
        place = (targets - first).masked_fill(~is_here, 0).unsqueeze(-1)
        chosen = part.gather(-1, place).squeeze(-1).masked_fill(~is_here, 0) if width else torch.zeros_like(highest)
        torch._assert_async((targets < total).all(), f"A target is not one of the {total} classes.")
        others = part.sum(-1) if smoothing else torch.zeros_like(highest)
        sums = torch.stack([(part - highest.unsqueeze(-1)).exp_().sum(-1), chosen, others])
        dist.all_reduce(sums, group=group.processes)
        normalizer = sums[0].log() + highest
        ctx.save_for_backward(part, normalizer, place, is_here)
        ctx.smoothing, ctx.total = smoothing, total
        return normalizer - (1 - smoothing) * sums[1] - smoothing / total * sums[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        part, normalizer, place, is_here = ctx.saved_tensors
        gradient = (part - normalizer.unsqueeze(-1)).exp_()
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, place, (is_here.to(part.dtype) * (ctx.smoothing - 1)).unsqueeze(-1))
        gradient.sub_(ctx.smoothing / ctx.total).mul_(gradients[0].unsqueeze(-1))
        return gradient, None, None, None


def find_divided_head(model: Any, styles: dict[str, str]) -> nn.Module | None:
    """Return the output layer if its classes are divided and only the model's own causal loss reads its logits."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    is_divided = any(
        model.get_submodule(name) is head for name, style in styles.items() if style == "colwise_gather_output"
    )
    loss = getattr(model, "loss_function", None)
    if not is_divided or getattr(loss, "__name__", "") != "ForCausalLMLoss":
        return None
    code = inspect.unwrap(type(model).forward).__code__
    # A forward that overwrites the logits of some classes counts them from the first.
    writes = any(step.opname == "STORE_SUBSCR" for step in dis.get_instructions(code))
    return head if "loss_function" in code.co_names and not writes else None
