"""Clipping: the same bits as torch's own, on the short way as on the long one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_lib.strategies.base import total_norm


def _parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(7, 3, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = torch.randn(7, 3, generator=generator).to(parameter.dtype)
    return [*parameters, nn.Parameter(torch.zeros(2))]  # one without a gradient


@pytest.mark.parametrize("limit", [0.1, 1e6, 0.0, None])
@pytest.mark.parametrize("dtypes", [[torch.float32] * 3, [torch.float32, torch.float64], [torch.bfloat16] * 2, []])
def test_gradients_are_clipped_as_torch_clips_them(limit: float | None, dtypes: list[torch.dtype]) -> None:
    ours, theirs = _parameters(*dtypes), _parameters(*dtypes)
    assert torch.equal(total_norm(ours, limit), nn.utils.clip_grad_norm_(theirs, limit or float("inf")))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad, other.grad)
