"""Locks on open files (`flock`) that are tried once and never waited for.

The kernel ends a lock with the last process that has the file open, however that process ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file, and return whether that worked: not while another open file holds a lock that excludes it.

    A lock that it holds already becomes the other kind. Raises OSError where the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Give the lock of an open file back."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Return whether an open file holds `path` for itself alone; False where there is no such file. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)
