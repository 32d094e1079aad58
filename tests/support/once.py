"""Folders that one test process fills and all of a run's test processes read: what is slow to make is made once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once_per_run(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder that `fill` was called with once for all test processes; nothing may change it later."""
    root = _root(factory)
    folder, done = root / f"once-{name}", root / f"once-{name}.done"
    with (root / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            fill(folder)
            done.touch()
    return folder


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all test processes of a run share: each may write there at any time."""
    folder = _root(factory) / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    return folder


def _root(factory: pytest.TempPathFactory) -> Path:
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
