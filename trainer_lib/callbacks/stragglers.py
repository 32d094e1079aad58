"""The rank that keeps the others waiting, by name.

Training is as slow as its slowest rank, and from outside all look alike: they wait for each other in every step. What
tells them apart is a rank's *own* time in a step: loading its data, without the wait for the others' counts, and its
forwards. Backwards exchange gradients, so they do not count; nor do forwards that communicate (FSDP, ZeRO) or must not
be hooked (compiled).

Own times travel through the process group's store, every few seconds, without a collective: no rank ever waits for
them. On a GPU a forward's time is read from events of the stream that have passed already: the host never waits for
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

from trainer_lib.callbacks.base import TrainerCallback
from trainer_lib.distributed import ProcessGroup, current

if TYPE_CHECKING:
    from trainer_lib.arguments import TrainingArguments
    from trainer_lib.state import TrainerControl, TrainerState

_log = logging.getLogger(__name__)
LEAST_S = 0.001  # what is quicker than this nobody waits for


class StragglerCallback(TrainerCallback):
    """Warns when a rank's own time is a multiple of the median for a while. Does nothing in a world of one.

    Args:
        factor: how many times the median is too slow.
        windows: how many windows in a row; each is warned of once.
        every_s: length of a window, seconds.
        report: called with the warning, on rank 0; None: the log.
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
        self._clock: _HostClock | _StreamClock | None = None
        self._hooks: list[Any] = []
        self._comm: ProcessGroup | None = None
        self._store: Any = None
        self._own: list[float] = []
        self._disturbed = True
        self._begun = self._waited = self._loading = self._next = 0.0
        self._slow: dict[int, int] = {}
        self._heard: dict[int, str] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Get ready to measure."""
        comm = current()
        if not isinstance(comm, ProcessGroup):
            return
        self._comm = comm
        self._store = dist.PrefixStore("trainflow/own-time", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        self._clock = _StreamClock() if args.device.type == "cuda" else _HostClock()
        if isinstance(model, nn.Module) and not (args.fsdp or args.deepspeed or args.torch_compile):
            begin, end = self._clock.begin, self._clock.end
            self._hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
        self._disturbed, self._own, self._begun = True, [], time.perf_counter()
        self._next = time.monotonic() + self._every_s

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The data is here."""
        if self._comm is not None:
            self._loading = time.perf_counter() - self._begun - (self._comm.waited_s - self._waited)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One step's own time is complete, the next one's begins."""
        if self._clock is None or self._comm is None:
            return
        forwards = self._clock.lap()
        if not self._disturbed:
            self._own.append(self._loading + forwards)
        self._disturbed = False
        if time.monotonic() >= self._next:
            self._exchange(self._comm)
            self._next = time.monotonic() + self._every_s
        self._begun, self._waited = time.perf_counter(), self._comm.waited_s

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What happens between steps is no part of them: rank 0 writes logs and checkpoints, and is not slow for it."""
        self._disturbed = True

    on_save = on_evaluate = on_prediction_step = on_log

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop measuring."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._clock, self._comm, self._store = [], None, None, None

    def _exchange(self, comm: ProcessGroup) -> None:
        """Say the own time of this window; on rank 0 read everybody's newest, and judge."""
        own, self._own = self._own, []
        if not own:
            return
        try:
            self._store.set(str(comm.rank), json.dumps([time.time(), statistics.median(own)]))
            keys = [str(rank) for rank in range(comm.world_size)]
            if comm.rank != 0 or not self._store.check(keys):
                return
            said = [bytes(value).decode() for value in self._store.multi_get(keys)]
        except RuntimeError:  # the store is gone; why, others will tell
            self._clock = None
            return
        self._judge(said)

    def _judge(self, said: list[str]) -> None:
        times = [float(json.loads(text)[1]) for text in said]
        usual = statistics.median_low(times)
        for rank, (text, own) in enumerate(zip(said, times, strict=True)):
            if own <= max(self._factor * usual, usual + LEAST_S):
                self._slow.pop(rank, None)
            elif text != self._heard.get(rank):  # a rank that is very slow says something less often
                self._slow[rank] = self._slow.get(rank, 0) + 1
                if self._slow[rank] == self._windows:
                    self._report(
                        f"rank {rank} is slow: {own * 1000:.1f} ms of its own a step, the median is "
                        f"{usual * 1000:.1f} ms; the others wait for it."
                    )
            self._heard[rank] = text


class _HostClock:
    """How long a step's forwards take, as the host sees it."""

    def __init__(self) -> None:
        self._begun = self._seconds = 0.0

    def begin(self, *_: Any) -> None:
        """A forward begins."""
        self._begun = time.perf_counter()

    def end(self, *_: Any) -> None:
        """It has ended."""
        self._seconds += time.perf_counter() - self._begun

    def lap(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _StreamClock:
    """The same as the GPU sees it, told a step late: its events are only asked whether they have passed."""

    def __init__(self) -> None:
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._before: list[tuple[Any, Any]] = []

    def begin(self, *_: Any) -> None:
        """A forward begins."""
        self._begun = _event()

    def end(self, *_: Any) -> None:
        """It has ended."""
        self._pairs.append((self._begun, _event()))

    def lap(self) -> float:
        """Seconds of the step before the one that has ended, as far as they have passed on the device."""
        passed = sum(begun.elapsed_time(ended) for begun, ended in self._before if ended.query()) / 1000
        self._before, self._pairs = self._pairs, []
        return float(passed)


def _event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
