"""Folders of this user on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder(name: str) -> Path:
    """The private folder `name` below ``~/.local/state/trainflow`` (or below XDG_STATE_HOME), made where it is missing.

    Raises:
        OSError: it cannot be made.
    """
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "trainflow" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def cache_folder(name: str) -> Path:
    """The private folder `name` below ``~/.cache/trainflow`` (or below XDG_CACHE_HOME), made where it is missing.

    What lies in it can be made again at any time.

    Raises:
        OSError: it cannot be made.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trainflow" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
