"""Tiny models and data for tests: everything trains in milliseconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset


class Classifier(nn.Module):
    """Two layers with dropout; returns {"loss", "logits"}."""

    def __init__(self, dropout: float = 0.1, features: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(features, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.dropout(torch.relu(self.norm(self.body(x)))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def cuda() -> Exception:
    """The error of a GPU whose memory has run out."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Hungry(Classifier):
    """Has memory for `room` samples at a time, from its call number `since` on."""

    def __init__(self, room: int, failure: Callable[[], Exception] = cuda, since: int = 0) -> None:
        super().__init__()
        self.room, self.failure, self.since = room, failure, since
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if len(x) > self.room and len(self.seen) >= self.since:
            raise self.failure()
        self.seen.append(len(x))
        return super().forward(x, labels)


class TokenModel(nn.Module):
    """A next-token model whose labels are aligned with its inputs; -100 is ignored."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embedding(input_ids)).cumsum(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def classification_rows(count: int, seed: int = 0, features: int = 6) -> list[dict[str, Any]]:
    """Rows {"x", "labels"} of a learnable problem with three classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator)
    labels = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    return [{"x": x[i], "labels": int(labels[i])} for i in range(count)]


def token_rows(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows of 7 tokens with 1 to 7 targets each: unequal token counts in every micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        tokens = torch.randint(11, (7,), generator=generator)
        labels = tokens.roll(-1)
        labels[1 + number % 7 :] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


class Augmented(Dataset[dict[str, Any]]):
    """Adds noise from all three generators in `__getitem__`, as augmentations do; notes what was read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        row = self.rows[index]
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        return {"x": row["x"] + 0.1 * noise, "labels": row["labels"]}


class Stream(IterableDataset[dict[str, Any]]):
    """A stream without length that shuffles a little as it goes; `set_epoch` rotates it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self.rows)):
            row = self.rows[(index + self.epoch) % len(self.rows)]
            yield {"x": row["x"] + 0.1 * torch.rand(()), "labels": row["labels"]}


class StatefulStream(Stream):
    """A stream that can be put back where it was."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(rows)
        self.at = 0
        self.started_at: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.started_at.append(self.at)
        while self.at < len(self.rows):
            row = self.rows[(self.at + self.epoch) % len(self.rows)]
            self.at += 1
            yield row
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
