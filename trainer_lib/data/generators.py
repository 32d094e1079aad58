"""The three CPU generators a sample may draw from - Python's, NumPy's, torch's: seeded, put back, and watched.

Most data draws nothing, yet only the data itself could say so. Watching finds out: a batch is read as it is, and when a
generator has moved by then it is put back, and the batch is read again with every sample seeded.

Asking NumPy for its state is slow (31 µs), so its words are compared where they lie in memory, at the address that its
public interface gives. The layout is compared with the state before it is relied on; where they differ (another
generator, another NumPy) nothing is watched and every sample is seeded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
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

    def __init__(self, numpy: bytes) -> None:
        self._python = random.getstate()
        self._numpy = numpy
        self._torch = torch.default_generator.get_state()

    def moved(self) -> bool:
        """Whether anything was drawn from one of them since, or one was seeded."""
        numpy = _numpy_words()  # copied, for views are compared word by word
        if numpy is None or bytes(numpy) != self._numpy or random.getstate() != self._python:
            return True
        return torch.default_generator.get_state().numpy().tobytes() != self._torch.numpy().tobytes()

    def put_back(self) -> None:
        """Set all three back to that moment."""
        random.setstate(self._python)
        *words, position = np.frombuffer(self._numpy, dtype=np.uint32).tolist()
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, 0, 0.0))
        torch.default_generator.set_state(self._torch)


def watch() -> Watch | None:
    """Watch the generators from here on; None when that cannot be done without missing a draw."""
    numpy = _numpy_words()
    if numpy is None:
        return None
    words = bytes(numpy)
    # NumPy keeps the second of two Gaussian numbers where no word shows it: handing it out would go unnoticed.
    return Watch(words) if _holds_no_gauss(words) else None


_bit_generator: Any = getattr(np.random, "get_bit_generator")  # noqa: B009 - missing in NumPy's own types


def _numpy_words() -> memoryview | None:
    return _words_of(_bit_generator())


@functools.lru_cache(maxsize=1)
def _words_of(generator: Any) -> memoryview | None:
    """The memory of a generator of NumPy's: the words, then its position."""
    if type(generator) is not np.random.MT19937:
        return None
    memory = memoryview((ctypes.c_ubyte * _BYTES).from_address(int(generator.ctypes.state_address))).cast("B")
    *words, position = np.frombuffer(memory, dtype=np.uint32).tolist()
    state = generator.state["state"]
    return memory if (state["key"].tolist(), state["pos"]) == (words, position) else None


_without_gauss = b""  # the words beside which there was certainly no second Gaussian number


def _holds_no_gauss(words: bytes) -> bool:
    # One appears only by drawing, which changes the words; as long as they have not changed there is none.
    global _without_gauss
    if words != _without_gauss:
        if np.random.get_state(legacy=False)["has_gauss"]:
            return False
        _without_gauss = words
    return True
