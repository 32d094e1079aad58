"""Versions and the processor that a result was made with, read without importing anything."""

from __future__ import annotations

import contextlib
import platform
import sys
from importlib import metadata
from pathlib import Path

_PACKAGES = ("trainflow", "torch", "numpy", "safetensors", "transformers", "accelerate", "pyarrow")


def find_versions() -> dict[str, str]:
    """Python's version and those of the packages that train and predict; no entry for one that is not installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def find_processor() -> str:
    """The processor's name, as the system gives it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
            return next(
                (row.partition(":")[2].strip() for row in text.splitlines() if row.startswith("model name")), ""
            )
    return platform.processor()


def describe_environment() -> dict[str, str]:
    """Versions and, under the name `processor`, the processor."""
    return {**find_versions(), "processor": find_processor()}
