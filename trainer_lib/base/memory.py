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
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import psutil

# A peak that lasts for less time is missed.
_SAMPLE_S = 0.002


def _this_process() -> psutil.Process:
    import psutil  # the import takes a tenth of a second, so it waits until memory is measured

    return psutil.Process()


class MemoryTracker:
    """Measures the memory of the Trainer's stages and adds it to their metrics; does nothing when it is disabled."""

    def __init__(self, *, enabled: bool, device: torch.device | None = None) -> None:
        self._process = _this_process() if enabled else None
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._stage: str | None = None  # the one under way
        self._before: dict[str, int] = {}
        self._peak = 0
        self._done = threading.Event()
        self._sampler: threading.Thread | None = None
        self._unreported: dict[str, int] = {}  # of stages that ended without metrics to report in

    def start(self, stage: str) -> None:
        """Begin a stage ("init", "train", "eval" or "test"), unless another is under way."""
        if self._process is None or self._stage is not None:
            return
        gc.collect()  # garbage of the stage before does not belong to this one
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)
        self._stage, self._before, self._peak = stage, self._read(), 0
        if stage == "init":
            self._unreported |= {f"before_init_mem_{kind}": value for kind, value in self._before.items()}
        self._done.clear()
        self._sampler = threading.Thread(target=self._sample, name="trainflow-memory", daemon=True)
        self._sampler.start()

    def stop(self, stage: str, metrics: dict[str, Any] | None = None) -> None:
        """End a stage; its numbers are added to `metrics`, or kept for the next stage that passes some."""
        if self._stage is None or self._stage != stage:
            return
        self.abandon()
        gc.collect()
        after, peaks = self._read(), {"cpu": self._peak}
        if self._gpu is not None:
            peaks["gpu"] = torch.cuda.max_memory_allocated(self._gpu)
        for kind, before in self._before.items():
            self._unreported[f"{stage}_mem_{kind}_alloc_delta"] = after[kind] - before
            # The peak above the larger of both ends: where memory grew, the two numbers add up to the peak.
            self._unreported[f"{stage}_mem_{kind}_peaked_delta"] = max(0, peaks[kind] - max(after[kind], before))
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
        """End the stage under way without a report."""
        if self._sampler is not None:
            self._done.set()
            self._sampler.join()
        self._stage = self._sampler = None

    def _sample(self) -> None:
        while self._process is not None and not self._done.wait(_SAMPLE_S):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def _read(self) -> dict[str, int]:
        used = {"cpu": 0 if self._process is None else int(self._process.memory_info().rss)}
        return used if self._gpu is None else {**used, "gpu": torch.cuda.memory_allocated(self._gpu)}


def read_resident_bytes() -> int:
    """Return the resident set of this process in bytes."""
    return int(_this_process().memory_info().rss)


def read_peak_bytes(device: torch.device) -> int:
    """The most memory that this process had at one time, in bytes: torch's on a GPU, else the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def empty_device_cache(device: torch.device) -> None:
    """Return the unused memory that torch's allocator holds to the device; on a CPU it does nothing."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
