"""Peak anonymous memory of a function, measured in a process of its own."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVERY = 0.01  # seconds between two looks


def anonymous_bytes() -> int:
    """Return this process's resident memory without file mappings, in bytes (RssAnon of /proc/self/status)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("This system does not tell anonymous memory apart.")


class Peak:
    """Samples the anonymous memory every 10 ms during a block; `bytes` is the maximum."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(_EVERY):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_bytes())


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(*arguments)` in a new process and return its result."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()
