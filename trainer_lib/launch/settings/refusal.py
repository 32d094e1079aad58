"""The errors that refuse a launch: a setting, a machine that cannot take part, a package that is not installed."""

from __future__ import annotations

import importlib.util

from trainer_lib.errors import ConfigError, MissingExtraError

_LAUNCHERS = {"accelerate": "accelerate", "deepspeed": "deepspeed"}  # kind -> the package that brings the launcher


def refused(name: str, value: object, message: str, remedy: str) -> ConfigError:
    """Return the error for a setting, named as in the spec's train section."""
    return ConfigError(message, field=f"train.launch.{name}", value=value, remedy=remedy)


def unshared(host: str, url: str) -> ConfigError:
    """Return the error of a machine of a cluster that does not see the job's folder."""
    return ConfigError(
        f"The machine {host} does not see this folder as this machine does.",
        field="storage",
        value=url,
        remedy="Use a store, or a folder, that all machines of the cluster share.",
    )


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
