"""Starting workers and ending them: one protocol over plain processes, torchrun and this very process. Torch-free."""

from trainer_lib.launch.base import LaunchConfig, check, launch

__all__ = ["LaunchConfig", "check", "launch"]
