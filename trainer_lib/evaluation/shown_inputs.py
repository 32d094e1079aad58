"""Inputs of the rows that a report shows: a text of bounded length, and a small picture where a column holds one."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainer_lib.secrets import mask

CHARS = 300
"""The length of the text of a row with one column; a table's row has up to 12 values of 60."""
_VALUE_CHARS, _COLUMNS, _NUMBERS = 60, 12, 8
_SIDE, _SMALL = 96, 32  # pixels of a picture, and of one that JPEG would blur
_MOST_PIXELS = 50_000_000  # that are decoded
_LEAST_SIDE = 4
_CHANNELS = (1, 3, 4)
_LABELS = "labels"


def collect_inputs(
    outcomes: Mapping[str, Any], row_of: Callable[[Any], Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """The inputs of all rows that outcomes name, by the id as a text.

    Args:
        outcomes: as `summarize_outcomes` gives them.
        row_of: the columns of a row, by its id.
    """
    named = [row_id for name in ("hardest", "samples") for row_id, *_ in outcomes.get(name) or ()]
    named += [row_id for *_, ids in outcomes.get("confusions") or () for row_id in ids]
    return {str(row_id): describe_input(row_of(row_id)) for row_id in dict.fromkeys(named)}


def describe_input(row: Mapping[str, Any]) -> dict[str, str]:
    """A row as `text`, with `image`, a data URI, where a column holds bytes of a picture or pixels in uint8."""
    values = {name: value for name, value in row.items() if name != _LABELS}
    images = {name: image for name, value in values.items() if (image := _draw_small(value)) is not None}
    texts = {name: _in_words(value) for name, value in values.items() if name not in images}
    if len(texts) == 1:
        text = _shorten(next(iter(texts.values())), CHARS)
    else:
        text = "; ".join(f"{name}: {_shorten(value, _VALUE_CHARS)}" for name, value in list(texts.items())[:_COLUMNS])
        text += f"; and {len(texts) - _COLUMNS:,} more" if len(texts) > _COLUMNS else ""
    return {"text": mask(text), **({"image": next(iter(images.values()))} if images else {})}


def _in_words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, np.ndarray):
        if value.size > _NUMBERS:
            return f"{value.dtype} {list(value.shape)}"
        return str(value.tolist())
    return " ".join(" ".join(map(str, value if isinstance(value, list) else [value])).split())


def _shorten(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def _draw_small(value: Any) -> str | None:
    """A thumbnail as a data URI; None for anything else."""
    from PIL import Image

    try:
        if isinstance(value, bytes):
            picture: Any = Image.open(io.BytesIO(value))
            if picture.width * picture.height > _MOST_PIXELS:
                return None
            picture = picture.convert("RGB")
        elif (pixels := _pixels(value)) is not None:
            picture = Image.fromarray(pixels)
        else:
            return None
    except Exception:  # a damaged picture: Pillow's formats raise many kinds
        return None
    picture.thumbnail((_SIDE, _SIDE))
    form = "JPEG" if picture.mode in ("L", "RGB") and max(picture.size) > _SMALL else "PNG"
    buffer = io.BytesIO()
    picture.save(buffer, format=form, **({"quality": 80} if form == "JPEG" else {}))
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _pixels(value: Any) -> np.ndarray | None:
    """An image ``[height, width]`` or with channels behind; None for another array."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim not in (2, 3):
        return None
    pixels: np.ndarray = value if value.ndim == 3 else value[..., None]
    if pixels.shape[-1] not in _CHANNELS and pixels.shape[0] in _CHANNELS:
        pixels = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    if min(pixels.shape[:2]) < _LEAST_SIDE or pixels.shape[-1] not in _CHANNELS:
        return None
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
