"""Translation with generation, written for the Seq2SeqTrainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from tests.clients.scripts import shared

ANSWER = {"max_length": 8, "num_beams": 2}


def main() -> None:
    model_args, data_args, training_args = shared.parse(Seq2SeqTrainingArguments)
    last_checkpoint = shared.begin(training_args)
    raw = shared.read_rows(data_args)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_args.model_name_or_path)

    def tokenize(examples: Any) -> Any:
        sources = [pair["en"] for pair in examples["translation"]]
        targets = [pair["de"] for pair in examples["translation"]]
        found = tokenizer(sources, max_length=data_args.max_length, truncation=True)
        found["labels"] = tokenizer(text_target=targets, max_length=data_args.max_length, truncation=True)["input_ids"]
        return found

    def read(tokens: Any) -> list[str]:
        tokens = np.where(tokens != -100, tokens, tokenizer.pad_token_id)
        return [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def compute_metrics(given: Any) -> dict[str, float]:
        predictions, labels = given
        predictions = predictions[0] if isinstance(predictions, tuple) else predictions
        same = [one == other for one, other in zip(read(predictions), read(labels), strict=True)]
        lengths = [np.count_nonzero((row != tokenizer.pad_token_id) & (row != -100)) for row in predictions]
        return {"exact": round(float(np.mean(same)), 4), "gen_len": round(float(np.mean(lengths)), 4)}

    rows = shared.prepare(raw, training_args, tokenize, remove_columns=["translation"])
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"] if training_args.do_train else None,
        eval_dataset=rows["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    if training_args.do_train:
        shared.train(trainer, training_args, last_checkpoint, rows["train"])
    if training_args.do_eval:
        shared.report(trainer, "eval", trainer.evaluate(**ANSWER, metric_key_prefix="eval"), rows["validation"])
    if training_args.do_predict:
        results = trainer.predict(rows["test"], metric_key_prefix="predict", **ANSWER)
        shared.report(trainer, "predict", results.metrics, rows["test"])
        if trainer.is_world_process_zero() and training_args.predict_with_generate:
            text = "\n".join(read(results.predictions))
            Path(training_args.output_dir, "generated_predictions.txt").write_text(text, encoding="utf-8")
    card = {"finetuned_from": model_args.model_name_or_path, "tasks": "translation"}
    shared.finish(trainer, training_args, language=["en", "de"], **card)


if __name__ == "__main__":
    main()
