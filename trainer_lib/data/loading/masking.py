"""The collator for masked and causal language models.

In our loaders the random numbers of a sample depend only on (seed, epoch, sample), so neither the micro-batch nor the
number of workers or processes changes them. Elsewhere they come from the collator's seed or from torch's generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from trainer_lib.data.loading.collators import IGNORED, DataCollatorMixin, columns_of, seeds_of_samples
from trainer_lib.errors import ConfigError, DataError

_INT64 = 0x7FFFFFFFFFFFFFFF
_MASKING = 0x6D61736B  # separates the random numbers of a sample's mask from those of its dataset


@dataclass
class DataCollatorForLanguageModeling(DataCollatorMixin):
    """Batches for language models: causal targets, or masked ones with `mlm`.

    With `mlm`, the share `mlm_probability` of the tokens are targets. Of these, 80 % are replaced by the mask token and
    10 % by a random token, and 10 % are kept (Devlin et al. 2018, https://arxiv.org/abs/1810.04805). With
    `whole_word_mask`, that share of the words are targets with all their tokens, and every target is replaced by the
    mask token; samples need an ``offset_mapping``. Without `mlm`, every token that is not padding is a target. The
    tokenizer needs ``pad_token_id``, and with `mlm` also ``mask_token_id``, ``all_special_ids`` and ``__len__``.

    Raises:
        ConfigError: the tokenizer has no mask token, a share is outside [0, 1], or words are to be masked without
            `mlm`.
        DataError: words are to be masked, and samples have no ``offset_mapping``.
    """

    tokenizer: Any
    mlm: bool = True
    whole_word_mask: bool = False
    mlm_probability: float | None = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None

    def __post_init__(self) -> None:
        self._generator: torch.Generator | None = None
        self._lengths: list[int] | None = None
        if self.whole_word_mask:
            if not self.mlm:
                what = "Whole words are masked for masked language models only."
                raise ConfigError(what, field="whole_word_mask", value=True, remedy="Set mlm=True.")
            self.mask_replace_prob, self.random_replace_prob = 1.0, 0.0
        if self.mlm:
            self._check_settings()

    def _check_settings(self) -> None:
        if getattr(self.tokenizer, "mask_token_id", None) is None:
            remedy = "Give mlm=False for a causal model."
            raise ConfigError("The tokenizer has no mask token.", field="mlm", value=True, remedy=remedy)
        replaced = self.mask_replace_prob + self.random_replace_prob
        for name, value in (
            ("mlm_probability", self.mlm_probability),
            ("mask_replace_prob", self.mask_replace_prob),
            ("random_replace_prob", self.random_replace_prob),
            ("mask_replace_prob + random_replace_prob", replaced),
        ):
            # 0.8 + 0.2 may come out a little above 1.
            if value is None or not 0 <= value <= 1 + 1e-9:
                remedy = "Give a number from 0 to 1."
                raise ConfigError("The share must be from 0 to 1.", field=name, value=str(value), remedy=remedy)

    @override
    def torch_call(self, features: list[Any]) -> dict[str, Any]:
        """The batch, with ``input_ids`` and ``labels`` ``[batch, sequence]``; labels that are not targets are -100."""
        rows = [row if isinstance(row, Mapping) else {"input_ids": row} for row in features]
        # The tokenizer cannot pad offsets.
        offsets = [row.get("offset_mapping") for row in rows]
        plain = [{name: value for name, value in row.items() if name != "offset_mapping"} for row in rows]
        batch = dict(self.tokenizer.pad(plain, return_tensors="pt", pad_to_multiple_of=self.pad_to_multiple_of))
        special = batch.pop("special_tokens_mask", None)
        if self.mlm:
            self._lengths = [len(row["input_ids"]) for row in rows]
            words = {"offset_mapping": offsets} if self.whole_word_mask else {}
            masked = self.torch_mask_tokens(batch["input_ids"], special_tokens_mask=special, **words)
            batch["input_ids"], batch["labels"] = masked
            self._lengths = None
        else:
            labels = batch["input_ids"].clone()
            if self.tokenizer.pad_token_id is not None:
                labels[labels == self.tokenizer.pad_token_id] = IGNORED
            batch["labels"] = labels
        return batch

    def torch_mask_tokens(
        self, inputs: torch.Tensor, special_tokens_mask: torch.Tensor | None = None, offset_mapping: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masked inputs and labels ``[batch, sequence]``.

        Args:
            inputs: tokens ``[batch, sequence]``.
            special_tokens_mask: ``[batch, sequence]``; 1 where a token is never a target.
            offset_mapping: for samples (start, end) of their tokens in the text; with `whole_word_mask`.
        """
        labels, inputs = inputs.clone(), inputs.clone()
        if special_tokens_mask is None:
            special = torch.isin(inputs, torch.tensor(sorted(self.tokenizer.all_special_ids), dtype=torch.int64))
        else:
            special = special_tokens_mask.bool()
        chance, replacement, word = self._draw_numbers(inputs.shape)
        if self.whole_word_mask:
            chance = self._chance_of_words(chance, special, offset_mapping)
        # Special tokens are never targets; padding has chance 1.
        targets = (chance < (self.mlm_probability or 0.0)) & ~special
        labels[~targets] = IGNORED
        inputs[targets & (replacement < self.mask_replace_prob)] = self.tokenizer.mask_token_id
        # Disjoint from the masked ones: the same number decides both.
        randomized = targets & (replacement >= self.mask_replace_prob)
        randomized &= replacement < self.mask_replace_prob + self.random_replace_prob
        words = (word * len(self.tokenizer)).to(inputs.dtype).clamp(max=len(self.tokenizer) - 1)
        inputs[randomized] = words[randomized]
        return inputs, labels

    def _draw_numbers(self, shape: torch.Size) -> torch.Tensor:
        """Three uniform numbers per token, ``[3, batch, sequence]``; a sample with a seed has numbers of its own."""
        draws, seeds = torch.ones(3, *shape), seeds_of_samples.get()  # 1 at padding, which is above every share
        if self.seed is not None and self._generator is None:
            self._generator = torch.Generator().manual_seed(self.seed)
        for row, length in enumerate(self._lengths or [shape[-1]] * shape[0]):
            generator = self._generator  # for all samples; None: torch's global one
            if seeds is not None:
                generator = torch.Generator().manual_seed((seeds[row] ^ (self.seed or 0) ^ _MASKING) & _INT64)
            draws[:, row, columns_of(length, shape[-1], self.tokenizer)] = torch.rand(3, length, generator=generator)
        return draws

    def _chance_of_words(self, chance: torch.Tensor, special: torch.Tensor, offsets: Sequence[Any]) -> torch.Tensor:
        """`chance` ``[batch, sequence]`` with the number of a word's first token at all of its tokens."""
        of_words = torch.ones_like(chance)
        for row, spans in enumerate(offsets or [None] * len(chance)):
            if spans is None:
                what = "Masking whole words needs to know where each token is in the text."
                remedy = "Tokenize with return_offsets_mapping=True, and keep that column."
                raise DataError(what, field="offset_mapping", remedy=remedy)
            place, before, first = columns_of(len(spans), chance.shape[1], self.tokenizer), -1, -1
            columns = range(chance.shape[1])[place]
            for column, span in zip(columns, spans, strict=True):
                start, end = int(span[0]), int(span[1])
                if special[row, column]:
                    first = -1  # the next token begins a word
                else:
                    # A word goes on where the text does: without a gap after the token before.
                    first = column if first < 0 or start != before else first
                    of_words[row, column] = chance[row, first]
                before = end
        return of_words
