"""Launchers: how worker processes are started and ended, on this machine and on several. Imports no torch.

Public names are imported from their modules when they are first used, because every command reads `LaunchConfig`, and
only a command that launches needs the launchers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_lib.launch.base import launch
    from trainer_lib.launch.nodes import follow
    from trainer_lib.launch.pool import launch_workers
    from trainer_lib.launch.settings.config import LaunchConfig, from_settings, require_torch, resolve_config

_NAMES = {
    "LaunchConfig": "settings.config",
    "follow": "nodes",
    "from_settings": "settings.config",
    "launch": "base",
    "launch_workers": "pool",
    "require_torch": "settings.config",
    "resolve_config": "settings.config",
}

__all__ = ["LaunchConfig", "follow", "from_settings", "launch", "launch_workers", "require_torch", "resolve_config"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module and keep it (PEP 562). Raises AttributeError for any other name."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
