"""The error that refuses a setting of a launch."""

from __future__ import annotations

from trainer_lib.errors import ConfigError


def refused(name: str, value: object, message: str, remedy: str) -> ConfigError:
    """Return the error for a setting, named as in the spec's train section."""
    return ConfigError(message, field=f"train.launch.{name}", value=value, remedy=remedy)
