"""What the scripts of this folder share: arguments, data files, and what happens before and after the training."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import datasets
import transformers
from datasets import load_dataset
from transformers import HfArgumentParser, set_seed
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Folder of the model and its tokenizer."})


@dataclass
class DataArguments:
    """Which data, and how it is cut."""

    train_file: str | None = field(default=None, metadata={"help": "JSON lines, or comma-separated values."})
    validation_file: str | None = field(default=None, metadata={"help": "Rows to evaluate."})
    test_file: str | None = field(default=None, metadata={"help": "Rows to predict."})
    max_length: int = field(default=16, metadata={"help": "Longest sequence (unit: tokens, 100% of them)."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only so many rows."})

    def __post_init__(self) -> None:
        if self.train_file is None or self.validation_file is None:
            raise ValueError("Name a file of training rows and one of validation rows.")


def parse(training_arguments: Any) -> tuple[ModelArguments, DataArguments, Any]:
    """Read the command line, or the JSON file that is its only word, into three dataclasses."""
    parser = HfArgumentParser((ModelArguments, DataArguments, training_arguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        found = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))  # noqa: PTH100 - as scripts write it
    else:
        found = parser.parse_args_into_dataclasses()
    model_args, data_args, training_args = found
    return model_args, data_args, training_args


def begin(training_args: Any) -> str | None:
    """Set up logging and the seed; the newest checkpoint in the output folder, if there is one."""
    logging.basicConfig(format="%(levelname)s - %(name)s - %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    if training_args.should_log:
        transformers.utils.logging.set_verbosity_info()
    level = training_args.get_process_log_level()
    logger.setLevel(level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    transformers.utils.logging.enable_default_handler()
    transformers.utils.logging.enable_explicit_format()
    logger.warning(
        f"Process rank: {training_args.local_process_index}, device: {training_args.device}, n_gpu: "
        f"{training_args.n_gpu}, distributed training: {training_args.parallel_mode.value == 'distributed'}, "
        f"16-bits training: {training_args.fp16}"
    )
    logger.info(f"Training/evaluation parameters {training_args}")
    last = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:  # noqa: PTH112 - as scripts write it
        last = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)
    return last


def read_rows(data_args: DataArguments) -> Any:
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    if data_args.test_file is not None:
        files["test"] = data_args.test_file
    kind = str(data_args.train_file).rsplit(".", 1)[-1]
    rows = load_dataset("csv" if kind == "csv" else "json", data_files=files)
    if data_args.max_train_samples is not None:
        count = min(len(rows["train"]), data_args.max_train_samples)
        rows["train"] = rows["train"].select(range(count))
    return rows


def prepare(rows: Any, training_args: Any, function: Any, **options: Any) -> Any:
    """Apply a batched function to every dataset, on the main process first."""
    with training_args.main_process_first(desc="dataset map pre-processing"):
        return rows.map(function, batched=True, desc="Running tokenizer on dataset", **options)


def train(trainer: Any, training_args: Any, last_checkpoint: str | None, rows: Any) -> None:
    """Train, resuming where asked to; save the model, its metrics and the Trainer's state."""
    checkpoint = None
    if training_args.resume_from_checkpoint is not None:
        checkpoint = training_args.resume_from_checkpoint
    elif last_checkpoint is not None:
        checkpoint = last_checkpoint
    result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = result.metrics
    metrics["train_samples"] = len(rows)
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()


def report(trainer: Any, split: str, metrics: dict[str, Any], rows: Any) -> None:
    metrics[f"{split}_samples"] = len(rows)
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def finish(trainer: Any, training_args: Any, **card: Any) -> None:
    if training_args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)
