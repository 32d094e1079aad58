"""Causal language modelling, written for the Trainer of transformers."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    is_torch_xla_available,
)

from tests.clients.scripts import shared


def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
    """The most likely token at each place, ``[batch, sequence]``."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def compute_metrics(given: Any) -> dict[str, float]:
    predictions, labels = given
    return {"accuracy": float((predictions[:, :-1].reshape(-1) == labels[:, 1:].reshape(-1)).mean())}


def main() -> None:
    model_args, data_args, training_args = shared.parse(TrainingArguments)
    last_checkpoint = shared.begin(training_args)
    raw = shared.read_rows(data_args)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    def tokenize(examples: Any) -> Any:
        return tokenizer(examples["text"])

    def group(examples: Any) -> dict[str, Any]:
        size = data_args.max_length
        whole = {name: list(chain(*values)) for name, values in examples.items()}
        total = len(whole["input_ids"]) // size * size
        blocks = {name: [every[i : i + size] for i in range(0, total, size)] for name, every in whole.items()}
        return {**blocks, "labels": list(blocks["input_ids"])}

    rows = shared.prepare(raw, training_args, tokenize, remove_columns=raw["train"].column_names)
    rows = shared.prepare(rows, training_args, group)
    measures = training_args.do_eval and not is_torch_xla_available()
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"] if training_args.do_train else None,
        eval_dataset=rows["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics if measures else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if measures else None,
    )
    if training_args.do_train:
        shared.train(trainer, training_args, last_checkpoint, rows["train"])
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        shared.report(trainer, "eval", metrics, rows["validation"])
    shared.finish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="text-generation")


if __name__ == "__main__":
    main()
