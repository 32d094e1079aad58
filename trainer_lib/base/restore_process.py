"""Restore what a library changes in the process that calls it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def variables_kept(given: Mapping[str, str], *others: str) -> Iterator[None]:
    """Set environment variables; afterwards they and `others` are what they were."""
    before = {name: os.environ.get(name) for name in (*given, *others)}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def signals_kept(*numbers: signal.Signals) -> Iterator[None]:
    """Afterwards the handlers are what they were. Only the main thread can change handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one that C has set


@contextlib.contextmanager
def objects_set_aside() -> Iterator[None]:
    """Inside the block collections pass over what was made before: a quarter of a second for each large one."""
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
