"""The recipe tabular-classification: rows of a table to one of several classes, to any number of them, or to a number.

name: iris
recipe: tabular-classification
prepare:
  sources: [iris.csv]
  options: {label: species}
train:
  args: {num_train_epochs: 50, learning_rate: 3.0e-3, global_batch_size: 32}
evaluate: {splits: [validation, test]}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_lib.recipes.shared import targets
from trainer_lib.recipes.shared.recipe_options import PathOptions, choose
from trainer_lib.recipes.shared.targets import compute_metrics, prediction_columns
from trainer_lib.recipes.tables.cells import with_parts
from trainer_lib.recipes.tables.rows import TabularRows

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

__all__ = ["build_model", "collate", "compute_metrics", "prediction_columns", "prepare"]

NET: dict[str, Any] = {
    "hidden": [128, 128],  # sizes of the layers
    "dropout": 0.1,  # probability, after all of them
}
"""The settings of the network (`train.model`), with their defaults."""


def text_code(text: str) -> int:
    """A number for a text, the same in every process: tensors hold no texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


class TabularNet(nn.Module):
    """Layers over standardized numbers and embedded texts. What it standardizes by is saved with the weights.

    Args:
        numbers: column of numbers -> mean and spread in the training rows.
        texts: column of texts -> the texts in the training rows; any other text counts as unknown.
        outputs: size of the output.
        hidden: sizes of the layers.
        dropout: probability, after every layer.
    """

    mean: Tensor
    spread: Tensor

    def __init__(
        self,
        numbers: Mapping[str, Sequence[float]],
        texts: Mapping[str, Sequence[str]],
        outputs: int,
        hidden: Sequence[int],
        dropout: float,
    ) -> None:
        super().__init__()
        columns = [numbers[name] for name in sorted(numbers)]
        self.register_buffer("mean", torch.tensor([mean for mean, _ in columns], dtype=torch.float32))
        self.register_buffer("spread", torch.tensor([spread for _, spread in columns], dtype=torch.float32))
        self.embeddings = nn.ModuleList()
        for index, name in enumerate(sorted(texts)):
            codes = sorted(text_code(text) for text in texts[name])
            self.register_buffer(f"codes_{index}", torch.tensor(codes, dtype=torch.int64))
            self.embeddings.append(nn.Embedding(len(codes) + 1, min(32, 2 + len(codes) // 2)))
        # A missing number is the mean, and a second input says that it was missing.
        widths = [layer.embedding_dim for layer in self.embeddings if isinstance(layer, nn.Embedding)]
        size = 2 * len(columns) + sum(widths)
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(size, width), nn.GELU(), nn.Dropout(dropout)]
            size = width
        self.layers = nn.Sequential(*layers, nn.Linear(size, outputs))

    def forward(self, numbers: Tensor, texts: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Outputs in `logits` ``[batch, outputs]``; with classes in labels ``[batch]`` the cross-entropy as well.

        Args:
            numbers: ``[batch, columns]``.
            texts: codes ``[batch, columns]``.
        """
        missing = torch.isnan(numbers)
        parts = [torch.where(missing, 0.0, (numbers - self.mean) / self.spread), missing.to(numbers.dtype)]
        for index, embedding in enumerate(self.embeddings):
            codes = self.get_buffer(f"codes_{index}")
            given = texts[:, index].contiguous()
            place = torch.searchsorted(codes, given).clamp(max=len(codes) - 1)
            parts.append(embedding(torch.where(codes[place] == given, place + 1, 0)))
        logits: Tensor = self.layers(torch.cat(parts, dim=1))
        if labels is None or labels.is_floating_point():  # of those `use_loss` gives the loss
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


# -- the recipe -------------------------------------------------------------------------------------------------------
def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the table (options: `recipe_options.DEFAULTS`), and label the rows of the splits.

    Returns:
        For every split its rows: the features by name, `labels` (of a class its number, 0 on) and `row_id`.
    """
    table = TabularRows(options, out)
    labels = targets.label_rows(table, out.info)
    out.info.update(table.info())
    return table.rows(labels)


def build_model(options: Mapping[str, Any], data: DataInfo) -> nn.Module:
    """Build the untrained network; `options` are the spec's `train.model`: those of `NET` and of `targets.LOSS`."""
    own, loss = targets.split_loss(options)
    chosen, numbers, texts = choose(own, NET, field="train.model"), data.info["numbers"], data.info["texts"]
    return targets.use_loss(TabularNet(numbers, texts, len(targets.head_names(data.info)), **chosen), loss, data.info)


def collate(rows: list[dict[str, Any]], data: DataInfo | None = None) -> dict[str, Tensor]:
    """Make a batch of rows, which perhaps have `labels` and `row_id`.

    Returns:
        `numbers` float32 ``[batch, number columns]``, `texts` int64 ``[batch, text columns]``, columns in the order of
        their names, and `labels` ``[batch]`` where the rows have them.
    """
    info = {} if data is None else data.info
    dates, hashed = info.get("dates", ()), info.get("hashed", {})
    if dates or hashed:
        rows = [with_parts(row, dates, hashed) for row in rows]
    names = sorted(name for name in rows[0] if name not in ("labels", "row_id"))
    texts = [name for name in names if isinstance(rows[0][name], str)]
    numbers = [name for name in names if name not in texts]
    batch = {
        "numbers": torch.tensor([[float(row[name]) for name in numbers] for row in rows], dtype=torch.float32),
        "texts": torch.tensor([[text_code(row[name]) for name in texts] for row in rows], dtype=torch.int64),
    }
    return targets.with_labels(batch, rows)
