"""Launchers: how worker processes are started and ended, on this machine and on several. Imports no torch."""

from trainer_lib.launch.base import launch
from trainer_lib.launch.config import LaunchConfig, from_settings, resolve_config
from trainer_lib.launch.nodes import follow
from trainer_lib.launch.notebook import notebook_launcher

__all__ = ["LaunchConfig", "follow", "from_settings", "launch", "notebook_launcher", "resolve_config"]
