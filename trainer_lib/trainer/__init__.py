"""The Trainer: its public methods call collaborators (`internals`), which compute through strategies and loaders."""

from __future__ import annotations

from trainer_lib.trainer.trainer import Trainer

__all__ = ["Trainer"]
