"""The cost of a Trainer's optimizer step beyond the same work written by hand: ours and that of transformers.

    python -m benchmarks.step_overhead --size full --save

The model is so small that the framework dominates: a two-layer perceptron, batches of 8. All three loops read the same
rows with the same collator, clip gradients to norm 1, step fused AdamW over two groups of parameters (with and without
decay, as both Trainers group them) and step a linear schedule. The dataset class does not declare anything, so ours has
to find out whether reading a row draws random numbers. Nothing is logged, evaluated, saved or shown. Runs alternate in
this process, and the first steps of each run are left out.

Reported, per optimizer step:

- microseconds of the main thread's CPU time and of the wall clock, as median and quartiles over runs; the overhead,
  which is a Trainer's time minus that of the loop by hand beside it; our overhead as a share of the peer's; and these
  numbers for each loop's quietest run, since other load on the machine only adds.
- calls on the main thread, counted with `sys.setprofile` in runs of their own: `python` counts functions entered and
  generators resumed, `all` also C functions. The median over steps does not depend on the machine or its load: every
  run gives the same numbers.

Wanted: a share of at most 0.25, at most 100 µs of our own on a quiet machine, and at most 600 calls of all kinds with
accumulation 1.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks._result import arguments, publish, spread
from trainer_lib import Trainer, TrainerCallback, TrainingArguments, default_data_collator

BATCH = 8
WARM_UP = 50
SIZES = {"smallest": (150, 3), "full": (400, 31)}  # optimizer steps a run, runs
CALLS_STEPS = 50
MOST_CALLS = 600


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
        """Note the end of a step."""
        self.cpu.append(time.thread_time())
        self.wall.append(time.perf_counter())

    def microseconds_per_step(self) -> tuple[float, float]:
        """(CPU, wall) of the steps after the warm-up."""
        steps = len(self.cpu) - WARM_UP
        return 1e6 * (self.cpu[-1] - self.cpu[WARM_UP - 1]) / steps, 1e6 * (
            self.wall[-1] - self.wall[WARM_UP - 1]
        ) / steps


@dataclass
class CallCounter(Clock):
    """Calls between the ends of two steps, on the thread that stamps."""

    python: list[int] = field(default_factory=list)
    c: list[int] = field(default_factory=list)
    _python: int = 0
    _c: int = 0

    @override
    def stamp(self) -> None:
        # The profiler is off in here, so that stamping itself is not counted: only entering this method is.
        sys.setprofile(None)
        self.python.append(self._python)
        self.c.append(self._c - 1)  # without the call that switched the profiler off
        self._python = self._c = 0
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._python += 1
        elif event == "c_call":
            self._c += 1

    def calls_per_step(self) -> dict[str, float]:
        """Medians of the steps after the warm-up: an occasional step also collects losses."""
        python, c = statistics.median(self.python[WARM_UP:]), statistics.median(self.c[WARM_UP:])
        return {"python": python, "all": python + c}


def by_hand(steps: int, accumulation: int, clock: Clock) -> None:
    """Run the loop that people write by hand."""
    torch.manual_seed(0)
    model = Perceptron()
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


def by_trainer(steps: int, accumulation: int, clock: Clock) -> None:
    """Run that work through our Trainer."""
    rows = Rows(steps * accumulation * BATCH)
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


def by_peer(steps: int, accumulation: int, clock: Clock) -> None:
    """Run that work through the Trainer of transformers."""
    rows = Rows(steps * accumulation * BATCH)
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
    """Build a callback for either library that stamps the clock after every optimizer step."""

    class Stamp(base):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.stamp()

    return Stamp()


LOOPS: dict[str, Callable[[int, int, Clock], None]] = {"by_hand": by_hand, "ours": by_trainer, "peer": by_peer}


def count_calls(loop: Callable[[int, int, Clock], None], accumulation: int) -> dict[str, float]:
    """Count calls per optimizer step of a loop, by kind."""
    counter = CallCounter()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            loop(WARM_UP + CALLS_STEPS, accumulation, counter)
    finally:
        sys.setprofile(None)
    return counter.calls_per_step()


def measure(steps: int, runs: int, accumulation: int) -> dict[str, Any]:
    """Time alternating runs of the three loops."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in LOOPS}
    for _ in range(runs):
        for name, loop in LOOPS.items():
            clock = Clock()
            with contextlib.redirect_stdout(io.StringIO()):  # both Trainers print metrics at the end
                loop(WARM_UP + steps, accumulation, clock)
            taken[name].append(clock.microseconds_per_step())
    result: dict[str, Any] = {}
    for index, unit in enumerate(("cpu_us", "wall_us")):
        values = {name: [pair[index] for pair in pairs] for name, pairs in taken.items()}
        over = {
            name: [a - b for a, b in zip(values[name], values["by_hand"], strict=True)] for name in ("ours", "peer")
        }
        result[unit] = {name: spread(each) for name, each in values.items()}
        result[unit] |= {f"overhead_{name}": spread(each) for name, each in over.items()}
        shares = [ours / peer for ours, peer in zip(over["ours"], over["peer"], strict=True)]
        result[unit]["share_of_peer"] = spread(shares)
        quietest = {name: min(each) for name, each in values.items()}
        beyond = {name: quietest[name] - quietest["by_hand"] for name in ("ours", "peer")}
        result[unit]["quietest"] = {
            **quietest,
            **{f"overhead_{name}": each for name, each in beyond.items()},
            "share_of_peer": beyond["ours"] / beyond["peer"],
        }
    return result


def main() -> None:
    """Measure with accumulation 1 and 4, print, and save on request."""
    chosen = arguments(__doc__, list(SIZES))
    steps, runs = SIZES[chosen.size]
    torch.set_num_threads(1)
    results = {}
    for count in (1, 4):
        calls = {name: count_calls(loop, count) for name, loop in LOOPS.items()}
        results[f"accumulation_{count}"] = {**measure(steps, runs, count), "calls": calls}
    publish(
        "step_overhead",
        chosen.size,
        {"steps": steps, "runs": runs, "most_calls": MOST_CALLS, "results": results},
        chosen.save,
    )


if __name__ == "__main__":
    main()
