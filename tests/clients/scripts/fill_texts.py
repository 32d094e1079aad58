"""Masked language modelling, written for the Trainer of transformers."""

from __future__ import annotations

import math
from typing import Any

from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    is_torch_xla_available,
)

from tests.clients.scripts import shared


def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
    """The most likely token at each place, ``[batch, sequence]``."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def compute_metrics(given: Any) -> dict[str, float]:
    predictions, labels = given
    masked = labels.reshape(-1) != -100
    return {"accuracy": float((predictions.reshape(-1) == labels.reshape(-1))[masked].mean())}


def main() -> None:
    model_args, data_args, training_args = shared.parse(TrainingArguments)
    last_checkpoint = shared.begin(training_args)
    raw = shared.read_rows(data_args)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForMaskedLM.from_pretrained(model_args.model_name_or_path)

    def tokenize(examples: Any) -> Any:
        texts = [line for line in examples["text"] if line and not line.isspace()]
        return tokenizer(texts, truncation=True, max_length=data_args.max_length, return_special_tokens_mask=True)

    rows = shared.prepare(raw, training_args, tokenize, remove_columns=["text"])
    measures = training_args.do_eval and not is_torch_xla_available()
    # Every word is masked: the two Trainers draw other random numbers, and none is drawn here.
    masking = {"mlm_probability": 1.0, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"] if training_args.do_train else None,
        eval_dataset=rows["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, **masking),
        compute_metrics=compute_metrics if measures else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if measures else None,
    )
    if training_args.do_train:
        shared.train(trainer, training_args, last_checkpoint, rows["train"])
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        shared.report(trainer, "eval", metrics, rows["validation"])
    shared.finish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="fill-mask")


if __name__ == "__main__":
    main()
