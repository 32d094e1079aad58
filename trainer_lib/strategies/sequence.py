"""Sequences divided over processes (Ulysses): every rank of a group computes its part of the tokens of the same rows.

Everything in a causal language model but its attention works token by token. Around the attention, an all-to-all turns
parts of the tokens with all heads into all tokens with a part of the heads, and another one turns them back. The loss
and the logits that leave the model are those of whole rows, equal on all ranks of the group.

Gradients: a rank's are those of its tokens, and the sum over the group is wanted. DDP and FSDP average over all ranks,
so what goes back into the model is multiplied by the size of the group.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from typing_extensions import override

from trainer_lib.arguments.configs.parallelism_config import mesh_sizes
from trainer_lib.distributed.communicator import Communicator
from trainer_lib.distributed.sharding import Mesh
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.strategies.base import Strategy, cannot_predict_alone
from trainer_lib.strategies.ddp import DdpStrategy
from trainer_lib.strategies.fsdp import FsdpStrategy
from trainer_lib.strategies.tensor.layers import Group, PartStreams, exchange

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments

ATTENTION = "trainflow_sequence"
"The name of the attention in transformers' interface."
_FIELD = "parallelism.sequence"
_REMEDY = "Use shard with gradient_checkpointing=True, or tensor."
_TOKENS = ("input_ids", "attention_mask", "position_ids", "labels")
_NO_TARGET = -100
# Of an attention: what needs a mask or another product than that of causal attention over whole rows.
_OTHER_ATTENTION = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q", "attention_mask")
_ATTENTIONS = {"full_attention", "sliding_attention"}
# Of a call of the model: what would be of a part of the tokens.
_OF_PARTS = ("output_hidden_states", "output_attentions", "logits_to_keep")


class _DividesTokens(Strategy):
    """Every rank of a sequence group computes a part of the tokens."""

    name = "sequence"
    mesh: Mesh

    @override
    def check_model(self, model: nn.Module) -> None:
        if "trainflow_tokens" not in model.__dict__:
            refuse_model(model, self.mesh.sizes["sequence"])
        super().check_model(model)

    @override
    def setup_model(self, model: nn.Module) -> nn.Module:
        self._divide(self.unwrap(model))
        return super().setup_model(model)

    @override
    def part_of_targets(self, model: nn.Module) -> Callable[[Tensor, int], Tensor] | None:
        tokens: DividedTokens = self.unwrap(model).__dict__["trainflow_tokens"]
        return tokens.part_of_targets if tokens.returned_part else None

    def _divide(self, model: nn.Module) -> None:
        if "trainflow_tokens" not in model.__dict__:  # an earlier Trainer may have divided them already
            refuse_model(model, self.mesh.sizes["sequence"])
            model.__dict__["trainflow_tokens"] = DividedTokens(model, self.mesh.along("sequence").get_group())

    @override
    def inference_model(self, model: nn.Module, *, alone: bool = False) -> nn.Module:
        if alone and "trainflow_tokens" in self.unwrap(model).__dict__:
            raise cannot_predict_alone("parallelism", self.mesh.describe())
        inner = super().inference_model(model, alone=alone)
        if not alone:
            self._divide(self.unwrap(inner))
        return inner

    @override
    def describe(self) -> dict[str, Any]:
        sizes = {name: size for name, size in self.mesh.sizes.items() if size > 1}
        return {**super().describe(), "strategy": self.name, "layout": sizes}


class SequenceStrategy(_DividesTokens, DdpStrategy):
    """All ranks hold the whole model."""

    def __init__(self, device: torch.device, comm: Communicator, args: TrainingArguments) -> None:
        super().__init__(device, comm, args)
        sizes = mesh_sizes(args, world_size=comm.world_size, local_world_size=comm.local_world_size)
        self.mesh = Mesh(sizes, comm.rank, device.type)


class ShardedSequenceStrategy(_DividesTokens, FsdpStrategy):
    """All ranks of all sequence groups hold rows of every parameter."""


def refuse_model(model: nn.Module, size: int) -> None:
    """Raise ConfigError for a model whose tokens cannot be divided over so many processes."""
    library: Any = sys.modules.get("transformers.modeling_utils")  # a model that needs it has imported it
    config: Any = getattr(model, "config", None)
    is_known = library is not None and isinstance(model, library.PreTrainedModel)
    if not is_known or not getattr(model, "_supports_attention_backend", False):
        message = "{} computes an attention that cannot be replaced through transformers' attention interface."
    elif getattr(model, "loss_type", None) != "ForCausalLM" or getattr(config, "is_encoder_decoder", False):
        message = "{} is not a causal language model, which alone works token by token outside of its attention."
    elif not getattr(config, "is_causal", True) or set(getattr(config, "layer_types", None) or ()) - _ATTENTIONS:
        message = "{} has layers with another attention than the causal one, over all tokens or a window."
    elif getattr(config, "output_router_logits", False):
        message = "{} adds a loss of its routers, which counts whole rows."
    else:
        heads = getattr(config, "num_attention_heads", None)
        if not isinstance(heads, int) or heads % size:
            divisors = [number for number in range(2, size) if isinstance(heads, int) and heads % number == 0]
            what = f"The {heads} heads (num_attention_heads) cannot be divided among {size} processes."
            raise ConfigError(what, field=_FIELD, value=size, remedy=f"Give {divisors[-1]}." if divisors else _REMEDY)
        return
    raise ConfigError(message.format(f"The model {type(model).__name__}"), field=_FIELD, value=size, remedy=_REMEDY)


class DividedTokens:
    """The forward of a model on this process's part of the tokens ``[batch, tokens]``.

    Rows whose length the group does not divide are padded on the right. A call with a cache, as `generate` makes them,
    computes whole rows on its process, without the others. `returned_part`: logits of the last call are of the own
    tokens.
    """

    def __init__(self, model: Any, group: dist.ProcessGroup) -> None:
        """Take the place of the model's forward, and of its attention."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attend)
        self._model = model
        self._group, self._size, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._forward, self._streams = model.forward, PartStreams(self._rank)
        self._whole, model.config._attn_implementation = model.config._attn_implementation, ATTENTION
        self._attended = 0
        self.returned_part = False
        for module in model.modules():
            module.__dict__["trainflow_group"] = self
        model.forward = functools.wraps(self._forward)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of whole rows; in training with labels, the logits are those of this process's tokens."""
        if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
            self._model.config._attn_implementation = self._whole
            try:
                return self._forward(*args, **kwargs)
            finally:
                self._model.config._attn_implementation = ATTENTION
        if args:
            kwargs = {"input_ids": args[0], **kwargs}
        labels, items = kwargs.pop("labels", None), kwargs.pop("num_items_in_batch", None)
        length = self._check(len(args), kwargs, labels)
        step = -(-length // self._size)
        start = self._rank * step
        ids = self._part(kwargs.pop("input_ids"), step, 0)
        first = kwargs.pop("position_ids", None)
        positions = torch.arange(start, start + step, device=ids.device)[None]
        positions = positions.expand(len(ids), -1) if first is None else positions + first[:, :1]
        kwargs.pop("attention_mask", None)
        kwargs.update(use_cache=False, return_dict=True)
        self._attended = 0
        if torch.is_grad_enabled():
            self._streams.enter(self._model)
        try:
            outputs = self._forward(input_ids=ids, position_ids=positions, **kwargs)
        finally:
            self._streams.leave()
        layers = self._model.config.get_text_config().num_hidden_layers
        if self._attended < layers:
            what = (
                f"{self._attended} of {layers} layers of {type(self._model).__name__} computed their attention through "
                "transformers' attention interface: the others saw a part of the tokens."
            )
            raise ConfigError(what, field=_FIELD, value=self._size, remedy=_REMEDY)
        self.returned_part = labels is not None and self._model.training
        if labels is None:
            return type(outputs)(**{**outputs, "logits": self._join(outputs.logits, length)})
        items = (labels[:, 1:] != _NO_TARGET).sum().to(ids.device) if items is None else items
        share = self._model.loss_function(
            logits=outputs.logits,
            labels=None,
            vocab_size=self._model.config.get_text_config().vocab_size,
            num_items_in_batch=items,
            shift_labels=self.part_of_targets(labels.to(ids.device), _NO_TARGET),
        )
        logits = outputs.logits if self.returned_part else self._join(outputs.logits, length)
        # As DDP averages it, the gradient of a share is multiplied.
        loss = exchange(share, Group(self._group, self._rank, self._size).sum, lambda gradient: gradient * self._size)
        return type(outputs)(**{**outputs, "loss": loss, "logits": logits})

    def _join(self, logits: Tensor, length: int) -> Tensor:
        """``[batch, part of tokens, classes]`` to ``[batch, tokens, classes]``, without those that filled the rows."""

        def part_of_gradient(whole: Tensor) -> Tensor:  # as DDP averages it
            return whole.chunk(self._size, dim=1)[self._rank] * self._size

        return exchange(logits, self._gather, part_of_gradient).narrow(1, 0, length)

    def part_of_targets(self, values: Tensor, filling: int) -> Tensor:
        """Of values ``[batch, tokens]``, those of the tokens that follow this process's: ``[batch, step]``."""
        return self._part(pad(values, (0, 1), value=filling)[:, 1:], -(-values.shape[1] // self._size), filling)

    def _part(self, whole: Tensor, step: int, filling: int) -> Tensor:
        """This process's ``[batch, step]`` of ``[batch, tokens]``."""
        padded = pad(whole, (0, step * self._size - whole.shape[1]), value=filling)
        return padded.narrow(1, self._rank * step, step).contiguous()

    def _check(self, places: int, kwargs: dict[str, Any], labels: Tensor | None) -> int:
        """Return the number of tokens of the rows. Raises ConfigError and DataError for what cannot be divided."""
        asked = [name for name in _OF_PARTS if kwargs.get(name)]
        given = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _TOKENS]
        ids, mask, positions = (kwargs.get(name) for name in _TOKENS[:3])
        if places > 1 or ids is None or asked or given:
            what = "A model whose tokens are divided takes input_ids, attention_mask, position_ids and labels by name."
            remedy = f"Remove the others. Or: {_REMEDY}"
            raise ConfigError(what, field=_FIELD, value=", ".join(asked + given) or "no input_ids", remedy=remedy)
        wrong = torch.zeros(2, dtype=torch.bool, device=ids.device)
        if mask is not None and mask.ndim == 2:
            wrong[0] = (mask[:, 1:] > mask[:, :-1]).any()
            if labels is not None:
                wrong[0] |= ((mask == 0) & (labels != _NO_TARGET)).any()
        if positions is not None and positions.ndim == 2:
            wrong[1] = (positions.diff(dim=1) != 1).any()
        is_padded_before, restarts = wrong.tolist()
        if (mask is not None and mask.ndim != 2) or (positions is not None and positions.ndim != 2) or restarts:
            raise DataError(
                "Rows that several texts share cannot be divided over processes.",
                field="position_ids" if restarts else "attention_mask",
                value=f"sequence: {self._size}",
                remedy=f"Turn packing off. Or: {_REMEDY}",
            )
        if is_padded_before:
            what = "Rows that are divided over processes are padded behind their last token, without targets there."
            remedy = 'Give the tokenizer padding_side="right", and labels of -100 for padding.'
            raise DataError(what, field="attention_mask", value=f"sequence: {self._size}", remedy=remedy)
        return int(ids.shape[1])

    # -- the attention ------------------------------------------------------------------------------------------------

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
    ) -> Tensor:
        """Causal attention, ``[batch, heads, part of tokens, width]`` to ``[batch, part of tokens, heads, width]``.

        With a window, a token attends to so many tokens: to itself, and to those before it.
        """
        self._attended += 1
        heads, shared = query.shape[1], key.shape[1]
        if shared % self._size:  # whole groups of heads do not fit: every head gets its own keys and values
            key, value = (part.repeat_interleave(heads // shared, dim=1) for part in (key, value))
        query, key, value = (exchange(part, self._to_heads, self._to_tokens) for part in (query, key, value))
        if key.shape[1] != query.shape[1]:
            key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
        mask, length = None, query.shape[2]
        if window is not None and window < length:
            places = torch.arange(length, device=query.device)
            distance = places[:, None] - places
            mask = (distance >= 0) & (distance < window)
        output = scaled_dot_product_attention(
            query, key, value, mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
        )
        return exchange(output, self._to_tokens, self._to_heads).transpose(1, 2).contiguous()

    def _to_heads(self, part: Tensor) -> Tensor:
        """``[batch, heads, part of tokens, width]`` to ``[batch, part of heads, tokens, width]``. Collective."""
        batch, heads, step, width = part.shape
        parts = part.reshape(batch, self._size, heads // self._size, step, width).transpose(0, 1)
        return self._swap(parts).permute(1, 2, 0, 3, 4).reshape(batch, heads // self._size, -1, width)

    def _to_tokens(self, part: Tensor) -> Tensor:
        """``[batch, part of heads, tokens, width]`` to ``[batch, heads, part of tokens, width]``. Collective."""
        batch, heads, length, width = part.shape
        parts = part.reshape(batch, heads, self._size, length // self._size, width).permute(2, 0, 1, 3, 4)
        return self._swap(parts).transpose(0, 1).reshape(batch, heads * self._size, -1, width)

    def _swap(self, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received

    def _gather(self, part: Tensor) -> Tensor:
        """``[batch, part of tokens, classes]`` to ``[batch, tokens, classes]``. Collective."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._size)]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention as transformers calls it, on ``[batch, heads, part of tokens, width]``. Raises ConfigError."""
    given = {**kwargs, "attention_mask": attention_mask}
    other = [name for name in _OTHER_ATTENTION if given.get(name) is not None]
    tokens: DividedTokens | None = module.__dict__.get("trainflow_group")
    if other or tokens is None or not getattr(module, "is_causal", True):
        what = "Only causal attention, with or without a window, is computed over divided tokens."
        raise ConfigError(what, field=_FIELD, value=", ".join(other) or type(module).__name__, remedy=_REMEDY)
    return tokens.attend(query, key, value, dropout, scaling, sliding_window), None
