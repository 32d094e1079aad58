"""A small network for images, and random changes of images while a model is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.errors import ConfigError
from trainer_lib.recipes.option_names import choose

AUGMENT: dict[str, Any] = {"flip": False, "shift": 0.0, "rotate": 0.0, "zoom": 0.0}
"""Every random change, with its default: none."""
_GROUP = 8  # channels that are normalized together
_MOST_DEGREES = 180.0


class ImageNet(nn.Module):
    """Blocks of two convolutions, each block at half the resolution, and the mean over all places.

    Args:
        inputs: channels of an image.
        classes: size of the output.
        channels: channels of each block, multiples of 8.
        dropout: probability, before the output.
    """

    def __init__(self, inputs: int, classes: int, channels: Sequence[int], dropout: float) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for width in channels:
            for _ in range(2):
                # Groups, and not the batch: a row's output depends on no other row.
                blocks += [nn.Conv2d(inputs, width, 3, padding=1), nn.GroupNorm(width // _GROUP, width), nn.GELU()]
                inputs = width
            blocks.append(nn.MaxPool2d(2, ceil_mode=True))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(inputs, classes))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits ``[batch, classes]`` of images ``[batch, channels, height, width]``; with labels the cross-entropy."""
        logits = self.head(self.blocks(pixel_values).mean(dim=(2, 3)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def build_image_net(inputs: int, classes: int, *, channels: Sequence[int], dropout: float) -> ImageNet:
    """An `ImageNet`. Raises ConfigError for channels that do not form groups."""
    wrong = [each for each in channels if not isinstance(each, int) or each < _GROUP or each % _GROUP]
    if wrong or not channels:
        what = f"The channels of each block must be a multiple of {_GROUP}."
        raise ConfigError(what, field="train.model.channels", value=list(channels), remedy="Give such as [32, 64].")
    return ImageNet(inputs, classes, channels, dropout)


def augment_training(model: nn.Module, settings: Mapping[str, Any], *, field: str) -> nn.Module:
    """Let a model change its images at random while it is in training mode, and never else.

    The numbers are drawn as those of dropout are: a continued training draws the same ones.

    Args:
        model: takes `pixel_values` ``[batch, channels, height, width]`` by name.
        settings: some of `AUGMENT`: `flip` left and right; the most by which an image is moved (`shift`) and enlarged
            or made smaller (`zoom`), as shares of its size; the most by which it is turned, in degrees (`rotate`).
        field: the setting, for errors.

    Raises:
        ConfigError: a setting is unknown, or out of its range.
    """
    chosen = choose(settings, AUGMENT, field=field)
    for name, most in (("shift", 1.0), ("zoom", 1.0), ("rotate", _MOST_DEGREES)):
        if not 0 <= chosen[name] < most + (name == "rotate"):
            remedy = f"Give a number from 0 on and below {most:g}."
            raise ConfigError("This is out of range.", field=f"{field}.{name}", value=chosen[name], remedy=remedy)
    if any(chosen.values()):
        model.register_forward_pre_hook(_Augment(**chosen), with_kwargs=True)
    return model


class _Augment:
    def __init__(self, flip: bool, shift: float, rotate: float, zoom: float) -> None:
        self._flip, self._shift, self._rotate, self._zoom = flip, shift, rotate, zoom

    def __call__(
        self, model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not model.training or "pixel_values" not in named:
            return None
        return given, {**named, "pixel_values": self.change(named["pixel_values"])}

    def change(self, images: Tensor) -> Tensor:
        """Images ``[batch, channels, height, width]``, each changed by one affine map; edges are continued."""
        rows = len(images)
        # Five numbers for each image whatever is switched on: one setting does not change the draws of another.
        draws = torch.rand(rows, 5, device=images.device) * 2 - 1
        turn = draws[:, 0] * torch.pi * self._rotate / 180
        scale = 1 / (1 + draws[:, 1] * self._zoom)
        side = torch.where(draws[:, 2] < 0, -1.0, 1.0) if self._flip else torch.ones_like(turn)
        shape = images.shape[2] / images.shape[3]
        cosine, sine = torch.cos(turn) * scale, torch.sin(turn) * scale
        first = torch.stack((cosine * side, -sine * shape, draws[:, 3] * self._shift * 2), dim=1)
        second = torch.stack((sine * side / shape, cosine, draws[:, 4] * self._shift * 2), dim=1)
        grid = nn.functional.affine_grid(torch.stack((first, second), dim=1), list(images.shape), align_corners=False)
        return nn.functional.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)
