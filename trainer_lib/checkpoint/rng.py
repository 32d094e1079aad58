"""The state of every global random number generator of this process, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from trainer_lib.errors import DamagedError


def capture_rng() -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators, and the current device's where there is one."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    if torch.backends.mps.is_available():
        state["mps"] = _encode(torch.mps.get_rng_state())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put the generators back. A device's state is left out where there is no such device now.

    Raises:
        DamagedError: not what `capture_rng` returns.
    """
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        # NumPy takes the position as it is, and would read beyond the 624 words.
        if len(keys) != 624 or type(position) is not int or not 0 <= position <= 624:
            raise ValueError("NumPy's state is not a Mersenne Twister's")
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_decode(state["cuda"]))
        if "mps" in state and torch.backends.mps.is_available():
            torch.mps.set_rng_state(_decode(state["mps"]))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DamagedError(
            f"A saved random state cannot be used: {error}",
            field="rng",
            remedy="Use an earlier checkpoint; the state may come from another version of Python, NumPy or torch.",
        ) from error


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
