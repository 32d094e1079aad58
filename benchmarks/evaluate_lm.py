"""The cost of evaluating a language model with `compute_metrics`, next to a loop by hand that streams to a file.

    python -m benchmarks.evaluate_lm --size full --save

Sequences of 128 tokens out of 32,000: a sequence's logits are 16 MB, those of 256 sequences 4.2 GB. By hand: every
batch's logits are written to a temporary file, which is then mapped, and the metric (share of right next tokens,
computed sequence by sequence) reads it. Ours: `evaluate` with the same function, which gets the same kind of array.
Both spool in the same folder. Runs alternate, each in a process of its own; reported are medians of seconds and of the
highest anonymous memory (RssAnon; pages of the file can be reclaimed), and ratios to the loop by hand. Wanted: at most
1.5 x the time, 1 GB, and twice the time for twice the sequences.

The Trainer of transformers keeps all logits in memory, twice while it joins them: it is run on a quarter of the
sequences, and compared with a loop by hand over the same quarter.
"""

from __future__ import annotations

import contextlib
import io
import shutil
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

BATCH = 4
SIZES = {"smallest": (8, 16, 1_000, 1), "full": (256, 128, 32_000, 3)}  # sequences, tokens, vocabulary, runs


class Sequences(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, each the label of its predecessor."""

    def __init__(self, count: int, tokens: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(vocabulary, (count, tokens), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Bigrams(nn.Module):
    """Token -> 16 numbers -> logits of the next one."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits ``[batch, tokens, vocabulary]``."""
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def right_tokens(given: Any) -> dict[str, float]:
    """Return the share of next tokens that the model ranks first, one sequence at a time."""
    logits, labels = given
    right = [float((one[:-1].argmax(-1) == row[1:]).mean()) for one, row in zip(logits, labels, strict=True)]
    return {"accuracy": float(np.mean(right))}


def by_hand(model: Bigrams, data: Sequences, folder: str) -> dict[str, float]:
    """Run the loop that people write after memory has run out."""
    model.eval()
    labels, losses = [], []
    shape = (*data.rows.shape, model.head.out_features)
    with tempfile.TemporaryFile(dir=folder) as file, torch.no_grad():
        for batch in DataLoader(data, BATCH, collate_fn=default_data_collator):
            outputs = model(**batch)
            losses.append(float(outputs["loss"]))
            file.write(outputs["logits"].numpy().data)
            labels.append(batch["labels"].numpy())
        file.flush()
        logits: Any = np.memmap(file, dtype=np.float32, mode="r", shape=shape)
        accuracy = right_tokens((logits, np.concatenate(labels)))["accuracy"]
    return {"eval_loss": float(np.mean(losses)), "eval_accuracy": accuracy}


def by_trainer(model: Bigrams, data: Sequences, folder: str) -> dict[str, float]:
    """Run our `evaluate`."""
    args = TrainingArguments(**_settings(folder))
    return Trainer(
        model=model, args=args, data_collator=default_data_collator, eval_dataset=data, compute_metrics=right_tokens
    ).evaluate()


def by_peer(model: Bigrams, data: Sequences, folder: str) -> dict[str, float]:
    """Run the `evaluate` of transformers."""
    args = transformers.TrainingArguments(**_settings(folder))
    metrics: dict[str, float] = transformers.Trainer(
        model=model, args=args, data_collator=default_data_collator, eval_dataset=data, compute_metrics=right_tokens
    ).evaluate()
    return metrics


WAYS: dict[str, Callable[[Bigrams, Sequences, str], dict[str, float]]]
WAYS = {"by_hand": by_hand, "ours": by_trainer, "peer": by_peer}


def _settings(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_eval_batch_size": BATCH,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def run(name: str, count: int, tokens: int, vocabulary: int) -> dict[str, float]:
    """One evaluation: wall seconds, the main thread's CPU seconds, megabytes, and what it found."""
    torch.set_num_threads(1)
    model, data = Bigrams(vocabulary), Sequences(count, tokens, vocabulary)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if shutil.disk_usage(folder).free < 3 * 4 * count * tokens * vocabulary:
            raise OSError(f"{folder} has no room for the logits.")
        WAYS[name](model, Sequences(1, tokens, vocabulary), folder)  # Trainers import more when they are built first
        with Peak() as peak:
            cpu, wall = time.thread_time(), time.perf_counter()
            metrics = WAYS[name](model, data, folder)
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "anonymous_mb": peak.bytes / 1e6,
        "loss": metrics["eval_loss"],
        "accuracy": metrics["eval_accuracy"],
    }


def measure(names: tuple[str, ...], count: int, tokens: int, vocabulary: int, runs: int) -> dict[str, Any]:
    """Alternating runs over `count` sequences."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(runs):
        for name in names:
            taken[name].append(apart(run, name, count, tokens, vocabulary))
    found = {name: (taken[name][0]["loss"], taken[name][0]["accuracy"]) for name in names}
    if not np.allclose(list(found.values()), found["by_hand"], rtol=1e-4):
        raise ValueError(f"They find different things: {found}")
    result: dict[str, Any] = {"sequences": count}
    for what in ("wall_s", "cpu_s", "anonymous_mb"):
        values = {name: [each[what] for each in runs] for name, runs in taken.items()}
        result[what] = {name: spread(each) for name, each in values.items()}
        for name in names[1:]:
            ratios = [a / b for a, b in zip(values[name], values["by_hand"], strict=True)]
            result[what][f"{name}_to_by_hand"] = spread(ratios)
    return result


def main() -> None:
    """Measure, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    count, tokens, vocabulary, runs = SIZES[chosen.size]
    shape = (tokens, vocabulary, runs)
    results = {
        "all": measure(("by_hand", "ours"), count, *shape),
        "half": measure(("by_hand", "ours"), count // 2, *shape),
        "quarter": measure(("by_hand", "ours", "peer"), count // 4, *shape),
    }
    publish("evaluate_lm", chosen.size, {"tokens": tokens, "vocabulary": vocabulary, "results": results}, chosen.save)


if __name__ == "__main__":
    main()
