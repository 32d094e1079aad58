"""Train a small T5 to read numbers: "4071" -> "four thousand seventy one". Offline, about a minute on one core.

Written for the Seq2SeqTrainer of transformers; only its import was changed. Run it with

    python examples/seq2seq_t5/train.py --output_dir out/t5

The metric is the share of held-out numbers for which the model generates exactly the right words.
"""

import argparse
import random
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration, set_seed

from trainer_lib import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def words(number: int) -> str:
    """Write a number below 10,000 in English."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            return f"{words(number // size)} {name}" + (f" {words(rest)}" if rest else "")
    if number >= 20:
        return TENS[number // 10 - 2] + (f" {ONES[number % 10]}" if number % 10 else "")
    return TEENS[number - 10] if number >= 10 else ONES[number]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per digit and per word."""
    names = ["<pad>", "</s>", "<unk>", *"0123456789", *ONES, *TEENS, *TENS, "hundred", "thousand"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\d"), "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=32
    )


def build_dataset(tokenizer: PreTrainedTokenizerFast) -> DatasetDict:
    """Sample 4,000 numbers for training and 200 others for evaluation."""
    numbers = random.Random(0).sample(range(10_000), 4_200)
    dataset = Dataset.from_dict({"digits": [str(n) for n in numbers], "words": [words(n) for n in numbers]})

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {**tokenizer(batch["digits"]), "labels": tokenizer(batch["words"])["input_ids"]}

    dataset = dataset.map(tokenize, batched=True, remove_columns=["digits", "words"])
    return dataset.train_test_split(test_size=200, seed=0)


def build_model(tokenizer: PreTrainedTokenizerFast) -> T5ForConditionalGeneration:
    """Build an untrained T5 of 170,000 parameters."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.decoder_start_token_id = tokenizer.pad_token_id
    return T5ForConditionalGeneration(config)


def arguments(output_dir: str, epochs: float, tokenizer: PreTrainedTokenizerFast) -> Seq2SeqTrainingArguments:
    """Evaluate and save every epoch, on generated text; keep the best model."""
    generation_config = GenerationConfig(
        max_length=16,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return Seq2SeqTrainingArguments(
        output_dir=output_dir,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="exact_match",
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=200,
        num_train_epochs=epochs,
        train_sampling_strategy="group_by_length",
        predict_with_generate=True,
        generation_config=generation_config,
        logging_strategy="epoch",
        report_to="none",
        use_cpu=True,
    )


def main() -> dict[str, float]:
    """Train, evaluate on generated text, and print five answers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out/seq2seq_t5")
    parser.add_argument("--epochs", type=float, default=16)
    options = parser.parse_args()
    set_seed(0)
    tokenizer = build_tokenizer()
    splits = build_dataset(tokenizer)
    model = build_model(tokenizer)

    def compute_metrics(eval_preds: Any) -> dict[str, float]:
        preds, labels = eval_preds
        labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
        answers = tokenizer.batch_decode(preds, skip_special_tokens=True)
        expected = tokenizer.batch_decode(labels, skip_special_tokens=True)
        return {"exact_match": sum(a == e for a, e in zip(answers, expected, strict=True)) / len(expected)}

    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments(options.output_dir, options.epochs, tokenizer),
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate(num_beams=2)
    trainer.log_metrics("eval", metrics)
    trainer.save_model()

    shown = splits["test"].select(range(5))
    generated = trainer.predict(shown, max_new_tokens=15)
    for row, answer in zip(shown, generated.predictions, strict=True):
        digits = str(tokenizer.decode(row["input_ids"], skip_special_tokens=True))
        print(digits.replace(" ", ""), "->", tokenizer.decode(answer, skip_special_tokens=True))
    return metrics


if __name__ == "__main__":
    main()
