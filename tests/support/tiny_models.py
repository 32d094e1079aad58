"""Models of transformers small enough to train in milliseconds, a tokenizer built on the spot, and rows for them."""

from __future__ import annotations

import sys
from typing import Any

import torch

VOCABULARY = 32
_SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "red", "blue", "old", "new"]


def _transformers() -> Any:
    """transformers, which saves a model without importing DeepSpeed, and that MLflow: they take seconds."""
    import transformers
    from accelerate.utils import other

    other.is_deepspeed_available = lambda: "deepspeed" in sys.modules
    return transformers


def llama(*, seed: int = 0, **given: Any) -> Any:
    """A two-layer decoder; its forward takes ``**kwargs`` and its loss divides by `num_items_in_batch`."""
    transformers = _transformers()
    torch.manual_seed(seed)
    settings = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, **_SIZES}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, "pad_token_id": 0, **given}))


def bert(*, seed: int = 0, cls: str = "BertForSequenceClassification", **given: Any) -> Any:
    """A two-layer encoder; its forward takes ``**kwargs`` and its loss ignores `num_items_in_batch`."""
    transformers = _transformers()
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        **{"vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_labels": 3, **_SIZES, **given}
    )
    return getattr(transformers, cls)(config)


def lm_rows(count: int, *, seed: int = 0, length: int = 8, ragged: bool = True) -> list[dict[str, torch.Tensor]]:
    """Rows {"input_ids", "attention_mask", "labels"} with 1 to 7 targets each when `ragged`."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = tokens.clone()
        if ragged:
            labels[2 + number % (length - 2) :] = -100
        rows.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels})
    return rows


def text_rows(count: int, *, seed: int = 0, length: int = 8) -> list[dict[str, Any]]:
    """Rows {"input_ids", "attention_mask", "labels"} of three classes that the first token tells."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
        rows.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": int(tokens[0]) % 3})
    return rows


def tokenizer() -> Any:
    """A word-level tokenizer over `WORDS`, padding on the right."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[EOS]", *WORDS]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = transformers.PreTrainedTokenizerFast
    return made(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", model_max_length=16)


def masking_tokenizer(**settings: Any) -> Any:
    """A word-level tokenizer of 40 words with a mask token; `<pad>`, `</s>` and `<mask>` are the first three."""
    import transformers
    from tokenizers import Tokenizer, models

    names = ["<pad>", "</s>", "<mask>", *(f"w{number}" for number in range(3, 40))]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="</s>"))
    special: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    made: Any = transformers.PreTrainedTokenizerFast
    return made(tokenizer_object=backend, **special, **settings)
