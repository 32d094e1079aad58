"""The states of this process's global random number generators (Python, NumPy, torch, the device), as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from trainer_lib.errors import DamagedError


def capture_rng() -> dict[str, Any]:
    """Capture the states of all global generators; of devices, the current one's."""
    version, words, gauss = random.getstate()
    # legacy=True: a tuple, whose parts JSON can hold.
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": encode_state(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = encode_state(torch.cuda.get_rng_state())
    if torch.backends.mps.is_available():
        state["mps"] = encode_state(torch.mps.get_rng_state())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore what `capture_rng` returned, once all of it is decoded; the state of an absent device is ignored.

    Raises DamagedError when `state` is something else.
    """
    try:
        # Parsed before the first generator is set, so that a malformed state changes none.
        python, numpy = _python_state(state["python"]), _numpy_state(state["numpy"])
        device = {name: _decode(state[name]) for name in ("torch", "cuda", "mps") if name in state}
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(device["torch"])
        if "cuda" in device and torch.cuda.is_available():
            torch.cuda.set_rng_state(device["cuda"])
        if "mps" in device and torch.backends.mps.is_available():
            torch.mps.set_rng_state(device["mps"])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        remedy = "Use an earlier checkpoint; the state may come from another version of Python, NumPy or torch."
        raise DamagedError(f"A saved random state cannot be used: {error}.", field="rng", remedy=remedy) from error


def _python_state(saved: Any) -> tuple[Any, ...]:
    version, words, gauss = saved
    # random.setstate does not look at `gauss`, the spare normal number; a wrong one would fail when it is drawn.
    if not isinstance(words, list) or not (gauss is None or type(gauss) is float):
        raise ValueError("Python's state is not a Mersenne Twister's")
    return version, tuple(words), gauss


def _numpy_state(saved: Any) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = saved
    # NumPy does not check the position, and would read beyond the 624 words.
    if not isinstance(keys, list) or len(keys) != 624 or type(position) is not int or not 0 <= position <= 624:
        raise ValueError("NumPy's state is not a Mersenne Twister's")
    return kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached


def encode_state(state: torch.Tensor) -> str:
    """Encode a generator's state, a uint8 tensor `[bytes]`, as base64."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
