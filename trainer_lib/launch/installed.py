"""Checks that a package is installed before a launch needs it, without importing it."""

from __future__ import annotations

import importlib.util

from trainer_lib.errors import MissingExtraError

_LAUNCHERS = {"accelerate": "accelerate", "deepspeed": "deepspeed"}  # kind -> the package that brings the launcher


def require_torch() -> None:
    """Raises MissingExtraError where torch is not installed: no worker could start."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch is not installed here, and the workers of every stage need it.", extra="torch")


def check_installed(kind: str) -> None:
    """Raises MissingExtraError where the package that brings this launcher is not installed."""
    package = _LAUNCHERS.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"This launcher belongs to the package {package}, which is not installed.",
            extra="deepspeed" if package == "deepspeed" else "torch",
            field="train.launch.kind",
            value=kind,
        )
