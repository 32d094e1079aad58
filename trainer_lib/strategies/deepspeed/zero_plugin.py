"""`trainer.accelerator.state.deepspeed_plugin`, for code written for accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_lib.arguments.deepspeed.deepspeed_config import ZeroPlan


class ZeroPlugin:
    """The resolved configuration, read-only."""

    def __init__(self, plan: ZeroPlan, config: Callable[[], dict[str, Any]]) -> None:
        self._plan = plan
        self._config = config

    @property
    def zero_stage(self) -> int:
        """Return the stage: 0, 1, 2 or 3."""
        return self._plan.stage

    @property
    def zero3_init_flag(self) -> bool:
        """Whether models are sharded while they are built."""
        return self._plan.stage == 3

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are sharded while they are built, as a method of accelerate's name."""
        return self.zero3_init_flag

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration, without sizes that follow from the model."""
        return self._config()
