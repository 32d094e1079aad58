"""The recipe text-classification: texts to one of several classes, with a model of transformers.

    name: reviews
    recipe: text-classification
    prepare:
      sources: [reviews.csv]
      options: {text: review, label: stars, pretrained: distilbert-base-uncased}
    train:
      model: {pretrained: distilbert-base-uncased}
      args: {num_train_epochs: 3, learning_rate: 5.0e-5, global_batch_size: 32}
    evaluate: {splits: [validation, test]}

Without `pretrained` or `folder` the vocabulary is learned from the training texts, and the weights begin at random:
`train.model: {config: {model_type: bert, hidden_size: 128, …}}`.

To replace a function, import the others into a file of your own, and define yours behind them::

    from trainer_lib.recipes.text_classification import *
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import ConfigError
from trainer_lib.recipes.classifier_models import MODEL, build_classifier
from trainer_lib.recipes.held_out_metrics import measure_classes
from trainer_lib.recipes.model_places import PlacedModel, TokenizerOptions, one_of
from trainer_lib.recipes.named_classes import name_classes
from trainer_lib.recipes.option_names import choose
from trainer_lib.recipes.table_form import note_form
from trainer_lib.recipes.tabular_rows import COMMON, DEFAULTS, FIELD, TabularRows
from trainer_lib.recipes.tokenizing import (
    count_cut_texts,
    keep_tokenizer,
    kept_tokenizer,
    learn_tokenizer,
    load_tokenizer,
)

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput


class Options(TokenizerOptions):
    """The options of `prepare`; `label`, `rename`, `id`, `files`, `split` and `absent_classes` are as of a table."""

    text: str
    """Column with the texts."""
    pair: NotRequired[str]
    """Column with second texts, for questions about two."""
    max_length: NotRequired[int]
    """Tokens of a text; longer ones are cut."""


class ModelOptions(PlacedModel):
    """The settings of `build_model`."""

    new_head: NotRequired[bool]
    """Replace a head that was trained for other classes."""


class TextRows(TabularRows):
    """The texts of a table by split; no other column is read."""

    defaults: Mapping[str, Any] = {
        **COMMON,
        **{name: DEFAULTS[name] for name in ("label", "absent_classes")},
        "text": None,
        "pair": None,
    }

    @override
    def _features(self) -> list[str]:
        if self.options["text"] is None:
            remedy = "Name the column: prepare.options.text=NAME."
            raise ConfigError("The recipe needs to know where the texts are.", field=f"{FIELD}.text", remedy=remedy)
        for option in ("text", "pair"):
            if self.options[option] is not None:
                self.table.require(self.options[option], field=f"{FIELD}.{option}")
                self.table.refuse_gaps(self.options[option], "Remove the row, or give it a text.")
        return []


def prepare(options: Options, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the texts and find a tokenizer for them.

    Returns:
        For every split its rows: the texts by the name of their column, `labels` (0 on) and `row_id`.
    """
    table = TextRows(options, out, classes=True)
    classes, chosen = table.classes(), table.options
    names = [chosen[name] for name in ("text", "pair") if chosen[name] is not None]
    columns = {name: table.table.texts(name) for name in names}
    place = one_of(chosen, field=FIELD)
    if place is None:
        texts = [columns[name][row] for name in names for row in table.splits["train"].tolist()]
        tokenizer = learn_tokenizer(texts, vocabulary=chosen["vocabulary"], max_length=chosen["max_length"])
    else:
        tokenizer = load_tokenizer(place, pad_token=chosen["pad_token"], field=FIELD)
    out.info.update(
        label=table.label,
        classes=classes,
        texts=names,
        max_length=chosen["max_length"],
        vocabulary=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=keep_tokenizer(tokenizer, out),
        **note_form(dict.fromkeys(names, "text"), chosen),
    )
    count_cut_texts(out, tokenizer, *columns.values(), longest=chosen["max_length"])
    table.texts.update({name: [] for name in names})  # `rows` gives these columns
    return table.rows(table.class_numbers(classes))


def build_model(options: ModelOptions, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    chosen = choose(options, MODEL, field="train.model")
    return build_classifier(chosen, data, head="ForSequenceClassification", task="SEQ_CLS")


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch: `input_ids` and `attention_mask` ``[batch, tokens]``, and labels ``[batch]``."""
    texts = [[row[name] for row in rows] for name in data.info["texts"]]
    tokenizer = kept_tokenizer(data)
    batch = dict(
        tokenizer(*texts, padding=True, truncation=True, max_length=data.info["max_length"], return_tensors="pt")
    )
    if "labels" in rows[0]:
        batch["labels"] = torch.tensor([row["labels"] for row in rows])
    return batch


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure logits ``[rows, classes]``, beside the most frequent class of the same rows."""
    return measure_classes(evaluation.predictions, evaluation.label_ids, evaluation.whole_labels)


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn logits ``[rows, classes]`` into the name of the best class and the probability of each."""
    return name_classes(predictions, data.info["classes"])
