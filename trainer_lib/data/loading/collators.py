"""Collators turn a list of samples into a batch of tensors.

`default_data_collator` needs no tokenizer. The others need an object with a `pad` method, such as a tokenizer of
`transformers`: ``pad(features, padding=…, max_length=…, pad_to_multiple_of=…, return_tensors="pt")``. With
``return_tensors="np"`` all of them return NumPy arrays of the same values and kinds.

In our loaders the random numbers of a sample depend only on (seed, epoch, sample), so neither the micro-batch nor the
number of workers or processes changes them. Elsewhere they come from the collator's seed or from torch's generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from typing_extensions import override

from trainer_lib.errors import ConfigError, DataError

#: A 64-bit seed per sample of the batch, set while our loaders collate, for collators that draw random numbers.
seeds_of_samples: ContextVar[Sequence[int] | None] = ContextVar("seeds_of_samples", default=None)
IGNORED = -100  # the label that losses and metrics skip


class DataCollator(Protocol):
    """Any function that makes a batch of a list of samples."""

    def __call__(self, features: list[Any], /) -> Any:
        """The batch."""


class Pads(Protocol):
    """A processing class that can pad."""

    padding_side: str

    @property
    def pad(self) -> Callable[..., Mapping[str, Any]]:
        """Pads a list of samples to a batch of tensors ``[batch, sequence]``."""


def returned_as(batch: Mapping[str, Any], return_tensors: str) -> dict[str, Any]:
    """A batch of tensors ``[batch, …]`` as "pt", which it is, or "np", as arrays. Raises DataError for others."""
    if return_tensors == "pt":
        return dict(batch)
    if return_tensors != "np":
        what = "Tensors of this kind cannot be returned."
        remedy = 'Give "pt" for torch or "np" for NumPy.'
        raise DataError(what, field="return_tensors", value=return_tensors, remedy=remedy)
    return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


class DataCollatorMixin:
    """A collator whose `torch_call` makes tensors, and whose `numpy_call` makes arrays of them.

    Both may be overridden.
    """

    return_tensors: str = "pt"

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> dict[str, Any]:
        """The batch, tensors or arrays ``[batch, …]``, as `return_tensors` asks or the collator's own setting."""
        kind = return_tensors or self.return_tensors
        if kind == "np":
            return self.numpy_call(features)
        return returned_as(self.torch_call(features), kind)

    def torch_call(self, features: list[Any]) -> dict[str, Any]:
        """The batch, tensors ``[batch, …]``."""
        raise NotImplementedError

    def numpy_call(self, features: list[Any]) -> dict[str, Any]:
        """The batch, arrays ``[batch, …]``."""
        return returned_as(self.torch_call(features), "np")


def default_data_collator(features: list[Any], return_tensors: str = "pt") -> dict[str, Any]:
    """Stack samples column by column, without padding: values ``[…]`` become a tensor ``[batch, …]``.

    A sample is a mapping, or an object whose attributes are the columns. ``label`` (a number) and ``label_ids`` (a
    list) become ``labels``. Columns of text, bytes or None are left out. Tensors and arrays keep their dtype; Python
    integers become int64, and floats float32.

    Raises:
        DataError: samples differ in the shape of a column, which is named.
    """
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
    return batch if return_tensors == "pt" else returned_as(batch, return_tensors)


@dataclass
class DefaultDataCollator(DataCollatorMixin):
    """`default_data_collator` as an object, for code that sets `return_tensors` once."""

    return_tensors: str = "pt"

    @override
    def torch_call(self, features: list[Any]) -> dict[str, Any]:
        return default_data_collator(features)


@dataclass
class StoredRowsCollator(DefaultDataCollator):
    """`default_data_collator` for rows that were stored: lists of Python floats come back as arrays of float64."""

    @override
    def torch_call(self, features: list[Any]) -> dict[str, Any]:
        batch = default_data_collator(features)
        return {name: value.float() if value.dtype == torch.float64 else value for name, value in batch.items()}


def _read_columns(row: Any) -> Mapping[str, Any]:
    if not hasattr(row, "__dict__"):
        what = "A sample has no named columns."
        remedy = "Return a dict from the dataset, or give a data_collator that makes a batch of such samples."
        raise DataError(what, field="train_dataset", value=type(row).__name__, remedy=remedy)
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
        remedy = "Pad them, or give a data_collator that does."
        raise DataError(f"Samples of one batch cannot be stacked: {error}", field=name, remedy=remedy) from error
    # A Python float does not ask for double precision.
    return stacked.float() if stacked.dtype == torch.float64 else stacked


@dataclass
class DataCollatorWithPadding(DataCollatorMixin):
    """Pads inputs to the longest sample of the batch, or as `padding` says, with the tokenizer's `pad`."""

    tokenizer: Pads
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    @override
    def torch_call(self, features: list[Any]) -> dict[str, Any]:
        """The batch: tensors ``[batch, sequence]``; ``label`` or ``label_ids`` becomes ``labels`` ``[batch, …]``."""
        batch = _pad(self, features)
        for name in ("label", "label_ids"):
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


@dataclass
class DataCollatorForSeq2Seq(DataCollatorMixin):
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

    @override
    def torch_call(self, features: list[Any]) -> dict[str, Any]:
        """The batch: inputs ``[batch, sequence]``, ``labels`` and ``decoder_input_ids`` ``[batch, targets]``."""
        label_name = "label" if "label" in features[0] else "labels"
        labels = [row[label_name] for row in features] if features[0].get(label_name) is not None else None
        batch = _pad(self, [{name: value for name, value in row.items() if name != label_name} for row in features])
        if labels is not None:
            batch["labels"] = self._pad_labels(labels)
            make = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
            if make is not None:
                batch["decoder_input_ids"] = make(labels=batch["labels"])
        return batch

    def _pad_labels(self, labels: list[Sequence[int]]) -> torch.Tensor:
        """Labels as a tensor ``[batch, targets]``, int64, filled up on the tokenizer's side."""
        width = max(len(row) for row in labels)
        if self.padding == "max_length" and self.max_length is not None:
            width = self.max_length
        if (multiple := self.pad_to_multiple_of) is not None:
            width = -(-width // multiple) * multiple
        padded = torch.full((len(labels), width), self.label_pad_token_id, dtype=torch.int64)
        for target, row in zip(padded, labels, strict=True):
            target[columns_of(len(row), width, self.tokenizer)] = torch.as_tensor(np.asarray(row), dtype=torch.int64)
        return padded


PURE: tuple[type, ...] = (DefaultDataCollator, StoredRowsCollator, DataCollatorWithPadding, DataCollatorForSeq2Seq)
"""Collators that draw no random numbers for certain; a subclass may."""


def _pad(collator: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows as tensors ``[rows, sequence]``, padded as the collator's settings say."""
    padded = collator.tokenizer.pad(
        rows,
        padding=collator.padding,
        max_length=collator.max_length,
        pad_to_multiple_of=collator.pad_to_multiple_of,
        return_tensors="pt",
    )
    return dict(padded)


def columns_of(length: int, width: int, tokenizer: Any) -> slice:
    """The columns of a sample's tokens in a batch that is `width` wide."""
    left = getattr(tokenizer, "padding_side", "right") == "left"
    return slice(width - length, None) if left else slice(0, length)


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
        """Three uniform numbers per token, ``[3, batch, sequence]``; a sample with a seed has its own numbers."""
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
                    # A word continues where the text does: without a gap after the token before.
                    first = column if first < 0 or start != before else first
                    of_words[row, column] = chance[row, first]
                before = end
        return of_words
