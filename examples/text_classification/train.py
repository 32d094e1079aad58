"""Train a tiny BERT from scratch to recognise which module of the standard library a line is from, offline.

Written for the Trainer of transformers; only the import line was changed. Run it with

    python examples/text_classification/train.py --output_dir out/text
"""

import argparse
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from trainer_lib import EarlyStoppingCallback, EvalPrediction, Trainer, TrainingArguments, set_seed

MODULES = ["argparse", "ast", "tarfile", "turtle"]


def read_lines() -> list[dict[str, Any]]:
    """Read the lines of the four modules that have at least three words, each once."""
    rows = []
    for label, name in enumerate(MODULES):
        source = Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8")
        lines = {line.strip() for line in source.splitlines() if len(line.split()) >= 3}
        rows += [{"text": line, "label": label} for line in sorted(lines)]
    return rows


def build_tokenizer(texts: list[str]) -> Any:
    """Learn a WordPiece vocabulary of 2,000 tokens from the texts."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=48,
    )


def compute_metrics(eval_pred: EvalPrediction) -> dict[str, float]:
    """The share of lines whose module was recognised; logits are `[lines, modules]`, labels `[lines]`."""
    logits, labels = eval_pred
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def main() -> None:
    """Train, evaluate, save, load what was saved and classify a line with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out/text_classification")
    parser.add_argument("--max_steps", type=int, default=-1)
    options = parser.parse_args()
    set_seed(0)

    data = Dataset.from_list(read_lines())
    tokenizer = build_tokenizer(data["text"])
    data = data.map(lambda batch: tokenizer(batch["text"], truncation=True), batched=True)
    data = data.train_test_split(test_size=0.2, seed=0)

    config: Any = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        id2label=dict(enumerate(MODULES)),
        label2id={name: label for label, name in enumerate(MODULES)},
    )
    model = BertForSequenceClassification(config)

    training_args = TrainingArguments(
        output_dir=options.output_dir,
        overwrite_output_dir=True,
        learning_rate=1e-3,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        num_train_epochs=5,
        max_steps=options.max_steps,
        warmup_steps=0.1,
        weight_decay=0.01,
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=20,
        report_to="none",
        disable_tqdm=not sys.stdout.isatty(),
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()

    # What was saved is an ordinary folder for from_pretrained.
    loaded = AutoModelForSequenceClassification.from_pretrained(options.output_dir).eval()
    line = "parser.add_argument(dest, help=help)"
    inputs = AutoTokenizer.from_pretrained(options.output_dir)(line, return_tensors="pt")
    scores = loaded(**inputs).logits.softmax(-1)[0]
    print(f"{line} is from {MODULES[int(scores.argmax())]} ({scores.max():.0%})")


if __name__ == "__main__":
    main()
