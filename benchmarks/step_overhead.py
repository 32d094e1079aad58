"""What one optimizer step of a Trainer costs beyond the same work written by hand: ours and that of transformers.

    python -m benchmarks.step_overhead --size full --save

A model so small that the framework dominates: a two-layer perceptron, batches of 8. All three take batches of the same
rows (a dataset class that says nothing about itself, so ours has to find out whether reading a row draws random
numbers) with the same collator, clip gradients to norm 1, step fused AdamW over two groups of parameters (with and
without decay, which both Trainers make) and a linear schedule. None logs, evaluates, saves or shows a bar. Runs
alternate, each in this process; the first steps of each run are left out.

Reported: microseconds per optimizer step of the main thread's own CPU time and of the wall clock (median and quartiles
over runs); overhead, which is a Trainer's microseconds less those of the loop by hand beside it; and the share that our
overhead is of the peer's; the same of each one's quietest run, because other people's work on the machine only ever
adds. Wanted: a share of at most 0.25, and at most 100 µs of our own on a quiet machine.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks._result import arguments, publish, spread
from trainer_lib import Trainer, TrainerCallback, TrainingArguments, default_data_collator

BATCH = 8
WARM_UP = 50
SIZES = {"smallest": (150, 3), "full": (400, 31)}  # optimizer steps a run, runs


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


def by_hand(steps: int, accumulation: int) -> Clock:
    """The loop that people write."""
    torch.manual_seed(0)
    model, clock = Perceptron(), Clock()
    weights = [each for each in model.parameters() if each.ndim > 1]
    biases = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.0}, {"params": biases, "weight_decay": 0.0}]  # as both Trainers do
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
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
    """The same through our Trainer."""
    clock, rows = Clock(), Rows(steps * accumulation * BATCH)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(**_settings(folder, steps, accumulation))
        Trainer(
            model=Perceptron(),
            args=args,
            data_collator=default_data_collator,
            train_dataset=rows,
            callbacks=[_stamping(TrainerCallback, clock)],
        ).train()
    return clock


def by_peer(steps: int, accumulation: int) -> Clock:
    """The same through the Trainer of transformers."""
    clock, rows = Clock(), Rows(steps * accumulation * BATCH)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(**_settings(folder, steps, accumulation))
        transformers.Trainer(
            model=Perceptron(),
            args=args,
            data_collator=default_data_collator,
            train_dataset=rows,
            callbacks=[_stamping(transformers.TrainerCallback, clock)],
        ).train()
    return clock


def _settings(folder: str, steps: int, accumulation: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def _stamping(base: type[Any], clock: Clock) -> Any:
    """A callback of either library that stamps the clock after every optimizer step."""

    class Stamp(base):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.stamp()

    return Stamp()


def measure(steps: int, runs: int, accumulation: int) -> dict[str, Any]:
    """Alternating runs of the three."""
    loops: dict[str, Callable[[int, int], Clock]] = {"by_hand": by_hand, "ours": by_trainer, "peer": by_peer}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for _ in range(runs):
        for name, loop in loops.items():
            with contextlib.redirect_stdout(io.StringIO()):  # both print the run's metrics at its end
                taken[name].append(loop(WARM_UP + steps, accumulation).microseconds_per_step())
    result: dict[str, Any] = {}
    for index, clock in enumerate(("cpu_us", "wall_us")):
        values = {name: [pair[index] for pair in pairs] for name, pairs in taken.items()}
        over = {
            name: [a - b for a, b in zip(values[name], values["by_hand"], strict=True)] for name in ("ours", "peer")
        }
        result[clock] = {name: spread(each) for name, each in values.items()}
        result[clock] |= {f"overhead_{name}": spread(each) for name, each in over.items()}
        shares = [ours / peer for ours, peer in zip(over["ours"], over["peer"], strict=True)]
        result[clock]["share_of_peer"] = spread(shares)
        quietest = {name: min(each) for name, each in values.items()}
        beyond = {name: quietest[name] - quietest["by_hand"] for name in ("ours", "peer")}
        result[clock]["quietest"] = {
            **quietest,
            **{f"overhead_{name}": each for name, each in beyond.items()},
            "share_of_peer": beyond["ours"] / beyond["peer"],
        }
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
