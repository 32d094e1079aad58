"""Text classification, written for the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from tests.clients.scripts import shared


def compute_metrics(p: EvalPrediction) -> dict[str, float]:
    """Accuracy of logits ``[rows, classes]``."""
    predictions = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    predictions = np.argmax(predictions, axis=1)
    return {"accuracy": (predictions == p.label_ids).astype(np.float32).mean().item()}


def predict(trainer: Trainer, rows: Any, folder: str, labels: dict[int, str]) -> None:
    """Write the predicted class of every row; its own label is taken away before."""
    logits = trainer.predict(rows.remove_columns("label"), metric_key_prefix="predict").predictions
    if trainer.is_world_process_zero():
        lines = [f"{index}\t{labels[item]}\n" for index, item in enumerate(np.argmax(logits, axis=1))]
        Path(folder, "predict_results.txt").write_text("index\tprediction\n" + "".join(lines), encoding="utf-8")


def main() -> None:
    model_args, data_args, training_args = shared.parse(TrainingArguments)
    last_checkpoint = shared.begin(training_args)
    raw = shared.read_rows(data_args)
    names = sorted(raw["train"].unique("label"))
    numbers = {name: number for number, name in enumerate(names)}
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=len(names))
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, config=config)
    model.config.label2id = numbers
    model.config.id2label = {number: name for name, number in numbers.items()}

    def tokenize(examples: Any) -> Any:
        found = tokenizer(
            examples["sentence1"],
            examples["sentence2"],
            padding="max_length",
            max_length=data_args.max_length,
            truncation=True,
        )
        found["label"] = [numbers[name] for name in examples["label"]]
        return found

    rows = shared.prepare(raw, training_args, tokenize)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"] if training_args.do_train else None,
        eval_dataset=rows["validation"] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer) if training_args.fp16 else default_data_collator,
    )
    if training_args.do_train:
        shared.train(trainer, training_args, last_checkpoint, rows["train"])
    if training_args.do_eval:
        shared.report(trainer, "eval", trainer.evaluate(eval_dataset=rows["validation"]), rows["validation"])
    if training_args.do_predict:
        predict(trainer, rows["test"], training_args.output_dir, model.config.id2label)
    card = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-classification"}
    shared.finish(trainer, training_args, language="en", dataset_tags="words", dataset="WORDS", **card)


if __name__ == "__main__":
    main()
