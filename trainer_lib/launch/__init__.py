"""Starting workers and ending them: one protocol over plain processes, torchrun and its like, several machines, and
this very process. Torch-free."""

from trainer_lib.launch.base import launch
from trainer_lib.launch.config import LaunchConfig, from_settings, resolve_config
from trainer_lib.launch.nodes import follow
from trainer_lib.launch.notebook import notebook_launcher

__all__ = ["LaunchConfig", "follow", "from_settings", "launch", "notebook_launcher", "resolve_config"]
