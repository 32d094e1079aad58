"""Finds the rank that keeps the others waiting.

Training is as slow as its slowest rank, and from outside all ranks look alike: they wait for each other in every step.
They differ in their *own* time per step, which is the time to load data (without the wait for the other ranks' counts)
plus the time of the forwards. Backwards exchange gradients and are not counted. Neither are forwards that communicate
(FSDP, ZeRO) or cannot be hooked (compiled models).

Own times are exchanged through the process group's store every few seconds, without a collective, so no rank waits for
them. On a GPU the time of a forward is read from events that the stream has passed already, so the host never waits for
the device.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from trainer_lib.base.json_text import parse_json
from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.distributed.communicator import ProcessGroup, current

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.state import TrainerControl, TrainerState

_log = logging.getLogger(__name__)
MIN_DELAY_S = 0.001  # a shorter delay is not worth a warning


class StragglerCallback(TrainerCallback):
    """Warns when a rank's own time per step stays well above the median. Does nothing with a single process.

    Args:
        factor: a rank is slow when its own time exceeds this multiple of the median.
        windows: number of slow windows, of `every_s` seconds, in a row after which a warning is given, once.
        report: called with the warning on rank 0; default: the log.
    """

    def __init__(
        self,
        *,
        factor: float = 1.5,
        windows: int = 3,
        every_s: float = 5.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._factor, self._windows, self._every_s = factor, windows, every_s
        self._report = report or _log.warning
        self._clock: _Clock | None = None
        self._hooks: list[Any] = []
        self._comm: ProcessGroup | None = None
        self._store: Any = None
        self._own: list[float] = []
        self._disturbed = True
        self._started = self._waited = self._loading = self._next = 0.0
        self._slow: dict[int, int] = {}
        self._counted: dict[int, str] = {}

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        comm = current()
        if not isinstance(comm, ProcessGroup):
            return
        self._comm = comm
        self._store = dist.PrefixStore("trainflow/own-time", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        self._clock = _Clock(on_gpu=args.device.type == "cuda")
        # Wrapped models exchange inside of their forward: a wait would be measured as work.
        if isinstance(model, nn.Module) and not (args.fsdp or args.deepspeed or args.torch_compile):
            begin, end = self._clock.begin, self._clock.end
            self._hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
        self._disturbed, self._own, self._started = True, [], time.perf_counter()
        self._next = time.monotonic() + self._every_s

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._comm is not None:
            # Without the wait for the others' counts, in which a fast rank waits for a slow one.
            self._loading = time.perf_counter() - self._started - (self._comm.waited_s - self._waited)

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._clock is None or self._comm is None:
            return
        forwards = self._clock.lap()
        if not self._disturbed:
            self._own.append(self._loading + forwards)
        self._disturbed = False
        if time.monotonic() >= self._next:
            self._exchange(self._comm)
            self._next = time.monotonic() + self._every_s
        self._started, self._waited = time.perf_counter(), self._comm.waited_s

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Rank 0 alone writes logs and checkpoints between steps: the step around them is not measured.
        self._disturbed = True

    on_save = on_evaluate = on_prediction_step = on_log

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._clock, self._comm, self._store = [], None, None, None

    def _exchange(self, comm: ProcessGroup) -> None:
        """Write this rank's own time to the store; on rank 0 read all ranks' newest times and compare them."""
        own, self._own = self._own, []
        if not own:
            return
        try:
            # With the time, so that rank 0 can tell a new report from one it has counted.
            self._store.set(str(comm.rank), json.dumps([time.time(), statistics.median(own)]))
            keys = [str(rank) for rank in range(comm.world_size)]
            # `check` first: `multi_get` would wait for a rank that has not reported yet.
            if comm.rank != 0 or not self._store.check(keys):
                return
            reports = [bytes(value).decode() for value in self._store.multi_get(keys)]
        except RuntimeError:  # the store is gone; training itself reports why
            self._clock = None
            return
        self._compare(reports)

    def _compare(self, reports: list[str]) -> None:
        times = [float(parse_json(text)[1]) for text in reports]
        # The low median: of two ranks, the faster one is the measure.
        usual = statistics.median_low(times)
        for rank, (text, own) in enumerate(zip(reports, times, strict=True)):
            if own <= max(self._factor * usual, usual + MIN_DELAY_S):
                self._slow.pop(rank, None)
            elif text != self._counted.get(rank):  # a very slow rank reports less often: count each report once
                self._slow[rank] = self._slow.get(rank, 0) + 1
                if self._slow[rank] == self._windows:
                    self._report(
                        f"Rank {rank} is slow: it needs {own * 1000:.1f} ms of its own per step, and the median is "
                        f"{usual * 1000:.1f} ms; the other ranks wait for it."
                    )
            self._counted[rank] = text


class _Clock:
    """Measures the forwards of a step; on a GPU one step late, so that the host never waits for an event."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._started: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._before: list[tuple[Any, Any]] = []

    def begin(self, *_: Any) -> None:
        """Note the start of a forward."""
        self._started = self._now()

    def end(self, *_: Any) -> None:
        """Note the end of a forward."""
        self._pairs.append((self._started, self._now()))

    def lap(self) -> float:
        """Seconds of the forwards since the last call; on a GPU of the step before, as far as it has passed them."""
        pairs, self._pairs = self._pairs, []
        if not self._on_gpu:
            return float(sum(end - start for start, end in pairs))
        before, self._before = self._before, pairs
        return float(sum(start.elapsed_time(end) for start, end in before if end.query()) / 1000)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
