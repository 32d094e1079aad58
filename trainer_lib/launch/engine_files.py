"""Files from a launch to the process that has an engine place its work: ``python -m trainer_lib.engines.driver``.

That process reads the request and the settings from the run directory and leaves there what a launcher on this machine
leaves: events, and a result or the failure. So whatever ends a launch ends an engine's as well.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_lib.errors import ConfigError
from trainer_lib.launch.run_dir import RunDir
from trainer_lib.launch.settings.config import LaunchConfig, from_settings

END_S = 30.0
"""Seconds that an engine has to end what it has placed, beyond those that workers have to save."""
_SETTINGS = "engine.json"


def build_command(run_dir: Path) -> list[str]:
    """Return the command line of the process that has the engine place the work."""
    return [sys.executable, "-P", "-u", "-m", "trainer_lib.engines.driver", str(run_dir)]


def write(run_dir: RunDir, config: LaunchConfig, env: Mapping[str, str]) -> None:
    """Write the settings, and the names of the variables that the workers need. Their values may be secrets."""
    names = sorted({*config.env, *env})
    settings = {"config": dataclasses.asdict(config), "variables": names, "shared": run_dir.is_shared}
    run_dir.write_json(_SETTINGS, settings)


def read(run_dir: RunDir) -> tuple[LaunchConfig, dict[str, Any], list[str], bool]:
    """Read the settings, the request, the names of the variables, and whether others work on the same output."""
    settings, request = run_dir.read_json(_SETTINGS), run_dir.read_json("request.json")
    if settings is None or request is None:
        raise ConfigError(
            "The folder does not hold a launch of an engine.",
            field="run dir",
            value=str(run_dir.path),
            remedy="Start through trainflow.",
        )
    return from_settings(settings["config"]), request, settings["variables"], settings["shared"]
