"""The memory report of `skip_memory_metrics=False`: what each stage allocated, and its peak above that, in bytes.

The metrics are named ``<stage>_mem_<cpu|gpu>_<alloc|peaked>_delta`` for the stages ``init``, ``train``, ``eval`` and
``test``, plus ``before_init_mem_<cpu|gpu>``; the init stage is reported with the first stage that follows. CPU numbers
are the resident set size, whose peak a thread samples (a peak shorter than the interval can be missed). GPU numbers are
those of torch's allocator on this process's device. Stages do not nest: the outer one is measured. The names are those
of transformers' ``TrainerMemoryTracker``.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

if TYPE_CHECKING:  # the import takes a tenth of a second, so it waits until memory is measured
    import psutil

# A peak that lasts for less time is missed.
_SAMPLE_S = 0.002


class _Peak(threading.Thread):
    """Samples this process's resident memory until it is stopped.

    Attributes:
        bytes: the largest sample.
    """

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(name="trainflow-memory", daemon=True)
        self._process = process
        self._done = threading.Event()
        self.bytes = 0

    @override
    def run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self.bytes = max(self.bytes, self._process.memory_info().rss)

    def stop(self) -> int:
        """End the thread; returns the largest sample in bytes."""
        self._done.set()
        self.join()
        return self.bytes


def _this_process() -> psutil.Process:
    import psutil

    return psutil.Process()


@dataclass(frozen=True)
class _Start:
    """The memory at the start of a stage, in bytes."""

    stage: str
    cpu: int
    gpu: int
    peak: _Peak


class MemoryTracker:
    """Measures the memory of the Trainer's stages and adds it to their metrics; does nothing when it is disabled."""

    def __init__(self, *, enabled: bool, device: torch.device | None = None) -> None:
        self._enabled = enabled
        self._process = _this_process() if enabled else None
        self._device = device
        self._running: _Start | None = None
        self._unreported: dict[str, int] = {}  # of stages that ended without metrics to report in

    def start(self, stage: str) -> None:
        """Begin a stage ("init", "train", "eval" or "test"), unless another is under way."""
        if self._process is None or self._running is not None:
            return
        gc.collect()  # garbage of the stage before does not belong to this one
        if self._uses_gpu():
            torch.cuda.reset_peak_memory_stats(self._device)
        self._running = _Start(stage, self._process.memory_info().rss, self._gpu_bytes(), _Peak(self._process))
        if stage == "init":
            self._unreported["before_init_mem_cpu"] = self._running.cpu
            if self._uses_gpu():
                self._unreported["before_init_mem_gpu"] = self._running.gpu
        self._running.peak.start()

    def stop(self, stage: str, metrics: dict[str, Any] | None = None) -> None:
        """End a stage; its numbers are added to `metrics`, or kept for the next stage that passes some."""
        started = self._running
        if self._process is None or started is None or started.stage != stage:
            return
        self._running = None
        peak = started.peak.stop()
        gc.collect()
        cpu = self._process.memory_info().rss
        self._unreported[f"{stage}_mem_cpu_alloc_delta"] = cpu - started.cpu
        # The peak above the larger of both ends: where memory grew, the two numbers add up to the peak.
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
        """Measure a ``with`` block as a stage; a block that raises is not reported."""
        self.start(stage)
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.stop(stage, metrics)

    def abandon(self) -> None:
        """End the stage under way without a report, because it failed."""
        if self._running is not None:
            self._running.peak.stop()
            self._running = None

    def _uses_gpu(self) -> bool:
        return self._device is not None and self._device.type == "cuda"

    def _gpu_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._uses_gpu() else 0


def read_resident_bytes() -> int:
    """Return the resident set of this process in bytes."""
    return int(_this_process().memory_info().rss)


def read_peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process had at one time, in bytes.

    On a GPU it is what torch's allocator gave out; elsewhere the resident set, with the interpreter and its libraries.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def empty_device_cache(device: torch.device) -> None:
    """Return the unused memory that torch's allocator holds to the device; on a CPU and on XLA it does nothing."""
    if device.type not in ("cpu", "xla"):  # torch_xla has no such call
        getattr(torch, device.type).empty_cache()
