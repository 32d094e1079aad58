"""Collators turn a list of samples into a batch of tensors.

`default_data_collator` needs no tokenizer. The others need an object with a `pad` method, such as a tokenizer of
`transformers`: ``pad(features, padding=…, max_length=…, pad_to_multiple_of=…, return_tensors="pt")``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from trainer_lib.errors import ConfigError, DataError

DataCollator = Callable[[list[Any]], Any]
#: A 64-bit seed per sample of the batch, set while our loaders collate, for collators that draw random numbers.
seeds_of_samples: ContextVar[Sequence[int] | None] = ContextVar("seeds_of_samples", default=None)
_INT64 = 0x7FFFFFFFFFFFFFFF
_MASKING = 0x6D61736B  # separates the random numbers of a sample's mask from those of its dataset
IGNORED = -100  # the label that losses and metrics skip


class Pads(Protocol):
    """A processing class that can pad."""

    padding_side: str

    @property
    def pad(self) -> Callable[..., Mapping[str, Any]]:
        """Pads a list of samples to a batch of tensors ``[batch, sequence]``."""


def default_data_collator(features: list[Any], return_tensors: str = "pt") -> dict[str, torch.Tensor]:
    """Stack samples column by column, without padding: values ``[…]`` become a tensor ``[batch, …]``.

    A sample is a mapping, or an object whose attributes are the columns. ``label`` (a number) and ``label_ids`` (a
    list) become ``labels``. Columns of text, bytes or None are left out. Tensors and arrays keep their dtype; Python
    integers become int64, and floats float32.

    Raises:
        DataError: samples differ in the shape of a column, which is named.
    """
    if return_tensors != "pt":
        raise DataError("Only torch tensors can be returned.", field="return_tensors", value=return_tensors)
    # Only the first sample is tested: a test for Mapping costs more than stacking a sample, and all are of one kind.
    rows = features if isinstance(features[0], Mapping) else [_read_columns(row) for row in features]
    first, batch = rows[0], {}
    for name, example in first.items():
        if name in ("label", "label_ids") or example is None or isinstance(example, str | bytes):
            continue
        batch[name] = _stack(name, [row[name] for row in rows])
    for name in ("label", "label_ids"):
        if first.get(name) is not None:
            batch["labels"] = _stack(name, [row[name] for row in rows])
            break
    return batch


def _read_columns(row: Any) -> Mapping[str, Any]:
    if not hasattr(row, "__dict__"):
        raise DataError(
            "A sample has no named columns.",
            field="train_dataset",
            value=type(row).__name__,
            remedy="Return a dict from the dataset, or give a data_collator that makes a batch of such samples.",
        )
    columns: dict[str, Any] = vars(row)
    return columns


def _stack(name: str, values: list[Any]) -> torch.Tensor:
    example = values[0]
    try:
        if isinstance(example, torch.Tensor):
            return torch.stack(values)
        if isinstance(example, np.ndarray):
            return torch.from_numpy(np.stack(values))
        stacked = torch.from_numpy(np.array(values))
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            f"Samples of one batch cannot be stacked: {error}",
            field=name,
            remedy="Pad them, or give a data_collator that does.",
        ) from error
    # A Python float does not ask for double precision.
    return stacked.float() if stacked.dtype == torch.float64 else stacked


@dataclass
class DataCollatorWithPadding:
    """Pads inputs to the longest sample of the batch, or as `padding` says, with the tokenizer's `pad`."""

    tokenizer: Pads
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch: tensors ``[batch, sequence]``; ``label`` or ``label_ids`` becomes ``labels`` ``[batch, …]``."""
        batch = dict(
            self.tokenizer.pad(
                features,
                padding=self.padding,
                max_length=self.max_length,
                pad_to_multiple_of=self.pad_to_multiple_of,
                return_tensors=self.return_tensors,
            )
        )
        for name in ("label", "label_ids"):
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


@dataclass
class DataCollatorForSeq2Seq:
    """Pads inputs with the tokenizer, and labels with -100 on the tokenizer's padding side.

    A `model` with ``prepare_decoder_input_ids_from_labels`` also adds ``decoder_input_ids``.
    """

    tokenizer: Pads
    model: Any = None
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED
    return_tensors: str = "pt"

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        """The batch: inputs ``[batch, sequence]``, ``labels`` and ``decoder_input_ids`` ``[batch, targets]``."""
        label_name = "label" if "label" in features[0] else "labels"
        labels = [row[label_name] for row in features] if features[0].get(label_name) is not None else None
        inputs = [{name: value for name, value in row.items() if name != label_name} for row in features]
        batch = dict(
            self.tokenizer.pad(
                inputs,
                padding=self.padding,
                max_length=self.max_length,
                pad_to_multiple_of=self.pad_to_multiple_of,
                return_tensors=return_tensors or self.return_tensors,
            )
        )
        if labels is not None:
            batch["labels"] = self._pad_labels(labels)
            make = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
            if make is not None:
                batch["decoder_input_ids"] = make(labels=batch["labels"])
        return batch

    def _pad_labels(self, labels: list[Sequence[int]]) -> torch.Tensor:
        longest = max(len(row) for row in labels)
        if self.padding == "max_length" and self.max_length is not None:
            longest = self.max_length
        if (multiple := self.pad_to_multiple_of) is not None:
            longest = -(-longest // multiple) * multiple
        padded = torch.full((len(labels), longest), self.label_pad_token_id, dtype=torch.int64)
        left = getattr(self.tokenizer, "padding_side", "right") == "left"
        for target, row in zip(padded, labels, strict=True):
            values = torch.as_tensor(np.asarray(row), dtype=torch.int64)
            place = target[longest - len(values) :] if left else target[: len(values)]
            place.copy_(values)
        return padded


@dataclass
class DataCollatorForLanguageModeling:
    """Batches for language models: causal targets, or masked ones with `mlm`.

    With `mlm`, the share `mlm_probability` of the tokens are targets. Of these, 80 % are replaced by the mask token and
    10 % by a random token, and 10 % are kept (Devlin et al. 2018, https://arxiv.org/abs/1810.04805). Without `mlm`,
    every token that is not padding is a target. The tokenizer needs ``pad_token_id``, and with `mlm` also
    ``mask_token_id``, ``all_special_ids`` and ``__len__``.

    In our loaders a sample's mask depends only on (seed, epoch, sample), so neither the micro-batch nor the number of
    workers or processes changes it. Elsewhere it depends on `seed`, or on torch's generator when `seed` is None.

    Raises:
        ConfigError: the tokenizer has no mask token, or a share is outside [0, 1].
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
        if self.whole_word_mask:
            raise ConfigError(
                "Masking whole words is not supported.",
                field="whole_word_mask",
                value=True,
                remedy="Mask in the dataset, or subclass this.",
            )
        if not self.mlm:
            return
        if getattr(self.tokenizer, "mask_token_id", None) is None:
            raise ConfigError(
                "The tokenizer has no mask token.", field="mlm", value=True, remedy="Give mlm=False for a causal model."
            )
        replaced = self.mask_replace_prob + self.random_replace_prob
        for name, value in (
            ("mlm_probability", self.mlm_probability),
            ("mask_replace_prob", self.mask_replace_prob),
            ("random_replace_prob", self.random_replace_prob),
            ("mask_replace_prob + random_replace_prob", replaced),
        ):
            # 0.8 + 0.2 may come out a little above 1.
            if value is None or not 0 <= value <= 1 + 1e-9:
                raise ConfigError(
                    "The share must be from 0 to 1.", field=name, value=str(value), remedy="Give a number from 0 to 1."
                )

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        """The batch, with ``input_ids`` and ``labels`` ``[batch, sequence]``; labels that are not targets are -100."""
        rows = [row if isinstance(row, Mapping) else {"input_ids": row} for row in features]
        batch = dict(
            self.tokenizer.pad(rows, return_tensors=self.return_tensors, pad_to_multiple_of=self.pad_to_multiple_of)
        )
        special = batch.pop("special_tokens_mask", None)
        if self.mlm:
            lengths = [len(row["input_ids"]) for row in rows]
            batch["input_ids"], batch["labels"] = self._mask(batch["input_ids"], special, lengths)
        else:
            labels = batch["input_ids"].clone()
            if self.tokenizer.pad_token_id is not None:
                labels[labels == self.tokenizer.pad_token_id] = IGNORED
            batch["labels"] = labels
        return batch

    def _mask(
        self, inputs: torch.Tensor, special: torch.Tensor | None, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masked inputs and labels ``[batch, sequence]``, from inputs and special-token mask of that shape."""
        labels, inputs = inputs.clone(), inputs.clone()
        kept = special.bool() if special is not None else torch.isin(inputs, self._special_ids())
        chance, replacement, word = self._draw_numbers(inputs.shape, lengths)
        # Special tokens are never targets; padding has chance 1.
        targets = (chance < (self.mlm_probability or 0.0)) & ~kept
        labels[~targets] = IGNORED
        inputs[targets & (replacement < self.mask_replace_prob)] = self.tokenizer.mask_token_id
        # Disjoint from the masked ones: the same number decides both.
        randomized = targets & (replacement >= self.mask_replace_prob)
        randomized &= replacement < self.mask_replace_prob + self.random_replace_prob
        words = (word * len(self.tokenizer)).to(inputs.dtype).clamp(max=len(self.tokenizer) - 1)
        inputs[randomized] = words[randomized]
        return inputs, labels

    def _draw_numbers(self, shape: torch.Size, lengths: Sequence[int]) -> torch.Tensor:
        """Three uniform numbers per token, ``[3, batch, sequence]``; a sample with a seed has numbers of its own."""
        draws = torch.ones(3, *shape)  # 1 at padding, which is above every share
        left = getattr(self.tokenizer, "padding_side", "right") == "left"
        seeds = seeds_of_samples.get()
        generator = torch.Generator() if seeds is not None else self._own_generator()
        for row, length in enumerate(lengths):
            if seeds is not None:
                # torch takes 63 bits.
                generator = torch.Generator().manual_seed((seeds[row] ^ (self.seed or 0) ^ _MASKING) & _INT64)
            place = slice(shape[-1] - length, None) if left else slice(0, length)
            draws[:, row, place] = torch.rand(3, length, generator=generator)
        return draws

    def _own_generator(self) -> torch.Generator | None:
        if self.seed is not None and self._generator is None:
            self._generator = torch.Generator().manual_seed(self.seed)
        return self._generator

    def _special_ids(self) -> torch.Tensor:
        return torch.tensor(sorted(self.tokenizer.all_special_ids), dtype=torch.int64)
