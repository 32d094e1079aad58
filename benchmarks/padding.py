"""The gain of sorting samples by length: pad tokens and time, against a random order.

    python -m benchmarks.padding --size full --save

Texts with log-normal lengths (median 60 tokens, sigma 0.8, cut at 512), padded to the longest of their batch of 16. A
small recurrent language model is trained one epoch in a random order and one with
`train_sampling_strategy="group_by_length"`, by ours and by the Trainer of transformers, alternating in this process.
Reported: the share of tokens that are padding, as the collator made them, and seconds per epoch (`train_runtime`;
median and quartiles), with the ratio of sorted to random.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks._result import arguments, publish, spread
from trainer_lib import Trainer, TrainingArguments

BATCH = 16
VOCABULARY = 1_000
SIZES = {"smallest": (200, 1), "full": (4_000, 5)}  # samples, runs
ORDERS = ("random", "group_by_length")


class Texts(Dataset[dict[str, Any]]):
    """`count` texts of random tokens."""

    def __init__(self, count: int) -> None:
        random = np.random.default_rng(0)
        lengths = np.clip(random.lognormal(np.log(60), 0.8, count), 4, 512).astype(int)
        self.rows = [random.integers(1, VOCABULARY, length) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index]}


class Padding:
    """Pads with zeros to the longest; counts the tokens, and those that are padding."""

    def __init__(self) -> None:
        self.tokens = self.padded = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return tokens [batch, tokens] and labels, which leave padding out."""
        longest = max(len(row["input_ids"]) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        for place, row in enumerate(rows):
            tokens[place, : len(row["input_ids"])] = torch.from_numpy(row["input_ids"])
        self.tokens += tokens.numel()
        self.padded += int((tokens == 0).sum())
        return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}


class Recurrent(nn.Module):
    """A GRU of 64 numbers that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(VOCABULARY, 64), nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits [batch, tokens, vocabulary]."""
        logits = self.head(self.layer(self.embedding(input_ids))[0])
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def epoch(library: Any, texts: Texts, order: str) -> tuple[float, float]:
    """Return (seconds, share of padding) of one epoch."""
    collate = Padding()
    trainer_class = Trainer if library is None else library.Trainer
    arguments_class = TrainingArguments if library is None else library.TrainingArguments
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = arguments_class(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            train_sampling_strategy=order,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = trainer_class(model=Recurrent(), args=args, data_collator=collate, train_dataset=texts)
        metrics = trainer.train().metrics
    return metrics["train_runtime"], collate.padded / collate.tokens


def measure(count: int, runs: int) -> dict[str, Any]:
    """Time alternating epochs."""
    texts = Texts(count)
    libraries = {"ours": None, "peer": transformers}
    taken: dict[str, dict[str, list[tuple[float, float]]]]
    taken = {name: {order: [] for order in ORDERS} for name in libraries}
    for _ in range(runs):
        for name, library in libraries.items():
            for order in ORDERS:
                taken[name][order].append(epoch(library, texts, order))
    result: dict[str, Any] = {}
    for name, orders in taken.items():
        result[name] = {
            order: {"seconds": spread([each[0] for each in values]), "padding_share": values[0][1]}
            for order, values in orders.items()
        }
        pairs = zip(orders["group_by_length"], orders["random"], strict=True)
        result[name]["sorted_to_random"] = spread([a[0] / b[0] for a, b in pairs])
    return result


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    count, runs = SIZES[chosen.size]
    torch.set_num_threads(1)
    publish("padding", chosen.size, {"samples": count, "runs": runs, "results": measure(count, runs)}, chosen.save)


if __name__ == "__main__":
    main()
