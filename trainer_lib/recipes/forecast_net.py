"""A small network that forecasts a series from its last steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_LEAST_SPREAD = 1e-6  # a window of equal values is not divided by nothing


class ForecastNet(nn.Module):
    """Layers from the known steps to those to come, shared by all series and targets.

    Each window is shifted by its last value and divided by its spread, and the forecast is brought back: a series may
    have any level. Without `hidden` it is NLinear (Zeng et al., Are Transformers Effective for Time Series
    Forecasting?, 2022, https://arxiv.org/abs/2205.13504) with the spread besides.

    Args:
        context: steps that are known.
        horizon: steps to forecast.
        known: mean and spread of each covariate in the training rows.
        hidden: sizes of the layers between.
        dropout: probability, after each of these.
    """

    known_mean: Tensor
    known_spread: Tensor

    def __init__(
        self, context: int, horizon: int, known: Sequence[Sequence[float]], hidden: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        self.register_buffer("known_mean", torch.tensor([mean for mean, _ in known], dtype=torch.float32))
        self.register_buffer("known_spread", torch.tensor([spread for _, spread in known], dtype=torch.float32))
        size = context + len(known) * (context + horizon)
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(size, width), nn.GELU(), nn.Dropout(dropout)]
            size = width
        self.layers = nn.Sequential(*layers, nn.Linear(size, horizon))

    def forward(self, past: Tensor, known: Tensor | None = None) -> dict[str, Tensor]:
        """Forecasts ``[batch, horizon, targets]`` in `logits`.

        Args:
            past: the targets' known steps ``[batch, context, targets]``.
            known: covariates of all steps ``[batch, context + horizon, covariates]``.
        """
        last = past[:, -1:]
        spread = past.std(dim=1, keepdim=True, correction=0).clamp(min=_LEAST_SPREAD)
        inputs = ((past - last) / spread).transpose(1, 2)
        if known is not None:
            standard = ((known - self.known_mean) / self.known_spread).flatten(1)
            inputs = torch.cat((inputs, standard[:, None].expand(-1, inputs.shape[1], -1)), dim=2)
        return {"logits": self.layers(inputs).transpose(1, 2) * spread + last}
