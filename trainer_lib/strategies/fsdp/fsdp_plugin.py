"""`trainer.accelerator.state.fsdp_plugin`, for code written for accelerate's plugin of FSDP's second version."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from trainer_lib.arguments.fsdp.fsdp_config import FsdpSettings
from trainer_lib.arguments.fsdp.fsdp_keys import sharded_checkpoints
from trainer_lib.strategies.fsdp.placing import mixed_precision, offload_policy


class FsdpPlugin:
    """The settings under accelerate's names, read-only except for how checkpoints are written.

    Attributes:
        fsdp_version: 2, for `fully_shard`.
        sharded_checkpoints: every process writes its own rows; the next save reads it.
        reshard_after_forward: gathered parameters are released between forward and backward pass.
        activation_checkpointing: activations are recomputed in the backward pass.
        cpu_ram_efficient_loading: only the first process builds the model with its values.
        ignored_modules: a regular expression for the names of modules that stay whole; None when there is none.
    """

    fsdp_version = 2

    def __init__(self, settings: FsdpSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self.sharded_checkpoints = settings.sharded_checkpoints
        self.reshard_after_forward = settings.reshards
        self.activation_checkpointing = settings.activation_checkpointing
        self.cpu_ram_efficient_loading = settings.cpu_ram_efficient_loading
        self.ignored_modules = "|".join(settings.ignored_modules) or None

    @property
    def cpu_offload(self) -> OffloadPolicy:
        """Return torch's policy for where the rows are kept."""
        return offload_policy(self._settings, self._device)

    @property
    def mixed_precision_policy(self) -> MixedPrecisionPolicy:
        """Return torch's policy for the formats of gathered parameters and of exchanged gradients."""
        return mixed_precision(self._settings)

    @property
    def state_dict_type(self) -> str:
        """Return SHARDED_STATE_DICT or FULL_STATE_DICT."""
        return "SHARDED_STATE_DICT" if self.sharded_checkpoints else "FULL_STATE_DICT"

    def set_state_dict_type(self, state_dict_type: str = "FULL_STATE_DICT") -> None:
        """Choose how checkpoints are written from now on. Call it with the same value on every process.

        Raises:
            ConfigError: the value is neither SHARDED_STATE_DICT nor FULL_STATE_DICT.
        """
        self.sharded_checkpoints = sharded_checkpoints(state_dict_type, field="state_dict_type")
