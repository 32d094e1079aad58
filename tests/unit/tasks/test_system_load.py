"""What the machine does is sampled beside a run: truthfully, and never at its cost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tasks.system_load import SystemLoad, parse_gpus


def test_samples_come_with_seconds_since_the_run_began_until_they_are_closed(tmp_path: Path) -> None:
    samples: list[tuple[dict[str, float], int]] = []
    came = threading.Event()

    def log(values: object, step: int) -> None:
        samples.append((dict(values), step))  # type: ignore[call-overload]
        came.set()

    load = SystemLoad(log, since_s=time.time() - 100, folder=tmp_path, every_s=0.05)
    assert came.wait(20)
    load.close()
    count = len(samples)
    values, step = samples[0]
    assert 100 <= step < 130
    assert 0 <= values["system/cpu_utilization_percentage"] <= 100
    assert 0 < values["system/process_memory_megabytes"] < values["system/system_memory_usage_megabytes"] * 1.1
    assert 0 < values["system/disk_usage_percentage"] <= 100
    time.sleep(0.15)
    assert len(samples) == count


def test_a_log_that_raises_ends_the_sampling_and_nothing_else() -> None:
    calls: list[int] = []

    def log(values: object, step: int) -> None:
        calls.append(step)
        raise OSError("disk full")

    load = SystemLoad(log, since_s=time.time(), every_s=0.01)
    load._thread.join(20)
    assert not load._thread.is_alive()
    load.close()
    assert len(calls) == 1


def test_gpus_are_read_as_their_driver_reports_them() -> None:
    assert parse_gpus("0, 97, 1024, 312.50\n1, [N/A], 0, [N/A]\n") == {
        "system/gpu_0_utilization_percentage": 97.0,
        "system/gpu_0_memory_usage_megabytes": 1073.741824,
        "system/gpu_0_power_usage_watts": 312.5,
        "system/gpu_1_memory_usage_megabytes": 0.0,
    }
    assert parse_gpus("") == {}
