"""Cross-entropy over a vocabulary that is divided over processes: no process holds the logits of all classes.

For a row with the logits ``z`` over ``V`` classes and the target ``t``, with label smoothing ``e``::

    loss = log Σ exp z - (1 - e) · z[t] - e/V · Σ z

The maximum and the three sums are reduced over the group, three numbers a row in place of V. The gradient of a part
needs no exchange: it is softmax minus the smoothed target, of the part's classes.
"""

from __future__ import annotations

import dis
import inspect
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_lib.strategies.tensor.layers import Group

_IGNORED = -100


class Classes(NamedTuple):
    """The classes of a vocabulary that this process has: from `first` on, of `total`."""

    group: Group
    first: int
    total: int


class DividedLoss:
    """The loss of a causal language model, over parts of the logits within a `with` of it and else as the model's own.

    Attributes:
        is_on: the output layer leaves its logits divided.
    """

    def __init__(self, model: Any, head: Any, group: Group) -> None:
        """Take the place of the model's loss function; `head` is its divided output layer."""
        total = head.out_features
        step = -(-total // group.size)
        self._classes = Classes(group, min(group.rank * step, total), total)
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
    def forward(ctx: Any, part: Tensor, targets: Tensor, smoothing: float, classes: Classes) -> Tensor:
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
