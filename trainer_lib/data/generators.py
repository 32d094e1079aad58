"""The three CPU generators a sample may draw from - Python's, NumPy's, torch's: seeded, put back, and watched.

Most data draws nothing, yet only the data itself could say so. Watching finds out: a batch is read as it is, and when a
generator has moved by then it is put back, and the batch is read again with every sample seeded.

Asking for states is slow (NumPy's 31 µs, Python's 8 µs: word by word), so the words are compared where they lie in
memory. Both layouts are compared with what the public interface says before they are relied on; where they differ
(another interpreter, another NumPy, another generator) nothing is watched and every sample is seeded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_WORDS = 624  # of a Mersenne twister, 32 bits each; then its position
_BYTES = 4 * (_WORDS + 1)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under freshly seeded Python, NumPy and torch CPU generators, then put the old states back."""
    with keep_generators():
        seed_generators(seed)
        yield


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Put the states of the Python, NumPy and torch CPU generators back after a block."""
    python, legacy, generator = random.getstate(), np.random.get_state(), torch.default_generator
    state = generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        generator.set_state(state)


def seed_generators(seed: int) -> None:
    """Seed the three CPU generators from one 64-bit number. (torch.manual_seed would visit every device: 100 µs.)"""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


class Watch:
    """What the three generators were at one moment; made by `watch`."""

    def __init__(self, python: bytes, numpy: bytes) -> None:
        self._python = python
        self._gauss = _python_gauss()
        self._numpy = numpy
        self._state = torch.default_generator.get_state()

    def moved(self) -> bool:
        """Whether anything was drawn from one of them since, or one was seeded."""
        if _python_words() != self._python or _python_gauss() != self._gauss or _numpy_words() != self._numpy:
            return True
        return torch.default_generator.get_state().numpy().tobytes() != self._state.numpy().tobytes()

    def put_back(self) -> None:
        """Set all three back to that moment."""
        position, *words = struct.unpack(f"={_WORDS + 1}I", self._python)
        random.setstate((3, (*words, position), self._gauss))
        *words, position = np.frombuffer(self._numpy, dtype=np.uint32).tolist()
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, 0, 0.0))
        torch.default_generator.set_state(self._state)


def watch() -> Watch | None:
    """Watch the generators from here on; None when that cannot be done without missing a draw."""
    python, numpy = _python_words(), _numpy_words()
    # NumPy keeps the second of two Gaussian numbers where no word shows it: handing it out would go unnoticed.
    return None if python is None or numpy is None or not _holds_no_gauss(numpy) else Watch(python, numpy)


def _python_gauss() -> Any:
    return getattr(random, "_inst").gauss_next  # noqa: B009 - typed as private


def _python_words() -> bytes | None:
    address = _python_address()
    return None if address is None else ctypes.string_at(address, _BYTES)


@functools.cache
def _python_address() -> int | None:
    """Where `random`'s own generator lies: after the object's header a position, then the words."""
    inst: Any = getattr(random, "_inst", None)
    base = type(inst).__mro__[1] if inst is not None else object
    if base.__basicsize__ < object.__basicsize__ + _BYTES:
        return None
    address = id(inst) + object.__basicsize__
    position, *words = struct.unpack(f"={_WORDS + 1}I", ctypes.string_at(address, _BYTES))
    return address if inst.getstate()[1] == (*words, position) else None


def _numpy_words() -> bytes | None:
    address = _numpy_address(_bit_generator())
    return None if address is None else ctypes.string_at(address, _BYTES)


_bit_generator: Any = getattr(np.random, "get_bit_generator")  # noqa: B009 - missing in NumPy's own types


@functools.lru_cache(maxsize=1)
def _numpy_address(generator: Any) -> int | None:
    """Where the words of NumPy's global generator lie, its position behind them."""
    if type(generator) is not np.random.MT19937:
        return None
    address = int(generator.ctypes.state_address)
    *words, position = struct.unpack(f"={_WORDS + 1}I", ctypes.string_at(address, _BYTES))
    state = generator.state["state"]
    return address if (state["key"].tolist(), state["pos"]) == (words, position) else None


_without_gauss = b""  # the words beside which there was certainly no second Gaussian number


def _holds_no_gauss(words: bytes) -> bool:
    # One appears only by drawing, which changes the words; as long as they have not changed there is none.
    global _without_gauss
    if words != _without_gauss:
        if np.random.get_state(legacy=False)["has_gauss"]:
            return False
        _without_gauss = words
    return True
