"""`Counters`: tokens that the model was fed, and floating-point operations that it did."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer_lib.data.items import MAPPINGS, batch_size_of
from trainer_lib.trainer import models

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class Counters:
    """Owner of the Trainer's `current_flos`, the operations of this rank that are not in the state yet."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self._warned_of_tokens = False
        self.own_tokens = 0
        """Tokens of the batches of this rank's training, padding included; 0 where a batch has none."""
        self.reset_flos()

    def reset_flos(self) -> None:
        """Forget the operations that are not in the state yet."""
        self._trainer.current_flos = 0.0

    def count_flos(self, batch: Any) -> None:
        """Add the operations of a forward and backward pass over a batch."""
        trainer = self._trainer
        trainer.current_flos += float(trainer.floating_point_ops(batch))
        main = batch.get(self._internals.facts.main_input) if isinstance(batch, MAPPINGS) else None
        if isinstance(main, torch.Tensor) and not main.is_floating_point():
            self.own_tokens += main.numel()

    def store_flos(self) -> None:
        """Add what all ranks have counted to the state. Collective."""
        # As whole numbers: a float has no digits left for a batch beside a long training.
        total = self._internals.world.comm.sum_ints([int(self._trainer.current_flos)])[0]
        self._trainer.state.total_flos += total
        self.reset_flos()

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of a forward and backward pass over a batch; `Trainer.floating_point_ops` documents it."""
        if not isinstance(inputs, Mapping):
            return 0
        facts = self._internals.facts
        if facts.own_flops is not None:
            return int(facts.own_flops(inputs))
        main = inputs.get(facts.main_input)
        # Integers are tokens. For floats such as pixels, transformers counts every element; other models count samples.
        has_items = isinstance(main, torch.Tensor) and not main.is_floating_point()
        if isinstance(main, torch.Tensor) and (has_items or models.is_transformers(self._trainer.model)):
            return facts.flops_per_item * main.numel()
        return facts.flops_per_item * (batch_size_of(inputs) or 0)

    def track_tokens(self, samples: list[Any]) -> None:
        """Add the input tokens of a step's micro-batches on all ranks to the state, if they are counted. Collective."""
        args, run = self._trainer.args, self._internals.run
        if args.include_num_input_tokens_seen == "no" and not args.include_tokens_per_second:
            return
        # A dummy batch has no target items, and its tokens are not training data.
        real = run is not None and len(run.weights.items) == len(samples)  # an override is called batch by batch
        counted = [b for b, items in zip(samples, run.weights.items, strict=True) if items] if run and real else samples
        total = sum(self._input_tokens(batch) for batch in counted)
        self._trainer.state.num_input_tokens_seen += self._internals.world.comm.sum_ints([total])[0]

    def _input_tokens(self, batch: Any) -> int:
        """Tokens of a batch ``[batch, sequence]``, counted on the host before it goes to the device.

        With "non_padding", tokens that the attention mask hides are left out, or without a mask the padding tokens.
        """
        name = self._internals.facts.main_input
        tokens = batch.get(name) if isinstance(batch, Mapping) else None
        if not isinstance(tokens, torch.Tensor):
            if not self._warned_of_tokens:
                self._warned_of_tokens = True
                _log.warning("No tokens are counted: batches have no %r (give the model a main_input_name).", name)
            return 0
        if self._trainer.args.include_num_input_tokens_seen != "non_padding":
            return tokens.numel()
        mask, padding = batch.get("attention_mask"), getattr(self._trainer.processing_class, "pad_token_id", None)
        if isinstance(mask, torch.Tensor):
            return int(mask.sum())
        return tokens.numel() if padding is None else int((tokens != padding).sum())
