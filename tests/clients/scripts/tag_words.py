"""Token classification, written for the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)

from tests.clients.scripts import shared


def compute_metrics(given: Any) -> dict[str, float]:
    """Accuracy over the words, and the share of rows whose words are all right."""
    predictions, labels = given
    right = (np.argmax(predictions, axis=2) == labels) | (labels == -100)
    return {"accuracy": float(right[labels != -100].mean()), "whole": float(right.all(axis=1).mean())}


def main() -> None:
    model_args, data_args, training_args = shared.parse(TrainingArguments)
    last_checkpoint = shared.begin(training_args)
    raw = shared.read_rows(data_args)
    names = sorted({name for tags in raw["train"]["tags"] for name in tags})
    numbers = {name: number for number, name in enumerate(names)}
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=len(names))
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForTokenClassification.from_pretrained(model_args.model_name_or_path, config=config)
    model.config.label2id = numbers
    model.config.id2label = dict(enumerate(names))

    def align(examples: Any) -> Any:
        found = tokenizer(
            examples["tokens"], truncation=True, max_length=data_args.max_length, is_split_into_words=True
        )
        found["labels"] = []
        for index, tags in enumerate(examples["tags"]):
            words, labels = found.word_ids(batch_index=index), list[int]()
            for place, word in enumerate(words):
                first = word is not None and (place == 0 or words[place - 1] != word)
                labels.append(numbers[tags[word]] if first else -100)
            found["labels"].append(labels)
        return found

    rows = shared.prepare(raw, training_args, align)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"] if training_args.do_train else None,
        eval_dataset=rows["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(
            tokenizer, pad_to_multiple_of=8 if training_args.fp16 else None
        ),
        compute_metrics=compute_metrics,
    )
    if training_args.do_train:
        shared.train(trainer, training_args, last_checkpoint, rows["train"])
    if training_args.do_eval:
        shared.report(trainer, "eval", trainer.evaluate(), rows["validation"])
    if training_args.do_predict:
        predictions, labels, metrics = trainer.predict(rows["test"], metric_key_prefix="predict")
        shared.report(trainer, "predict", metrics, rows["test"])
        tags = np.argmax(predictions, axis=2)
        rows_of_both = zip(tags, labels, strict=True)
        lines = [[names[tag] for tag, label in zip(*row, strict=True) if label != -100] for row in rows_of_both]
        text = "".join(" ".join(line) + "\n" for line in lines)
        Path(training_args.output_dir, "predictions.txt").write_text(text, encoding="utf-8")
    shared.finish(trainer, training_args, finetuned_from=model_args.model_name_or_path, tasks="token-classification")


if __name__ == "__main__":
    main()
