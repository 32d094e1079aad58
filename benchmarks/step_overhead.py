"""What one optimizer step of our Trainer costs beyond the same work written by hand.

    python -m benchmarks.step_overhead --size full --save

A model so small that the framework dominates: a two-layer perceptron, batches of 8. Both loops take batches of the same
rows from a DataLoader, clip gradients to norm 1, step AdamW and a linear schedule. Neither logs, evaluates or saves.
Runs alternate, each in this process; the first steps of each run are left out. Reported: microseconds per optimizer
step of the main thread's own CPU time and of the wall clock (median and quartiles over runs), and the runs' ratios.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks._result import arguments, publish, spread
from trainer_lib import Trainer, TrainerCallback, TrainingArguments, default_data_collator

BATCH = 8
WARM_UP = 50
SIZES = {"smallest": (150, 3), "full": (1000, 11)}  # optimizer steps a run, runs


class Rows(Dataset[dict[str, Any]]):
    """`length` rows of 32 numbers and a class out of 4."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(length, 32, generator=generator)
        self.labels = torch.randint(4, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self.features[index], "labels": int(self.labels[index])}


class Perceptron(nn.Module):
    """32 -> 64 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits."""
        logits = self.layers(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@dataclass
class Clock:
    """Stamps at the end of every optimizer step: main thread's CPU seconds and wall seconds."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def stamp(self) -> None:
        """One step has ended."""
        self.cpu.append(time.thread_time())
        self.wall.append(time.perf_counter())

    def microseconds_per_step(self) -> tuple[float, float]:
        """(CPU, wall) of the steps after the warm-up."""
        steps = len(self.cpu) - WARM_UP
        return 1e6 * (self.cpu[-1] - self.cpu[WARM_UP - 1]) / steps, 1e6 * (
            self.wall[-1] - self.wall[WARM_UP - 1]
        ) / steps


class StampCallback(TrainerCallback):
    """Stamps a clock after every optimizer step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stamp."""
        self.clock.stamp()


def by_hand(steps: int, accumulation: int) -> Clock:
    """The loop that people write."""
    torch.manual_seed(0)
    model, clock = Perceptron(), Clock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    loader = DataLoader(Rows(steps * accumulation * BATCH), BATCH, shuffle=True, collate_fn=default_data_collator)
    for micro_step, batch in enumerate(loader, 1):
        loss = model(**batch)["loss"] / accumulation
        loss.backward()
        if micro_step % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            clock.stamp()
    return clock


def by_trainer(steps: int, accumulation: int) -> Clock:
    """The same through the Trainer."""
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        rows = Rows(steps * accumulation * BATCH)
        Trainer(model=Perceptron(), args=args, train_dataset=rows, callbacks=[StampCallback(clock)]).train()
    return clock


def measure(steps: int, runs: int, accumulation: int) -> dict[str, Any]:
    """Alternating runs of both loops."""
    loops: dict[str, Callable[[int, int], Clock]] = {"by_hand": by_hand, "trainer": by_trainer}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for _ in range(runs):
        for name, loop in loops.items():
            taken[name].append(loop(WARM_UP + steps, accumulation).microseconds_per_step())
    result: dict[str, Any] = {}
    for index, clock in enumerate(("cpu_us", "wall_us")):
        result[clock] = {name: spread([pair[index] for pair in pairs]) for name, pairs in taken.items()}
        ratios = [ours[index] / theirs[index] for ours, theirs in zip(taken["trainer"], taken["by_hand"], strict=True)]
        result[clock]["ratio"] = spread(ratios)
    return result


def main() -> None:
    """Measure with accumulation 1 and 4, print, and save when asked."""
    chosen = arguments(__doc__, list(SIZES))
    steps, runs = SIZES[chosen.size]
    torch.set_num_threads(1)
    results = {f"accumulation_{count}": measure(steps, runs, count) for count in (1, 4)}
    publish("step_overhead", chosen.size, {"steps": steps, "runs": runs, "results": results}, chosen.save)


if __name__ == "__main__":
    main()
