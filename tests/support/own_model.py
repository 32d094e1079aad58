"""A transformers model whose code is not part of the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class OwnConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    model_type = "own"


class OwnModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.layer = nn.Embedding(32, 4)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": self.layer(input_ids).square().mean()}
