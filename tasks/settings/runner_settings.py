"""The settings of what maps a stage's workers over a cluster, and their check before anything is placed.

Nothing of a cluster's package is imported: whether it is installed is all that can be seen here.
"""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainer_lib.errors import ConfigError, MissingExtraError
from trainflow.tasks.settings.keyed_settings import Settings

if TYPE_CHECKING:
    from trainflow.tasks.configs import LaunchSettings

# What the cluster decides, or what holds for one machine only.
_DECIDED = ("engine", "node_rank", "rendezvous", "devices", "device_order", "per_device", "config_file", "interface")
_ADDRESSES = {
    "dask": (r"((tcp|tls|ws|wss)://)?[^/\s]+:\d+", "Give that of its scheduler: tcp://host:8786."),
    "ray": (r"auto|[^/\s]+:\d+", "Give host:port of its head, or auto for the cluster of this machine."),
}


class RunnerSettings(Settings):
    """prepare.runner: the cluster whose machines prepare the sources."""

    kind: Literal["dask", "ray"] = Field(
        description="Cluster that runs the workers as tasks of Prefect: dask or ray (the extras of these names)."
    )
    address: str | None = Field(
        default=None,
        description="The cluster: tcp://host:8786 of Dask's scheduler; host:port of Ray's head, or auto. unset: one on "
        "this machine, started for the stage and ended with it.",
    )
    workers: int = Field(
        ge=1, le=1000, description="Worker processes: mapped tasks that pull sources until none is left."
    )


def check_runner(runner: RunnerSettings, launch: LaunchSettings, *, section: str, is_sharded: bool) -> None:
    """Check what can be checked without a cluster.

    Args:
        launch: how each worker is started.
        is_sharded: the recipe prepares source by source.

    Raises:
        ConfigError: the package is not installed, the address is invalid, or the launch has settings of its own.
    """
    for package in (runner.kind, f"prefect_{runner.kind}"):
        if importlib.util.find_spec(package) is None:  # finds it without importing it
            raise MissingExtraError(
                f"This runner belongs to the package {package.replace('_', '-')}, which is not installed.",
                extra=runner.kind,
                field=f"{section}.runner.kind",
                value=runner.kind,
            )
    if not is_sharded:
        raise ConfigError(
            "The recipe prepares its data in one process: it has no function 'prepare_shard'.",
            field=f"{section}.runner.kind",
            value=runner.kind,
            remedy=f"Define list_sources and prepare_shard (docs/recipes/many-sources.md), or remove {section}.runner.",
        )
    form, remedy = _ADDRESSES[runner.kind]
    if runner.address is not None and not re.fullmatch(form, runner.address):
        what = f"This is not the address of a {runner.kind.capitalize()} cluster."
        raise ConfigError(what, field=f"{section}.runner.address", value=runner.address, remedy=remedy)
    wrong = [name for name in _DECIDED if getattr(launch, name) is not None]
    wrong += ["kind"] if launch.kind not in ("auto", "process") else []
    wrong += ["processes"] if launch.processes not in ("auto", 1) else []
    wrong += ["nodes"] if str(launch.nodes) != "1" else []
    for name in wrong:
        raise ConfigError(
            "The runner decides this: it starts one process for each worker, wherever the cluster has room.",
            field=f"{section}.launch.{name}",
            value=getattr(launch, name),
            remedy=f"Remove it, or remove {section}.runner.",
        )
