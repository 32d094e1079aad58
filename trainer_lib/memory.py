"""The memory report of `skip_memory_metrics=False`: how much each stage allocated, and how much more it peaked at.

Keys are ``<stage>_mem_<cpu|gpu>_<alloc|peaked>_delta`` in bytes, stages ``init``, ``train``, ``eval``, ``test``, plus
``before_init_mem_<cpu|gpu>``; the init stage is reported with the first stage that runs. CPU numbers are resident set
size, its peak taken by a sampling thread (a peak shorter than the sampling interval can be missed); GPU numbers are
torch's allocator on this process's device. Stages do not nest: the outer one wins.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # a tenth of a second: imported when memory is measured
    import psutil

_SAMPLE_S = 0.002


class _Peak(threading.Thread):
    """Watches resident memory until stopped."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(name="trainflow-memory", daemon=True)
        self._process = process
        self._done = threading.Event()
        self.bytes = 0

    def run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self.bytes = max(self.bytes, self._process.memory_info().rss)

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.bytes


def _this_process() -> psutil.Process:
    import psutil

    return psutil.Process()


@dataclass(frozen=True)
class _Start:
    stage: str
    cpu: int
    gpu: int
    peak: _Peak


class MemoryTracker:
    """Measures stages of the Trainer and adds them to their metrics; does nothing at all when disabled."""

    def __init__(self, *, enabled: bool, device: torch.device | None = None) -> None:
        self._enabled = enabled
        self._process = _this_process() if enabled else None
        self._device = device
        self._running: _Start | None = None
        self._unreported: dict[str, int] = {}

    def start(self, stage: str) -> None:
        """Begin a stage ("init", "train", "eval", "test"), unless another is under way."""
        if self._process is None or self._running is not None:
            return
        gc.collect()
        if self._uses_gpu():
            torch.cuda.reset_peak_memory_stats(self._device)
        self._running = _Start(stage, self._process.memory_info().rss, self._gpu_bytes(), _Peak(self._process))
        if stage == "init":
            self._unreported["before_init_mem_cpu"] = self._running.cpu
            if self._uses_gpu():
                self._unreported["before_init_mem_gpu"] = self._running.gpu
        self._running.peak.start()

    def stop(self, stage: str, metrics: dict[str, Any] | None = None) -> None:
        """End the stage; its numbers go into `metrics`, or wait for the next stage that has some."""
        started = self._running
        if self._process is None or started is None or started.stage != stage:
            return
        self._running = None
        peak = started.peak.stop()
        gc.collect()
        cpu = self._process.memory_info().rss
        self._unreported[f"{stage}_mem_cpu_alloc_delta"] = cpu - started.cpu
        self._unreported[f"{stage}_mem_cpu_peaked_delta"] = max(0, peak - max(cpu, started.cpu))
        if self._uses_gpu():
            gpu = self._gpu_bytes()
            peak_gpu = torch.cuda.max_memory_allocated(self._device)
            self._unreported[f"{stage}_mem_gpu_alloc_delta"] = gpu - started.gpu
            self._unreported[f"{stage}_mem_gpu_peaked_delta"] = max(0, peak_gpu - max(gpu, started.gpu))
        if metrics is not None:
            metrics.update(self._unreported)
            self._unreported = {}

    @contextlib.contextmanager
    def stage(self, stage: str, metrics: dict[str, Any] | None = None) -> Iterator[None]:
        """`start` and `stop` around a block; nothing is reported of a block that fails."""
        self.start(stage)
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.stop(stage, metrics)

    def abandon(self) -> None:
        """End whatever is under way without a report: the stage failed."""
        if self._running is not None:
            self._running.peak.stop()
            self._running = None

    def _uses_gpu(self) -> bool:
        return self._device is not None and self._device.type == "cuda"

    def _gpu_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._uses_gpu() else 0


def empty_device_cache(device: torch.device) -> None:
    """Hand memory that the allocator keeps, and nobody uses, back to the device; nothing to do on a CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
