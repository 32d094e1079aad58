"""Results of benchmarks: a dated JSON file with the machine that they were measured on."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def arguments(description: str | None, sizes: Sequence[str], only: Sequence[str] = ()) -> argparse.Namespace:
    """Parse `--size`, `--save` (a folder; without it nothing is written) and, where parts have names, `--only`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sizes, default=sizes[0])
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, default=None, metavar="FOLDER")
    parser.add_argument("--only", choices=only, default=None, help=None if only else argparse.SUPPRESS)
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """Return the processor, cores, load and versions that the numbers depend on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "trainflow": metadata.version("trainflow"),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high}


def publish(name: str, size: str, result: dict[str, Any], folder: Path | None) -> None:
    """Print the result, and write it to `folder` when one is given."""
    now = datetime.datetime.now(datetime.UTC)
    record = {
        "benchmark": name,
        "size": size,
        "taken": now.isoformat(timespec="seconds"),
        "machine": machine(),
        **result,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{now:%Y-%m-%d}-{name}-{size}.json").write_text(text + "\n", encoding="utf-8")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
