"""Failures of the library in the words of a spec and a recipe: `collate`, not `data_collator`; `train.args.seed`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from trainer_lib.errors import TrainflowError

_LAUNCH = "train.launch."
# What the Trainer's constructor takes -> what a spec or its recipe calls it.
_FIELDS = {
    "data_collator": "collate",
    "train_dataset": "train.train_split",
    "eval_dataset": "train.eval_split",
    "resume_from_checkpoint": "checkpoints",
}
_PHRASES = (
    # A recipe with a collate gets all columns by itself.
    (re.compile(r"\bset remove_unused_columns=False and give an? data_collator\b"), "define collate in the recipe"),
    (re.compile(r"\bgive an? data_collator\b"), "define a function collate in the recipe"),
    (re.compile(r"\bcollate \(the data_collator\)"), "collate"),
    (re.compile(r"\bdata_collator\b"), "collate"),
    (re.compile(r"\b(Give|give) eval_dataset\b"), r"\1 train.eval_split"),
)


@contextmanager
def in_words_of_spec(section: str) -> Iterator[None]:
    """Name settings in the errors of a block as those of `section`: the library knows no sections."""
    try:
        yield
    except TrainflowError as error:
        error.field = error.field and _field_of(error.field, section)
        error.message, error.remedy = _text_of(error.message, section), error.remedy and _text_of(error.remedy, section)
        error.args = (error.message,)
        raise


def _field_of(field: str, section: str) -> str:
    if field.startswith(_LAUNCH):
        return field.replace(_LAUNCH, f"{section}.launch.")
    if field in _FIELDS:
        return _FIELDS[field]
    from trainer_lib.arguments.training import TrainingArguments, constructor_names  # 60 ms, for a failure only

    return f"{section}.args.{field}" if field in constructor_names(TrainingArguments) else field


def _text_of(text: str, section: str) -> str:
    for phrase, words in _PHRASES:
        text = phrase.sub(words, text)
    return text.replace(_LAUNCH, f"{section}.launch.")
