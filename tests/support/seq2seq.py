"""A tiny sequence-to-sequence task and models for it: one of transformers, and one without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_lib import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

PAD, END, WORDS = 0, 1, 12


class Tokens:
    """The part of a tokenizer that collator and Trainer need."""

    pad_token_id: int | None = PAD
    eos_token_id: int | None = END
    padding_side = "right"
    model_input_names = ("input_ids", "attention_mask")

    def pad(self, encoded_inputs: list[Any], **options: Any) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in encoded_inputs)
        ids = [[*row["input_ids"], *[PAD] * (width - len(row["input_ids"]))] for row in encoded_inputs]
        tokens = torch.tensor(ids)
        return {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}


def rows(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Sequences of 2 to 6 tokens, to be answered with themselves reversed and an end token."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        tokens = torch.randint(2, WORDS, (2 + number % 5,), generator=generator).tolist()
        found.append({"input_ids": [*tokens, END], "labels": [*tokens[::-1], END]})
    return found


def t5(**changes: Any) -> Any:
    """Build a T5 of some thousand weights, equal at each call."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config: Any = T5Config
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    ends = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
    return T5ForConditionalGeneration(config(dropout_rate=0.0, **size, **{"vocab_size": WORDS, **ends, **changes}))


class Copier(nn.Module):
    """Predicts each answer token from the input's token at its place; generates the input up to its end token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WORDS)
        self.asked: list[dict[str, Any]] = []

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.table(input_ids) * attention_mask[..., None]
        if labels is None:
            return {"logits": logits}
        width = min(labels.shape[1], logits.shape[1])
        loss = nn.functional.cross_entropy(logits[:, :width].flatten(0, 1), labels[:, :width].flatten())
        return {"loss": loss, "logits": logits}

    def generate(self, input_ids: torch.Tensor, max_length: int | None = None, num_beams: int = 1) -> torch.Tensor:
        self.asked.append({"max_length": max_length, "num_beams": num_beams, "batch": tuple(input_ids.shape)})
        return input_ids[:, :max_length]


def seq2seq_trainer(folder: Path | str, model: Any, *, cls: Any = Seq2SeqTrainer, **given: Any) -> Any:
    """A quiet Seq2SeqTrainer that generates in evaluations, at most 8 tokens."""
    own = {
        name: given.pop(name)
        for name in ("train_dataset", "eval_dataset", "compute_metrics", "processing_class", "data_collator")
        if name in given
    }
    tokens = own.setdefault("processing_class", Tokens())
    own.setdefault("data_collator", DataCollatorForSeq2Seq(tokens if tokens is not None else Tokens()))
    settings: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 8, "use_cpu": True}
    settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "disable_tqdm": True}
    settings |= {"save_strategy": "no", "logging_strategy": "no"}
    return cls(model, Seq2SeqTrainingArguments(str(folder), **{**settings, **given}), **own)
