"""How much anonymous memory something takes at its highest, measured in a process of its own."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVERY = 0.01  # seconds between two looks


def anonymous_bytes() -> int:
    """This process's resident memory that no file backs (RssAnon of /proc/self/status)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("This system does not tell anonymous memory apart.")


class Peak:
    """Looks at the anonymous memory every 10 ms for the length of a block; `bytes` is the most it saw."""

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
    """`function(*arguments)` in a fresh process, which ends with it."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()
