"""Time that a save blocks training: in the background, waiting for all of it, and with torch's own checkpoints.

    python -m benchmarks.async_save --size full --save
    python -m benchmarks.gpu.saves '{"dry": false}'       # the same on a GPU

A stack of square layers trained with AdamW (three tensors per weight: 12 bytes per parameter), by our Trainer with
`save_async` and without, and by a loop by hand with torch.distributed.checkpoint's `async_save` (with its reusing
stager) and `save`. The four take turns in this process and on the same disk. The next save is requested after the
last one is committed and some quiet steps have passed, so each measurement is a save, never a queue. Training computes
with one thread, so the machine has a core left for the thread that writes.

Reported, over all saves of all runs (median and quartiles): seconds between the end of the step that is saved and the
beginning of the next (`blocked`); the same of the first save of each run alone, which pays for the copy's memory
(`first`); seconds until the commit is known (`until_known`); step time while a save is written, to a quiet step's
(`slowdown`). Ratios are of medians. Before each run's last save the state is hashed, and what was committed is compared
with that (`bytes_equal`). The goal: blocked in the background at most 1/5 of blocked waiting.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks._result import arguments, publish, spread
from trainer_lib import Trainer, TrainerCallback, TrainingArguments
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.checkpoint.optimizer import snapshot_optimizer
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.storage import Store

# size: width and number of the layers, saves a run, rounds
SIZES = {"smallest": (256, 16, 3, 2), "medium": (1024, 25, 3, 3), "full": (1024, 100, 4, 5)}
QUIET = 3  # steps before a save is asked for
CPU = torch.device("cpu")
BATCH = {"cpu": 4, "cuda": 4096}


class Stack(nn.Module):
    """`depth` layers of `width` x `width`."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the mean square of the outputs [batch, width] as the loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean()}


@dataclass
class Clock:
    """Seconds of one run; decides when the next save is due."""

    saves: int
    device: torch.device = CPU
    blocked: list[float] = field(default_factory=list)
    until_known: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    bytes_equal: bool | None = None
    _writing: bool = False
    _pause: int = 0
    _begun: float = 0.0
    _asked: float | None = None
    _since: float = 0.0

    def begin(self) -> None:
        """Note the start of a step."""
        self._begun = self._now()
        if self._asked is not None:
            self.blocked.append(self._begun - self._asked)
            self._asked = None

    def end(self) -> bool:
        """Note the end of a step; return whether it is to be saved."""
        took = self._now() - self._begun
        if self._writing:
            self.beside.append(took)
            return False
        self._pause += 1
        if self._pause > 1:
            self.quiet.append(took)
        return self._pause > QUIET and len(self.until_known) < self.saves

    def ask(self) -> None:
        """Note that the save of the step that has just ended starts here."""
        self._writing, self._pause = True, 0
        self._asked = self._since = self._now()

    def known(self) -> None:
        """Note that training knows of the commit."""
        self.until_known.append(time.perf_counter() - self._since)
        self._writing = False

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def is_last(self) -> bool:
        """The save that is due is the run's last."""
        return len(self.until_known) == self.saves - 1

    @property
    def finished(self) -> bool:
        """All saves are done and the steps after the last are counted."""
        return len(self.until_known) == self.saves and self._pause > QUIET


class Pacer(TrainerCallback):
    """Saves and stops our Trainer as the clock decides."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.expected: dict[str, str] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the step's clock."""
        self.clock.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request a save or the end of training."""
        if self.clock.end():
            if self.clock.is_last:
                self.expected = digests(kwargs["model"], kwargs["optimizer"])
            control.should_save = True
            self.clock.ask()
        control.should_training_stop = self.clock.finished

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the commit."""
        self.clock.known()


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the SHA-256 of every tensor that a checkpoint holds."""
    moments = snapshot_optimizer(optimizer, dict(model.named_parameters())).tensors
    return _digests(model.state_dict()) | _digests(moments)


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(each.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
            for name, each in tensors.items()}  # fmt: skip


def by_trainer(
    folder: Path, width: int, depth: int, saves: int, *, save_async: bool, device: torch.device = CPU
) -> Clock:
    """Run our Trainer."""
    clock = Clock(saves, device)
    pacer = Pacer(clock)
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=device.type == "cpu",
        disable_tqdm=True,
        per_device_train_batch_size=BATCH[device.type],
        max_steps=100_000,
        save_strategy="no",
        save_total_limit=1,
        save_async=save_async,
        logging_strategy="no",
    )
    rows = [{"x": torch.randn(width)} for _ in range(64 * BATCH[device.type])]
    Trainer(model=Stack(width, depth), args=args, train_dataset=rows, callbacks=[pacer]).train()
    root = Store.open(folder)
    loaded = load_checkpoint(root, list_checkpoints(root)[0].name, SingleProcess())
    optimizer = loaded.read_optimizer()
    found = _digests(loaded.read_model()) | _digests(optimizer.tensors if optimizer else {})
    clock.bytes_equal = pacer.expected == found
    return clock


def by_dcp(folder: Path, width: int, depth: int, saves: int, *, save_async: bool, device: torch.device = CPU) -> Clock:
    """Run a loop by hand with torch.distributed.checkpoint."""
    clock = Clock(saves, device)
    torch.manual_seed(0)
    model = Stack(width, depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    pinned = device.type == "cuda"
    options = StagingOptions(
        use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
    )
    stager = DefaultStager(options)
    future: Future[Any] | None = None
    while not clock.finished:
        clock.begin()
        model(torch.randn(BATCH[device.type], width, device=device))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        due = clock.end()
        if future is not None and future.done():
            future.result()
            future = None
            clock.known()
            shutil.rmtree(folder)
        if due:
            clock.ask()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if save_async:
                try:
                    saving: Any = async_save(state, checkpoint_id=folder, async_stager=stager, no_dist=True)
                except KeyError:  # before torch 2.13 a stager serves once
                    stager.close()
                    stager = DefaultStager(options)
                    saving = async_save(state, checkpoint_id=folder, async_stager=stager, no_dist=True)
                future = saving
            else:
                save(state, checkpoint_id=folder, no_dist=True)
                clock.known()
                shutil.rmtree(folder)
    stager.close()
    return clock


def measure(width: int, depth: int, saves: int, rounds: int, device: torch.device = CPU) -> dict[str, Any]:
    """Run all four, alternating."""
    ways: dict[str, Callable[..., Clock]] = {
        "ours_waiting": partial(by_trainer, save_async=False),
        "ours_background": partial(by_trainer, save_async=True),
        "dcp_waiting": partial(by_dcp, save_async=False),
        "dcp_background": partial(by_dcp, save_async=True),
    }
    clocks: dict[str, list[Clock]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            with tempfile.TemporaryDirectory(prefix="trainflow-benchmark-") as folder:
                clocks[name].append(run(Path(folder) / "out", width, depth, saves, device=device))
    results = {name: _summary(each) for name, each in clocks.items()}
    blocked = {name: result["blocked"]["median"] for name, result in results.items()}
    return {
        "parameters": width * width * depth,
        "state_bytes": 3 * 4 * width * width * depth,
        **results,
        "blocked_ratio": blocked["ours_background"] / blocked["ours_waiting"],
        "blocked_ratio_dcp": blocked["dcp_background"] / blocked["dcp_waiting"],
        "blocked_ours_to_dcp": blocked["ours_background"] / blocked["dcp_background"],
    }


def _summary(clocks: list[Clock]) -> dict[str, Any]:
    quiet = [each for clock in clocks for each in clock.quiet]
    beside = [each for clock in clocks for each in clock.beside]
    return {
        "blocked": spread([each for clock in clocks for each in clock.blocked]),
        "first": statistics.median(clock.blocked[0] for clock in clocks),
        "until_known": spread([each for clock in clocks for each in clock.until_known]),
        "step": spread(quiet),
        "slowdown": statistics.median(beside) / statistics.median(quiet) if beside else None,
        "bytes_equal": clocks[0].bytes_equal and all(clock.bytes_equal for clock in clocks),
    }


def main() -> None:
    """Measure and publish."""
    torch.set_num_threads(1)
    options = arguments(__doc__, tuple(SIZES))
    width, depth, saves, rounds = SIZES[options.size]
    publish("async_save", options.size, measure(width, depth, saves, rounds), options.save)


if __name__ == "__main__":
    main()
