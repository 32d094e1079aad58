"""The recipe text-classification: texts to classes or to a number, with a model of transformers.

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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.recipes.shared import targets
from trainer_lib.recipes.shared.model_places import build_classifier
from trainer_lib.recipes.shared.recipe_options import LABEL, TEXTS, PathOptions
from trainer_lib.recipes.shared.targets import compute_metrics, prediction_columns
from trainer_lib.recipes.tables.rows import TextRows
from trainer_lib.recipes.tables.table_files import note_form
from trainer_lib.recipes.texts.tokenizing import batch_texts, count_cut_texts, find_tokenizer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

__all__ = ["build_model", "collate", "compute_metrics", "prediction_columns", "prepare"]


class ClassifiedTexts(TextRows):
    """The texts of a table by split, and their classes."""

    unclassed = None
    defaults: Mapping[str, Any] = {
        **TEXTS,
        **LABEL,
        "merge": [],  # as of a table
        "text": None,  # column with the texts
        "pair": None,  # column with second texts, for questions about two
    }

    @override
    def _features(self) -> list[str]:
        self.text_options = ["text", *(["pair"] if self.options["pair"] is not None else [])]
        return super()._features()


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the texts and find a tokenizer for them.

    Returns:
        For every split its rows: the texts by the name of their column, `labels` (of a class 0 on) and `row_id`.
    """
    table = ClassifiedTexts(options, out)
    labels, chosen = targets.label_rows(table, out.info), table.options
    columns = {chosen[option]: table.texts_of(option) for option in table.text_options}
    train = table.splits["train"].tolist()
    tokenizer = find_tokenizer(chosen, (texts[row] for texts in columns.values() for row in train), out)
    out.info.update(
        label=table.label,
        texts=list(columns),
        max_length=chosen["max_length"],
        **note_form(dict.fromkeys(columns, "text"), chosen),
    )
    count_cut_texts(out, tokenizer, *columns.values(), longest=chosen["max_length"])
    table.texts.update({name: [] for name in columns})  # `rows` gives these columns
    return table.rows(labels)


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration.

    Args:
        options: the settings of `model_places.MODEL` and `targets.LOSS`,
            and `new_head`: replace a head that was trained for other classes.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    own, loss = targets.split_loss(options)
    model = build_classifier(own, data, head="ForSequenceClassification", task="SEQ_CLS")
    return targets.use_loss(model, loss, data.info)


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch: `input_ids` and `attention_mask` ``[batch, tokens]``, and labels."""
    batch = batch_texts(data, *([row[name] for row in rows] for name in data.info["texts"]))
    return targets.with_labels(batch, rows)
