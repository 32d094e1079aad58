"""The errors that refuse a launch: a setting, or a machine that cannot take part."""

from __future__ import annotations

from trainer_lib.errors import ConfigError


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
