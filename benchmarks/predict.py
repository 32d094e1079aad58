"""The cost of predicting, next to a loop by hand that keeps the logits: time, and memory that does not grow.

    python -m benchmarks.predict --size full --save

A two-layer perceptron over rows of 32 numbers. By hand: a DataLoader, the forward, and the logits kept in a list and
concatenated. Ours and the Trainer of transformers: `predict`. All three with the same collator, in batches of 64 and of
8 (the default), alternating in this process, the Trainers built beforehand; reported are medians of the seconds (main
thread's CPU, and wall), and their ratios to the loop by hand beside them. Wanted, at batches of 64: at most 1.2.

Memory: predictions of 1,000 classes for a thousand rows and for many, each in a process of its own; reported is the
highest anonymous memory (RssAnon, looked at every 10 ms), and what many rows take beyond a thousand. Wanted: 50 MB.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks._memory import Peak, apart
from benchmarks._result import arguments, publish, spread
from trainer_lib import Trainer, TrainingArguments, default_data_collator

CLASSES = 10
Predict = Callable[[Any], Any]
SIZES = {"smallest": (2_000, 2, 2_000), "full": (100_000, 7, 100_000)}  # rows, runs, rows of 1,000 classes


class Rows(Dataset[dict[str, Tensor]]):
    """`length` rows of 32 numbers."""

    def __init__(self, length: int) -> None:
        self.features = torch.randn(length, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": self.features[index]}


class Perceptron(nn.Module):
    """32 -> 64 -> `classes`."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """Logits."""
        return {"logits": self.layers(features)}


def by_hand(model: nn.Module, batch_size: int, folder: str) -> Predict:
    """Run the loop that people write by hand."""

    def predict(rows: Rows) -> Any:
        model.eval()
        kept = []
        with torch.no_grad():
            for batch in DataLoader(rows, batch_size, collate_fn=default_data_collator):
                kept.append(model(**batch)["logits"].numpy())
        return np.concatenate(kept)

    return predict


def by_trainer(model: nn.Module, batch_size: int, folder: str) -> Predict:
    """Run our `predict`."""
    args = TrainingArguments(**_settings(folder, batch_size))
    trainer = Trainer(model=model, args=args, data_collator=default_data_collator)
    return lambda rows: trainer.predict(rows).predictions


def by_peer(model: nn.Module, batch_size: int, folder: str) -> Predict:
    """Run the `predict` of transformers."""
    args = transformers.TrainingArguments(**_settings(folder, batch_size))
    trainer = transformers.Trainer(model=model, args=args, data_collator=default_data_collator)
    return lambda rows: trainer.predict(rows).predictions


WAYS: dict[str, Callable[[nn.Module, int, str], Predict]] = {"by_hand": by_hand, "ours": by_trainer, "peer": by_peer}


def _settings(folder: str, batch_size: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_eval_batch_size": batch_size,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def seconds(rows: int, runs: int, batch_size: int) -> dict[str, Any]:
    """Alternate runs of the three."""
    model, data = Perceptron(CLASSES), Rows(rows)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: way(model, batch_size, folder) for name, way in WAYS.items()}
        expected = ways["by_hand"](data)
        for _ in range(runs):
            for name, way in ways.items():
                cpu, wall = time.thread_time(), time.perf_counter()
                found = way(data)
                taken[name].append((time.thread_time() - cpu, time.perf_counter() - wall))
                if not np.array_equal(found, expected):
                    raise ValueError(f"{name} predicts something else.")
    result: dict[str, Any] = {}
    for place, clock in enumerate(("cpu_s", "wall_s")):
        values = {name: [pair[place] for pair in pairs] for name, pairs in taken.items()}
        result[clock] = {name: spread(each) for name, each in values.items()}
        for name in ("ours", "peer"):
            ratios = [a / b for a, b in zip(values[name], values["by_hand"], strict=True)]
            result[clock][f"{name}_to_by_hand"] = spread(ratios)
    return result


def peak(name: str, rows: int) -> int:
    """Return the peak anonymous memory, in bytes, of predicting 1,000 classes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data = Perceptron(1_000), Rows(rows)
    with tempfile.TemporaryDirectory() as folder, Peak() as seen:
        kept = WAYS[name](model, 64, folder)(data)
    if kept.shape != (rows, 1_000):
        raise ValueError(f"{name} predicted {kept.shape}.")
    return seen.bytes


def megabytes(rows: int) -> dict[str, Any]:
    """Measure the memory of many rows beyond that of a thousand."""
    result: dict[str, Any] = {}
    for name in WAYS:
        few, many = apart(peak, name, 1_000), apart(peak, name, rows)
        result[name] = {"thousand_rows": few / 1e6, "many_rows": many / 1e6, "more": (many - few) / 1e6}
    return result


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    rows, runs, wide = SIZES[chosen.size]
    torch.set_num_threads(1)
    times = {f"batches_of_{size}": seconds(rows, runs, size) for size in (64, 8)}
    result = {
        "rows": rows,
        "runs": runs,
        "results": times,
        "rows_of_1000_classes": wide,
        "anonymous_mb": megabytes(wide),
    }
    publish("predict", chosen.size, result, chosen.save)


if __name__ == "__main__":
    main()
