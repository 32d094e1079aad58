"""Tiny model folders and data files for the scripts in tests/clients/scripts, and for the official ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "red", "blue", "old", "new"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"]
_SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def save_tokenizer(folder: Path, *, pairs: bool, ends: bool = False) -> None:
    """Save a word-level tokenizer: `pairs` puts [CLS] and [SEP] around texts, `ends` [EOS] after each."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    table = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(word, table[word]) for word in SPECIAL]
    if pairs:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
        )
    elif ends:
        backend.post_processor = processors.TemplateProcessing(single="$A [EOS]", special_tokens=special)
    names = {f"{word[1:-1].lower()}_token": word for word in SPECIAL if word != "[EOS]"}
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=backend, eos_token="[EOS]", model_max_length=32, **names).save_pretrained(folder)


def save_models(folder: Path, *names: str) -> None:
    """Save the folders "bert", "llama" and "t5", or those named: a model without dropout and its tokenizer in each."""
    import torch
    import transformers

    size = len(SPECIAL) + len(WORDS)
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 5}
    common: dict[str, Any] = {"vocab_size": size, "max_position_embeddings": 32}
    t5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    t5 |= {"pad_token_id": 0, "eos_token_id": 5, "decoder_start_token_id": 0}
    kinds: dict[str, Any] = {
        "bert": (transformers.BertConfig(**common, **_SIZES, **_NO_DROPOUT), transformers.BertForMaskedLM),
        "llama": (transformers.LlamaConfig(**common, **_SIZES, **ids), transformers.LlamaForCausalLM),
        "t5": (transformers.T5Config(vocab_size=size, **t5), transformers.T5ForConditionalGeneration),
    }
    for name in names or kinds:
        config, cls = kinds[name]
        torch.manual_seed(0)
        cls(config).save_pretrained(folder / name)
        save_tokenizer(folder / name, pairs=name == "bert", ends=name == "t5")


def save_rows(folder: Path) -> None:
    """Save train.json, validation.json and test.json of every task, 24, 12 and 12 rows each."""
    for task, make in _TASKS.items():
        for number, (split, count) in enumerate({"train": 24, "validation": 12, "test": 12}.items()):
            # The mean over batches, as transformers measures a loss, is that over tokens if batches are alike.
            words = _Words(number, even=split != "train")
            rows = [make(words, index) for index in range(count)]
            path = folder / task / f"{split}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            # The official script for questions reads the form in which SQuAD is published.
            path.write_text(json.dumps({"data": rows}) if task == "squad" else lines, encoding="utf-8")


class _Words:
    """Draws texts; with `even`, every text of a kind is equally long."""

    def __init__(self, seed: int, *, even: bool) -> None:
        self._generator = random.Random(seed)
        self._even = even

    def draw(self, least: int, most: int) -> list[str]:
        return self._generator.choices(WORDS, k=most if self._even else self._generator.randint(least, most))

    def place(self, words: list[str]) -> int:
        return self._generator.randrange(len(words))


def _pair(words: _Words, index: int) -> dict[str, Any]:
    first, second = words.draw(3, 6), words.draw(3, 6)
    label = "same" if ("cat" in first) == ("cat" in second) else "other"
    return {"sentence1": " ".join(first), "sentence2": " ".join(second), "label": label}


def _text(words: _Words, index: int) -> dict[str, Any]:
    return {"text": " ".join(words.draw(8, 12))}


def _translation(words: _Words, index: int) -> dict[str, Any]:
    source = words.draw(2, 5)
    return {"translation": {"en": " ".join(source), "de": " ".join(reversed(source))}}


def _tags(words: _Words, index: int) -> dict[str, Any]:
    tokens = words.draw(3, 7)
    return {"tokens": tokens, "tags": ["B-X" if word in ("cat", "dog") else "O" for word in tokens]}


def _question(words: _Words, index: int) -> dict[str, Any]:
    context = words.draw(10, 14)
    place = words.place(context)
    answers = {"text": [context[place]], "answer_start": [len(" ".join([*context[:place], ""]))]}
    question = " ".join(["the", context[place - 1], context[place]])
    return {"id": str(index), "context": " ".join(context), "question": question, "answers": answers}


_TASKS: dict[str, Callable[[_Words, int], dict[str, Any]]] = {
    "pairs": _pair,
    "texts": _text,
    "translation": _translation,
    "tags": _tags,
    "questions": _question,
    "squad": _question,
}
