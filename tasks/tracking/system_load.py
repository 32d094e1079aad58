"""Samples what this machine does while a run is at work, under the names of MLflow's own system metrics.

A thread of the flow's process reads counters of the system; the workers are not asked, so training pays nothing.
nvidia-smi reads the GPUs; it comes with their driver. On several machines it is the leading one that is sampled.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

EVERY_S = 10.0
_GPU_S = 5.0
_GPU_FIELDS = {
    "index": "",
    "utilization.gpu": "utilization_percentage",
    "memory.used": "memory_usage_megabytes",
    "power.draw": "power_usage_watts",
}
_MB = 1e6
_log = logging.getLogger(__name__)


class SystemLoad:
    """Calls `log` with a sample every ten seconds, until it is closed; the step is in seconds since the run began.

    Args:
        log: takes values by name and the step. What it raises ends the sampling.
        since_s: when the run began, in seconds since 1970.
        folder: its file system's use is sampled; None: of none.
    """

    def __init__(
        self,
        log: Callable[[Mapping[str, float], int], None],
        *,
        since_s: float,
        folder: Path | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._log = log
        self._since_s = since_s
        self._folder = folder
        self._every_s = every_s
        self._gpu_program = shutil.which("nvidia-smi")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainflow-system-load", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sampling. Safe to repeat."""
        self._ended.set()
        self._thread.join(_GPU_S)

    def _run(self) -> None:
        try:
            import psutil

            psutil.cpu_percent()  # the next call says what was used since this one
            while not self._ended.wait(self._every_s):
                self._log(self.sample(), max(0, round(time.time() - self._since_s)))
        except Exception as error:  # a sample is never worth a run
            _log.debug("The system's load is not sampled any more: %s", error)

    def sample(self) -> dict[str, float]:
        """The load now; the CPU's since the last sample."""
        import psutil

        memory = psutil.virtual_memory()
        values = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / _MB,
            "system/system_memory_usage_percentage": memory.percent,
            "system/process_memory_megabytes": _memory_of_descendants() / _MB,
        }
        with contextlib.suppress(OSError):
            if self._folder is not None:
                values["system/disk_usage_percentage"] = psutil.disk_usage(str(self._folder)).percent
        return values | self._sample_gpus()

    def _sample_gpus(self) -> dict[str, float]:
        if self._gpu_program is None:
            return {}
        query = [self._gpu_program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_S, check=True)
        except (OSError, subprocess.SubprocessError):  # a driver without GPUs, or one that hangs
            self._gpu_program = None
            return {}
        return parse_gpus(done.stdout)


def parse_gpus(text: str) -> dict[str, float]:
    """The values in nvidia-smi's lines `index, percent, MiB, W`; those that a GPU does not report are left out."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        index, *cells = [cell.strip() for cell in line.split(",")]
        for name, cell in zip([name for name in _GPU_FIELDS.values() if name], cells, strict=False):
            with contextlib.suppress(ValueError):
                factor = 2**20 / _MB if name.startswith("memory") else 1.0
                values[f"system/gpu_{index}_{name}"] = float(cell) * factor
    return values


def _memory_of_descendants() -> int:
    """Bytes in memory of this process and all that it started; what they share is counted once, where Linux says so."""
    import psutil

    total = 0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    return total
